#!/usr/bin/env bash
# The default test suite, or one of the lanes that need more than two cores and PyPI packages.
#
#   bash launch/test.sh                       everything that runs anywhere; the last line is pytest's
#   bash launch/test.sh -k packing -x         arguments go to pytest
#   bash launch/test.sh tests/unit            and so do paths
#   bash launch/test.sh oldest                the default suite with the oldest supported packages, in .venv-oldest
#   bash launch/test.sh gpu                   what needs a CUDA device
#   bash launch/test.sh vllm                  what needs vLLM, in an environment of its own, .venv-vllm
#   bash launch/test.sh faults                real processes killed, stopped and starved, and what is promised then
#   bash launch/test.sh slurm                 jobs on a real Slurm of two nodes, which it installs by apt-get and starts here
#   bash launch/test.sh service               the jobs service: what needs Ray's dashboard, in .venv-ops
#   bash launch/test.sh monitoring            Prometheus, W&B and MLflow against real runs, in .venv-ops
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
source "$DISTILL_RL_ROOT/launch/environment.sh"
cd -- "$DISTILL_RL_ROOT"

if [[ ${1:-} == oldest ]]; then
    shift
    source "$DISTILL_RL_ROOT/launch/setup-oldest.sh"
    PYTHON=$PYTHON_OLDEST # and on to the default suite
elif [[ ${1:-} == gpu ]]; then
    shift
    exec "$PYTHON" -m pytest tests/gpu "$@"
elif [[ ${1:-} == vllm ]]; then
    shift
    source "$DISTILL_RL_ROOT/launch/setup-vllm.sh"
    exec "$PYTHON_VLLM" -m pytest tests/vllm tests/unit/evals/backends/test_vllm.py "$@"
elif [[ ${1:-} == faults ]]; then
    shift
    exec "$PYTHON" -m pytest tests/faults "$@"
elif [[ ${1:-} == slurm ]]; then
    shift
    # As root, where Debian's packages can be had; what is missing otherwise is the reason that the tests are skipped for.
    if ! PATH="$PATH:/usr/sbin" command -v munged slurmctld slurmd sbatch >/dev/null && [[ $EUID -eq 0 ]] && command -v apt-get >/dev/null; then
        echo "test: installing slurm-wlm and munge" >&2
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends slurm-wlm munge; } >/dev/null ||
            echo "test: apt-get could not install them" >&2
    fi
    exec "$PYTHON" -m pytest tests/slurm "$@"
elif [[ ${1:-} == service || ${1:-} == monitoring ]]; then
    lane=$1
    shift
    source "$DISTILL_RL_ROOT/launch/setup-ops.sh"
    [[ $lane == service ]] || source "$DISTILL_RL_ROOT/launch/setup-prometheus.sh"
    exec "$PYTHON_OPS" -m pytest "tests/$lane" "$@"
elif [[ -n ${1:-} && $1 != -* && ! -e ${1%%::*} ]]; then
    echo "test: error: unknown lane $1; the lanes are: oldest, gpu, vllm, faults, slurm, service, monitoring. Without one, the default suite runs" >&2
    exit 2
fi
if [[ $# -eq 0 ]]; then
    # `testpaths` of pyproject.toml, in two processes, file by file (tests/conftest.py). The suite starts some thousand
    # processes, and none is to compile the package anew.
    unset PYTHONDONTWRITEBYTECODE
    exec "$PYTHON" -m pytest -n 2 --dist loadscope --no-loadscope-reorder
fi
exec "$PYTHON" -m pytest "$@"
