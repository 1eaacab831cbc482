#!/usr/bin/env bash
# Runs a command beside a Ray cluster over all nodes of a Slurm job, and ends both, whatever happens.
#
#   bash launch/ray_cluster.sh COMMAND [ARGUMENT...]          inside sbatch or salloc, on the first node
#
# {address} in an argument becomes the address of the cluster. The exit code is the command's; 1 where Ray did not start,
# 85 where a request to stop came before the command was started. SIGUSR1 and SIGTERM reach the command as SIGUSR1, and so does a
# SIGTERM to the steps alone: the grace time of a preemption begins with it.
#
#   RUN_DIR              folder that all nodes share; the cluster's token is kept there while it runs      (required)
#   LOGS                 folder for ray-NODE.log and what Ray's processes wrote                            (RUN_DIR/logs)
#   PYTHON               interpreter with distill_rl, on every node                                        (.venv/bin/python)
#   RAY_PORT             first port; node i takes RAY_PORT + 10 i to + 10 i + 9         (10000 to 15900, by the job's id)
#   RAY_INTERFACE        network interface that the nodes talk over                     (the one that leads to the head)
#   RAY_START_TIMEOUT    seconds in which all nodes must be up                                             (300)
#   RAY_OBJECT_STORE_BYTES  shared memory per node for Ray's objects                     (Ray's: 30 % of the memory)
#   RAY_DASHBOARD        true: Ray's dashboard on the head's 127.0.0.1 (needs the `dashboard` extra)       (false)
#   CONTAINER_IMAGE, CONTAINER_MOUNTS, CONTAINER_OPTIONS   of pyxis (srun --container-image=...); unset: no container
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
export PYTHON="${PYTHON:-$root/.venv/bin/python}" PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
unset RAY_AUTH_TOKEN # the job has a token of its own, and Ray would take the user's instead
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 PYTHONUNBUFFERED=1
export RAY_START_TIMEOUT="${RAY_START_TIMEOUT:-300}"
# Two jobs on one node should not meet: a hundred ports by the id of the job, below those that the kernel gives out (from 32768).
# Ids that differ by a multiple of 60 give the same: the second job is refused, and needs a RAY_PORT of its own.
export RAY_PORT="${RAY_PORT:-$((10000 + (SLURM_JOB_ID + ${SLURM_RESTART_COUNT:-0}) % 60 * 100))}"
for name in RAY_START_TIMEOUT RAY_PORT; do
    if [[ ! ${!name} =~ ^[0-9]+$ ]]; then
        complain "$name must be a whole number; got ${!name}"
        exit 2
    fi
done
logs="${LOGS:-$RUN_DIR/logs}"
nodes_of_job="$SLURM_JOB_NUM_NODES"

container=()
[[ -z ${CONTAINER_IMAGE:-} ]] || container+=("--container-image=$CONTAINER_IMAGE")
[[ -z ${CONTAINER_MOUNTS:-} ]] || container+=("--container-mounts=$CONTAINER_MOUNTS")
# shellcheck disable=SC2206 # several options in one variable
[[ -z ${CONTAINER_OPTIONS:-} ]] || container+=($CONTAINER_OPTIONS)
unbound=() # else Ray would have the one core of its task
[[ ! "$(scontrol show config)" =~ TaskPlugin\ *=\ *[a-z/,]*(affinity|cgroup) ]] || unbound=(--cpu-bind=none)
# A step uses all that the job has on a node, and steps share it.
on_all=(srun -u --overlap "${unbound[@]}" --nodes="$nodes_of_job" --ntasks="$nodes_of_job" --ntasks-per-node=1
    --kill-on-bad-exit=0 --wait=0)
[[ -z ${SLURM_CPUS_PER_TASK:-} ]] || on_all+=(--cpus-per-task="$SLURM_CPUS_PER_TASK")

shared= nodes= command= watcher= asked= heard= termed= steps_told=
pause() { read -rt "$1" <> <(:) || true; } # unlike sleep, a signal is heard at once, and no process is left
alive() { kill -0 "$1" 2>/dev/null; }
hand_on() { # to the command only: srun kills its tasks when it is told to end
    asked=yes heard=yes
    [[ -z $command ]] || kill -USR1 "$command" 2>/dev/null || true
}
# To the driver a second request is an order to end without saving. What Slurm sends at the end of a time of grace is none.
trap 'heard=yes; if [[ -n $steps_told ]]; then steps_told=; else hand_on; fi' USR1
trap 'heard=yes; [[ -n $asked && -z $termed ]] || hand_on; termed=yes' TERM
trap 'heard=yes; [[ -n $asked ]] || { steps_told=yes; hand_on; }' USR2 # of watch_nodes

