#!/usr/bin/env bash
# Runs the default test suite, or one of the test groups that need more time, other packages or other software.
#
#   bash launch/test.sh                       the default suite, which runs anywhere; the last line is pytest's
#   bash launch/test.sh -k packing -x         arguments are passed to pytest,
#   bash launch/test.sh tests/unit            and so are paths
#   bash launch/test.sh oldest                the default suite with the oldest supported packages, in .venv-oldest
#   bash launch/test.sh examples              whole runs of minutes: the quickstart across tokenizers and from a store, each of configs/features, two nodes, equal bits
#   bash launch/test.sh layouts               training on four ranks: data-parallel, tensor-parallel, hybrid
#   bash launch/test.sh faults                fault handling: real processes are killed, stopped and starved
#   bash launch/test.sh gpu                   tests that need a CUDA device
#   bash launch/test.sh vllm                  tests that need vLLM, in .venv-vllm
#   bash launch/test.sh triton                the Triton kernels, interpreted and compiled without a GPU, in .venv-triton
#   bash launch/test.sh quantization          frozen weights of 8 and 4 bits, which need torchao, in .venv-triton
#   bash launch/test.sh real                  pretrained models, which are fetched once, in .venv-triton; Gemma with ACCEPT_GEMMA_TERMS=1
#   bash launch/test.sh slurm                 jobs on a real Slurm, installed by apt-get and started here: two nodes that share this machine; three with networks of their own and slurmdbd
#   bash launch/test.sh service               the jobs service, which needs Ray's dashboard, in .venv-ops
#   bash launch/test.sh monitoring            Prometheus, W&B and MLflow with real runs, in .venv-ops
#   bash launch/test.sh all                   the default suite and all groups, one after the other, and a table of them
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
source "$DISTILL_RL_ROOT/launch/environment.sh"
cd -- "$DISTILL_RL_ROOT"
groups="default oldest layouts examples faults gpu vllm triton quantization real slurm service monitoring"

group=default
if [[ -n ${1:-} && $1 != -* && ! -e ${1%%::*} ]]; then
    group=$1
    shift
fi
case $group in
default | oldest)
    if [[ $group == oldest ]]; then
        source "$DISTILL_RL_ROOT/launch/setup-oldest.sh"
        PYTHON=$PYTHON_OLDEST
    fi
    if [[ $# -gt 0 && $1 != --junitxml=* ]]; then
        exec "$PYTHON" -m pytest "$@"
    fi
    # Runs `testpaths` of pyproject.toml in two processes, file by file (tests/conftest.py). The suite starts many processes,
    # which must share compiled bytecode.
    unset PYTHONDONTWRITEBYTECODE
    exec "$PYTHON" -m pytest -n 2 --dist loadscope --no-loadscope-reorder -m "not four_ranks and not long_run" "$@"
    ;;
layouts)
    exec "$PYTHON" -m pytest tests/distributed -m four_ranks "$@"
    ;;
examples)
    exec "$PYTHON" -m pytest tests/examples tests/cli -m long_run "$@"
    ;;
faults)
    exec "$PYTHON" -m pytest tests/faults -n 2 --dist loadscope "$@"
    ;;
gpu)
    exec "$PYTHON" -m pytest tests/gpu "$@"
    ;;
vllm)
    source "$DISTILL_RL_ROOT/launch/setup-vllm.sh"
    exec "$PYTHON_VLLM" -m pytest tests/vllm tests/unit/evals/backends/test_vllm.py tests/unit/teacher/test_vllm.py "$@"
    ;;
triton)
    # Without an environment that has Triton, the tests are skipped and name what is missing.
    if bash "$DISTILL_RL_ROOT/launch/setup-triton.sh"; then
        PYTHON="$DISTILL_RL_ROOT/.venv-triton/bin/python"
    fi
    exec "$PYTHON" -m pytest tests/triton -n 2 --dist loadscope "$@"
    ;;
quantization)
    source "$DISTILL_RL_ROOT/launch/setup-triton.sh"
    exec "$PYTHON_TRITON" -m pytest tests/unit/models/test_quantization.py tests/distributed/test_quantized_{student,teacher}.py tests/cli/test_quantized_{student,teacher}.py -n 2 --dist loadscope "$@"
    ;;
real)
    source "$DISTILL_RL_ROOT/launch/setup-triton.sh"
    # It judges evaluations, and nothing else needs it and what it requires. Its tests skip without it.
    "$PYTHON_TRITON" -m pip show -qq lm-eval || "$PYTHON_TRITON" -m pip install -q -c launch/constraints.txt lm-eval==0.4.13 || true
    exec "$PYTHON_TRITON" -m pytest tests/real "$@"
    ;;
slurm)
    # Installs Slurm if that is possible: as root, with apt-get. Otherwise the tests are skipped and name what is missing.
    packages="slurm-wlm munge slurmdbd mariadb-server iproute2"
    for program in munged slurmctld slurmd sbatch slurmdbd mariadbd ip; do
        if ! PATH="$PATH:/usr/sbin:/sbin" command -v "$program" >/dev/null && [[ $EUID -eq 0 ]] && command -v apt-get >/dev/null; then
            echo "test: installing $packages" >&2
            # shellcheck disable=SC2086 # several packages in one variable
            { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends $packages; } >/dev/null ||
                echo "test: apt-get could not install $packages" >&2
            break
        fi
    done
    exec "$PYTHON" -m pytest tests/slurm "$@"
    ;;
service | monitoring)
    source "$DISTILL_RL_ROOT/launch/setup-ops.sh"
    [[ $group == service ]] || source "$DISTILL_RL_ROOT/launch/setup-prometheus.sh"
    exec "$PYTHON_OPS" -m pytest "tests/$group" "$@"
    ;;
all)
    exec "$PYTHON" launch/test_all.py "$@" $groups
    ;;
*)
    echo "test: error: unknown test group $group; the test groups are: ${groups// /, }, all. Without one, the default suite runs" >&2
    exit 2
    ;;
esac
