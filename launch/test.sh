#!/usr/bin/env bash
# The default test suite, or one of the lanes that need more than two cores and PyPI packages.
#
#   bash launch/test.sh                       everything that runs anywhere; the last line is pytest's
#   bash launch/test.sh -k packing -x         arguments go to pytest
#   bash launch/test.sh tests/unit            and so do paths
#   bash launch/test.sh gpu                   what needs a CUDA device
#   bash launch/test.sh vllm                  what needs vLLM, in an environment of its own, .venv-vllm
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
source "$DISTILL_RL_ROOT/launch/environment.sh"
cd -- "$DISTILL_RL_ROOT"

if [[ ${1:-} == gpu ]]; then
    shift
    exec "$PYTHON" -m pytest tests/gpu "$@"
elif [[ ${1:-} == vllm ]]; then
    shift
    source "$DISTILL_RL_ROOT/launch/setup-vllm.sh"
    exec "$PYTHON_VLLM" -m pytest tests/vllm tests/unit/evals/test_vllm.py "$@"
elif [[ -n ${1:-} && $1 != -* && ! -e ${1%%::*} ]]; then
    echo "test: error: unknown lane $1; the lanes are: gpu, vllm. Without one, the default suite runs" >&2
    exit 2
fi
if [[ $# -eq 0 ]]; then
    # All of tests/ (`testpaths` of pyproject.toml), in two processes: what starts Ray, and what computes.
    exec "$PYTHON" -m pytest -n 2 --dist loadscope --no-loadscope-reorder
fi
exec "$PYTHON" -m pytest "$@"