wait_for() { # wait_for PID: its exit code, however often a signal interrupts the wait
    local code
    while true; do
        heard= code=0
        wait "$1" || code=$?
        [[ -n $heard ]] || return "$code"
    done
}

finish() { # the end of everything, in this order: command, Ray, its files
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

require_shared() { # every node must see what this one writes
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
        if [[ -n $asked ]] || ((SECONDS >= deadline)); then
            kill -KILL "$looking" 2>/dev/null || true
            [[ -z $asked ]] || { say "asked to stop before the command was started"; exit 85; }
            complain "the nodes did not answer within $RAY_START_TIMEOUT s (RAY_START_TIMEOUT)"
            return 1
        fi
        pause 0.2
    done
    wait_for "$looking"
}

missing() { # the nodes that have not said that they are ready
    local node
    for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
        [[ -e $shared/ready-$node ]] || echo "$node"
    done
}

tell_missing() { # tell_missing WHY: names the nodes and shows what they said last
    local node
    complain "$1; not ready: $(missing | paste -sd ' ')"
    for node in $(missing); do
        [[ ! -e $shared/failed-$node ]] || echo "    $node: $(cat -- "$shared/failed-$node")" >&2
        [[ ! -s $logs/ray-$node.log ]] || tail -n 5 -- "$logs/ray-$node.log" | sed "s/^/    $node: /" >&2
    done
}

start_nodes() {
    "${on_all[@]}" "${container[@]}" "$PYTHON" -m distill_rl.workers.cluster.node "$shared" "$logs" &
    nodes=$!
    local deadline=$((SECONDS + RAY_START_TIMEOUT + 30)) failed
    while [[ -n "$(missing)" ]]; do
        [[ -z $asked ]] && ! some_step_told || { say "asked to stop before the command was started"; exit 85; }
        failed=("$shared"/failed-*)
        if [[ -e ${failed[0]} ]]; then
            tell_missing "Ray did not start"
            return 1
        elif ! alive "$nodes"; then
            tell_missing "Ray's steps ended"
            return 1
        elif ((SECONDS >= deadline)); then
            tell_missing "Ray was not up after $RAY_START_TIMEOUT s"
            return 1
        fi
        pause 0.3
    done
}

some_step_told() { [[ -n "$(compgen -G "$shared/told-*")" ]]; }

watch_nodes() { # a driver whose cluster is gone notices by itself; one that does not is ended
    local told=
    while alive "$nodes"; do
        [[ -n $told ]] || ! some_step_told || { told=yes && kill -USR2 $$; }
        pause 1
    done
    local deadline=$((SECONDS + 120))
    while ((SECONDS < deadline)); do pause 1; done
    complain "all of Ray is gone, and the command did not end within 120 s: it is killed"
    kill -KILL "$command"
}

mkdir -p -- "$RUN_DIR" "$logs"
RUN_DIR="$(cd -- "$RUN_DIR" && pwd)" logs="$(cd -- "$logs" && pwd)"
rm -rf -- "$RUN_DIR/.ray-$SLURM_JOB_ID".* # of an earlier start of this job, which was killed
mine=" $(squeue --noheader --user="$EUID" --format=%A 2>/dev/null | paste -sd ' ' || true) "
for folder in "$RUN_DIR"/.ray-*.*; do # of jobs that were killed and are gone; only if the list is one that knows this job
    job="${folder##*/.ray-}" job="${job%%.*}"
    [[ $mine != *" $SLURM_JOB_ID "* || $mine == *" $job "* || ! -O $folder ]] || rm -rf -- "$folder"
done
shared="$(mktemp -d -- "$RUN_DIR/.ray-$SLURM_JOB_ID.XXXXXX")"
require_shared
(umask 077 && set -o noclobber && head -c 32 /dev/urandom | base64 >"$shared/token") # made anew, for this user only
start_nodes
address="$(cat -- "$shared/address")"
export RAY_AUTH_TOKEN_PATH="$shared/token"
say "Ray is up on $nodes_of_job nodes; the head is $address"

here=()
((${#container[@]} == 0)) || here=(srun -u --overlap "${unbound[@]}" --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME" "${container[@]}")
[[ -z $asked ]] || exit 85
# The command does not run as a task of Slurm or MPI, and libraries must not take it for one.
# shellcheck disable=SC2016 # expanded by the shell that becomes the command
"${here[@]}" bash -c 'for name in ${!SLURM@} ${!PMI@} ${!OMPI_@}; do unset "$name"; done; exec "$@"' \
    command "${@//\{address\}/$address}" &
command=$!
[[ -z $asked ]] || kill -USR1 "$command" 2>/dev/null || true # it came just now
watch_nodes &
watcher=$!
code=0
wait_for "$command" || code=$?
command=
# Killed by the signal itself: it came before the command listened, so there is nothing to save.
[[ $code -ne 138 || -z $asked ]] || code=85
exit "$code"
