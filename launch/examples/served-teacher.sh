#!/usr/bin/env bash
# Submits two Slurm jobs: one serves a teacher with vLLM, one replica per node; the other trains a student against it.
#
#   MODEL=/models/big TOKENIZER=/models/big CONFIG=my.yaml RUN_DIR=/shared/runs/my bash launch/examples/served-teacher.sh [key=value ...]
#
# CONFIG is a configuration whose only teacher has backend endpoint and api vllm; its url and model are set here. The job that
# trains waits until every server answers, and the servers end when it is over, whatever the reason. When it is requeued at its time
# limit, it waits for the servers again; give them a longer limit than it (SERVER_TIME).
set -euo pipefail
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"

for name in MODEL CONFIG RUN_DIR; do
    if [[ -z ${!name:-} ]]; then
        echo "served-teacher: error: $name must be set; see the top of launch/examples/served-teacher.sh" >&2
        exit 2
    fi
done
export MODEL CONFIG RUN_DIR DISTILL_RL_ROOT="$root"
export TOKENIZER="${TOKENIZER:-$MODEL}"
export TOP_K="${TOP_K:-64}"                       # loss.top_k
export MAX_LENGTH="${MAX_LENGTH:-4096}"           # data.max_length
export PORT="${PORT:-8000}"
export START_S="${START_S:-3600}"                 # most seconds until every server answers
export VLLM="${VLLM:-$root/.venv-vllm/bin/vllm}"  # the program, on every node
export SERVER_NODES="${SERVER_NODES:-1}" GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
mkdir -p -- "$RUN_DIR"
RUN_DIR="$(cd -- "$RUN_DIR" && pwd)"
export URLS="$RUN_DIR/.servers"                   # written by the servers' job: one address per line
rm -f -- "$URLS"

options=()
[[ -z ${ACCOUNT:-} ]] || options+=(--account="$ACCOUNT")
[[ -z ${PARTITION:-} ]] || options+=(--partition="$PARTITION")

# The training job is held until the servers' job, which has to know it, is submitted.
train="$(sbatch --parsable --hold "${options[@]}" --job-name=train --nodes="${TRAIN_NODES:-1}" --ntasks-per-node=1 \
    --gpus-per-node="$GPUS_PER_NODE" --exclusive --mem=0 --time="${TRAIN_TIME:-04:00:00}" --signal=B:USR1@120 --requeue \
    --open-mode=append --output="$RUN_DIR/train-%j.log" /dev/stdin "$@" <<'TRAIN'
#!/usr/bin/env bash
set -euo pipefail
ready() { # whether the servers' addresses are known, and every server answers
    local url
    [[ -s $URLS ]] || return 1
    mapfile -t urls <"$URLS"
    for url in "${urls[@]}"; do
        curl --silent --fail --max-time 10 --output /dev/null "$url/health" || return 1
    done
}
deadline=$((SECONDS + START_S))
until ready; do
    if ((SECONDS > deadline)); then
        echo "served-teacher: error: not every server answers after START_S=$START_S; see servers-*.log" >&2
        exit 1
    fi
    sleep "${POLL_S:-5}"
done
list="$(IFS=,; echo "${urls[*]}")"
exec bash "$DISTILL_RL_ROOT/launch/slurm.sbatch" "teachers.0.endpoint.url=[$list]" "teachers.0.model=$MODEL" \
    "teachers.0.tokenizer=$TOKENIZER" "loss.top_k=$TOP_K" "data.max_length=$MAX_LENGTH" "$@"
TRAIN
)"
train="${train%%;*}"
trap 'scancel "$train"' ERR

export TRAIN_JOB="$train"
servers="$(sbatch --parsable "${options[@]}" --job-name=servers --nodes="$SERVER_NODES" --ntasks-per-node=1 \
    --gpus-per-node="$GPUS_PER_NODE" --exclusive --mem=0 --time="${SERVER_TIME:-24:00:00}" --output="$RUN_DIR/servers-%j.log" \
    /dev/stdin <<'SERVERS'
#!/usr/bin/env bash
set -euo pipefail
# One token of every prompt is generated, so a server needs one more than a row has.
srun --kill-on-bad-exit=1 "$VLLM" serve "$MODEL" --served-model-name "$MODEL" --port "$PORT" \
    --tensor-parallel-size "$GPUS_PER_NODE" --max-logprobs "$TOP_K" --max-model-len "$((MAX_LENGTH + 1))" &
server=$!
trap 'kill "$server" 2>/dev/null || true; wait "$server" || true; rm -f -- "$URLS"' EXIT
scontrol show hostnames "$SLURM_JOB_NODELIST" | sed "s|.*|${SCHEME:-http}://&:$PORT|" >"$URLS.new"
mv -- "$URLS.new" "$URLS"
# Until the servers have ended, or the training job is neither running nor going to. Slurm may be out of reach for a while; a job that has
# long ended is an error, too.
unknown=0
while kill -0 "$server" 2>/dev/null && ((unknown < 30)); do
    if job="$(squeue --noheader --jobs="$TRAIN_JOB" 2>/dev/null)"; then
        [[ -n $job ]] || break
        unknown=0
    else
        unknown=$((unknown + 1))
    fi
    sleep "${POLL_S:-20}"
done
SERVERS
)"
scontrol release "$train"
echo "submitted job ${servers%%;*}, which serves $MODEL, and job $train, which trains; logs are in $RUN_DIR"
