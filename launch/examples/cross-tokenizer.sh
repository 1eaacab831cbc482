#!/usr/bin/env bash
# Submits a Slurm job that distils Qwen3-4B into Llama-3.2-1B (different tokenizers) on two nodes with eight GPUs each.
#
#   ACCOUNT=me PARTITION=gpu RUNS=/shared/runs bash launch/examples/cross-tokenizer.sh [key=value ...]
#
# The settings are those of configs/recipes/llama3.2-1b-from-qwen3-4b-2n8g.yaml; arguments override them.
# Download models and data on this machine first (`hf download`), or pass paths that all nodes can read:
#   student.model=/models/student teachers.0.model=/models/teacher data.path='/data/climbmix/*.parquet'
# Fill a folder `evals` here for its suites (docs/evaluation.md#data), or pass evaluate.suites=[] evaluate.data=null.
set -euo pipefail
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"
source "$root/launch/setup.sh"
source "$root/launch/environment.sh"

runs="${RUNS:-runs}" name=llama3.2-1b-from-qwen3-4b-2n8g
"$PYTHON" -m distill_rl train -c "$root/configs/recipes/$name.yaml" --dry-run --gpus-per-node 8 \
    "$@" run.dir="$runs" run.name="$name" --resume auto
options=()
[[ -z ${ACCOUNT:-} ]] || options+=(--account="$ACCOUNT")
[[ -z ${PARTITION:-} ]] || options+=(--partition="$PARTITION")
exec sbatch "${options[@]}" "$runs/$name/submit.sbatch"
