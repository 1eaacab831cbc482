#!/usr/bin/env bash
# Starts a Ray cluster on all nodes of a Slurm job, runs a command beside it, and always ends both.
#
#   bash launch/ray_cluster.sh COMMAND [ARGUMENT...]          inside sbatch or salloc, on the first node
#
# {address} in an argument is replaced by the address of the cluster. The exit code is that of the command; 1 if Ray did not
# start; 85 if a request to stop came before the command was started. SIGUSR1 and SIGTERM are forwarded to the command as
# SIGUSR1. So is a SIGTERM that only the job's steps get, with which the grace time of a preemption begins.
#
#   RUN_DIR              folder that all nodes share; contains the cluster's token while it runs           (required)
#   LOGS                 folder for ray-NODE.log and the logs of Ray's processes                           (RUN_DIR/logs)
#   PYTHON               interpreter with distill_rl, on every node                                        (.venv/bin/python)
#   RAY_PORT             first port; node i uses RAY_PORT + 10 i to + 10 i + 9    (10000 to 15900: the first free range from the job's own on)
#   RAY_INTERFACE        network interface between the nodes                            (the one that routes to another node)
#   RAY_START_TIMEOUT    seconds that the start of all nodes may take                                      (300)
#   RAY_OBJECT_STORE_BYTES  shared memory per node for Ray's objects                     (Ray's: 30 % of the memory)
#   RAY_DASHBOARD        true: Ray's dashboard on the head's 127.0.0.1 (needs the `dashboard` extra)       (false)
#   CONTAINER            what runs a command in a container: a prefix (apptainer exec IMAGE), or options of srun (--container-image=IMAGE)
#   CONTAINER_IMAGE, CONTAINER_MOUNTS, CONTAINER_OPTIONS   options for pyxis (srun --container-image=...); unset: no container
set -euo pipefail

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
say() { echo "ray_cluster: $*"; }
complain() { echo "ray_cluster: error: $*" >&2; }

for name in RUN_DIR SLURM_JOB_ID SLURM_JOB_NUM_NODES; do
    if [[ -z ${!name:-} ]]; then
        complain "$name must be set; run this inside a Slurm job, see the top of launch/ray_cluster.sh"
        exit 2
    fi
done
if [[ $# -eq 0 ]]; then
    complain "a command is needed; see the top of launch/ray_cluster.sh"
    exit 2
fi
source "$root/launch/environment.sh"
export PYTHON="${PYTHON:-$root/.venv/bin/python}"
# In a repository, not beside an installed package, whose modules would be found in place of the standard library's.
[[ ! -d $root/distill_rl ]] || export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
unset RAY_AUTH_TOKEN # the user's token, which Ray would prefer to the one of this job
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 PYTHONUNBUFFERED=1
export RAY_task_events_max_num_task_in_gcs="${RAY_task_events_max_num_task_in_gcs:-10000}" # 4 KiB each, on the head
export RAY_task_events_max_dropped_task_attempts_tracked_per_job_in_gcs="${RAY_task_events_max_dropped_task_attempts_tracked_per_job_in_gcs:-1000}"
export RAY_START_TIMEOUT="${RAY_START_TIMEOUT:-300}"
for name in RAY_START_TIMEOUT ${RAY_PORT:+RAY_PORT}; do
    if [[ ! ${!name} =~ ^[0-9]+$ ]]; then
        complain "$name must be a whole number; got ${!name}"
        exit 2
    fi
done
export SLURM_EXPORT_ENV=ALL # for the job's own steps, whatever the job itself was given
node_names="$(scontrol show hostnames "${SLURM_JOB_NODELIST:-}" | paste -sd ' ')"
RAY_PEER="$(read -r _ peer _ <<<"$node_names"; [[ -z ${peer:-} ]] || scontrol show node "$peer" | sed -nE 's/.*NodeAddr=([^ ]+).*/\1/p')"
export RAY_NODES="$node_names" RAY_PEER
logs="${LOGS:-$RUN_DIR/logs}"
nodes_of_job="$SLURM_JOB_NUM_NODES"

container=()
[[ -z ${CONTAINER_IMAGE:-} ]] || container+=("--container-image=$CONTAINER_IMAGE")
[[ -z ${CONTAINER_MOUNTS:-} ]] || container+=("--container-mounts=$CONTAINER_MOUNTS")
# shellcheck disable=SC2206 # several options in one variable
[[ -z ${CONTAINER_OPTIONS:-} ]] || container+=($CONTAINER_OPTIONS)
prefix=()
# shellcheck disable=SC2206 # several words in one variable
if [[ ${CONTAINER:-} == --* ]]; then container+=($CONTAINER); elif [[ -n ${CONTAINER:-} ]]; then prefix=($CONTAINER); fi
unbound=() # without CPU binding, which would confine Ray to the single core of its task
[[ ! "$(scontrol show config)" =~ TaskPlugin\ *=\ *[a-z/,]*(affinity|cgroup) ]] || unbound=(--cpu-bind=none)
# A step uses all resources of the job on a node, and shares them with other steps.
on_all=(srun -u --overlap "${unbound[@]}" --nodes="$nodes_of_job" --ntasks="$nodes_of_job" --ntasks-per-node=1
    --kill-on-bad-exit=0 --wait=0)
[[ -z ${SLURM_CPUS_PER_TASK:-} ]] || on_all+=(--cpus-per-task="$SLURM_CPUS_PER_TASK")

shared= nodes= command= watcher= stop_requested= interrupted= term_received= steps_signalled=
pause() { read -rt "$1" <> <(:) || true; } # like sleep, but a signal interrupts it and it starts no process
alive() { kill -0 "$1" 2>/dev/null; }
forward_stop() { # to the command only: srun would kill its tasks on such a signal
    stop_requested=yes interrupted=yes
    [[ -z $command ]] || kill -USR1 "$command" 2>/dev/null || true
}
# The driver treats a second request as an order to end without saving, so signals that only repeat a request are not forwarded:
#   USR1   forwarded, except the first after a USR2: Slurm signals the batch script at the end of the grace time.
#   TERM   forwarded, except the first after another request.
#   USR2   from watch_nodes: the steps got a SIGTERM. Forwarded as the first request only.
trap 'interrupted=yes; if [[ -n $steps_signalled ]]; then steps_signalled=; else forward_stop; fi' USR1
trap 'interrupted=yes; [[ -n $stop_requested && -z $term_received ]] || forward_stop; term_received=yes' TERM
trap 'interrupted=yes; [[ -n $stop_requested ]] || { steps_signalled=yes; forward_stop; }' USR2

wait_for() { # wait_for PID: waits for a process and returns its exit code; continues when a signal interrupts the wait
    local code
    while true; do
        interrupted= code=0
        wait "$1" || code=$?
        [[ -n $interrupted ]] || return "$code"
    done
}

finish() { # ends the command, then Ray, and deletes its files
    local code=$?
    trap - EXIT
    trap '' USR1 USR2 TERM INT
    [[ -z $watcher ]] || kill "$watcher" 2>/dev/null || true
    [[ -z $command ]] || ! alive "$command" || kill -KILL "$command" 2>/dev/null || true
    if [[ -n $nodes ]] && alive "$nodes"; then
        : >"$shared/stop"
        local deadline=$((SECONDS + 60))
        while alive "$nodes" && ((SECONDS < deadline)); do
            kill -USR2 "$nodes" 2>/dev/null || true
            pause 0.5
        done
        if alive "$nodes"; then
            complain "Ray's steps did not end within 60 s and are killed"
            kill -TERM "$nodes" 2>/dev/null || true
        fi
    fi
    if [[ -n $nodes ]] && ! wait "$nodes" && [[ $code -eq 0 ]]; then
        complain "Ray did not end in order on some node; see $logs"
    fi
    [[ -z $shared ]] || rm -rf -- "$shared"
    exit "$code"
}
trap finish EXIT

require_shared() { # fails unless every node can read a file that this one writes
    local text="$SLURM_JOB_ID-$RANDOM$RANDOM"
    echo "$text" >"$shared/canary"
    # shellcheck disable=SC2016 # expanded on the node
    "${on_all[@]}" bash -c '
        end=$((SECONDS + 30))
        until [[ "$(cat -- "$1/canary" 2>/dev/null)" == "$2" ]]; do
            if ((SECONDS >= end)) || [[ ! -d $1 ]]; then
                echo "ray_cluster: error: node ${SLURMD_NODENAME:-?} does not see $1: RUN_DIR must be on a file system that all nodes share" >&2
                exit 1
            fi
            read -rt 1 <> <(:) || true
        done' canary "$shared" "$text" &
    local looking=$! deadline=$((SECONDS + RAY_START_TIMEOUT))
    while alive "$looking"; do
        if [[ -n $stop_requested ]] || ((SECONDS >= deadline)); then
            kill -KILL "$looking" 2>/dev/null || true
            [[ -z $stop_requested ]] || { say "asked to stop before the command was started"; exit 85; }
            complain "the nodes did not answer within $RAY_START_TIMEOUT s (RAY_START_TIMEOUT)"
            return 1
        fi
        pause 0.2
    done
    wait_for "$looking"
}

missing() { # prints the nodes that are not ready
    local node
    for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
        [[ -e $shared/ready-$node ]] || echo "$node"
    done
}

ended_steps() { # prints `NODE: HOW` of each node whose step has ended, as srun says it
    sed -nE -e 's/^srun: error: ([^ :]+): tasks? [0-9,-]+: (.*)/\1: \2/p' \
        -e 's/^srun: error: (Task launch .* failed on node ([^ :]+).*)/\2: \1/p' "$shared/srun" 2>/dev/null || true
}

report_missing() { # report_missing REASON: names the nodes that are not ready, those that failed, and the end of their logs
    local node bad
    complain "$1; not ready: $(missing | paste -sd ' ')"
    ended_steps | sort -u | sed 's/^/    /' >&2
    bad="$({ ended_steps | sed 's/:.*//'; compgen -G "$shared/failed-*" | sed 's/.*\/failed-//' || true; } | sort -u | paste -sd ,)"
    if [[ -n $bad && $(tr , '\n' <<<"$bad" | wc -l) -lt $nodes_of_job ]]; then
        complain "if the other nodes are well, submit the job again with --exclude=$bad"
    fi
    for node in $(missing); do
        [[ ! -e $shared/failed-$node ]] || echo "    $node: $(cat -- "$shared/failed-$node")" >&2
        [[ ! -s $logs/ray-$node.log ]] || tail -n 5 -- "$logs/ray-$node.log" | sed "s/^/    $node: /" >&2
    done
}

start_nodes() {
    "${on_all[@]}" "${container[@]}" "${prefix[@]}" "$PYTHON" -m distill_rl.workers.cluster.node "$shared" "$logs" 2> >(tee -- "$shared/srun" >&2) &
    nodes=$!
    local deadline=$((SECONDS + RAY_START_TIMEOUT + 30)) failed
    while [[ -n "$(missing)" ]]; do
        [[ -z $stop_requested ]] && ! some_step_signalled || { say "asked to stop before the command was started"; exit 85; }
        failed=("$shared"/failed-*)
        if [[ -e ${failed[0]} ]]; then
            report_missing "Ray did not start"
            return 1
        elif ! alive "$nodes" || [[ -n "$(ended_steps)" ]]; then
            report_missing "Ray's steps ended"
            return 1
        elif ((SECONDS >= deadline)); then
            report_missing "Ray was not up after $RAY_START_TIMEOUT s"
            return 1
        fi
        pause 0.3
    done
}

some_step_signalled() { [[ -n "$(compgen -G "$shared/told-*")" ]]; }

watch_nodes() {
    # Reports a SIGTERM to the steps as USR2. When all of Ray has ended, the driver has 120 s to notice and end; then it is killed.
    local reported=
    while alive "$nodes"; do
        [[ -n $reported ]] || ! some_step_signalled || { reported=yes && kill -USR2 $$; }
        pause 1
    done
    local deadline=$((SECONDS + 120))
    while ((SECONDS < deadline)); do pause 1; done
    complain "Ray has ended on all nodes, and the command did not end within 120 s: it is killed"
    kill -KILL "$command"
}

mkdir -p -- "$RUN_DIR" "$logs"
RUN_DIR="$(cd -- "$RUN_DIR" && pwd)" logs="$(cd -- "$logs" && pwd)"
rm -rf -- "$RUN_DIR/.ray-$SLURM_JOB_ID".* # left by an earlier start of this job that was killed
mine=" $(squeue --noheader --user="$EUID" --format=%A 2>/dev/null | paste -sd ' ' || true) "
for folder in "$RUN_DIR"/.ray-*.*; do # left by killed jobs; only if the list of jobs is valid, that is, contains this one
    job="${folder##*/.ray-}" job="${job%%.*}"
    [[ $mine != *" $SLURM_JOB_ID "* || $mine == *" $job "* || ! -O $folder ]] || rm -rf -- "$folder"
done
shared="$(mktemp -d -- "$RUN_DIR/.ray-$SLURM_JOB_ID.XXXXXX")"
require_shared
(umask 077 && set -o noclobber && head -c 32 /dev/urandom | base64 >"$shared/token") # new, and readable by this user only
start_nodes
address="$(cat -- "$shared/address")"
export RAY_AUTH_TOKEN_PATH="$shared/token"
say "Ray is up on $nodes_of_job nodes; the head is $address"
if [[ ${RAY_DASHBOARD:-} == true ]]; then
    port="$(cat -- "$shared/dashboard")"
    say "dashboard: ssh -L $port:127.0.0.1:$port ${SLURMD_NODENAME:-$(uname -n)}, then open 127.0.0.1:$port in a browser; its token is in $shared/token"
fi

here=()
((${#container[@]} == 0)) || here=(srun -u --overlap "${unbound[@]}" --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME" "${container[@]}")
[[ -z $stop_requested ]] || exit 85
# Without these variables, libraries do not mistake the command for a task of Slurm or MPI.
# shellcheck disable=SC2016 # expanded by the shell that becomes the command
"${here[@]}" "${prefix[@]}" bash -c 'for name in ${!SLURM@} ${!PMI@} ${!OMPI_@}; do unset "$name"; done; exec "$@"' \
    command "${@//\{address\}/$address}" &
command=$!
[[ -z $stop_requested ]] || kill -USR1 "$command" 2>/dev/null || true # a request that came while the command was being started
watch_nodes &
watcher=$!
code=0
wait_for "$command" || code=$?
command=
# Killed by SIGUSR1, which came before the command handled it: there is nothing to save.
[[ $code -ne 138 || -z $stop_requested ]] || code=85
exit "$code"
