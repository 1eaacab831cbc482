#!/usr/bin/env bash
# Makes or updates .venv-triton: the packages of .venv, with Triton and torchao. Does nothing if nothing has changed. Run it, or source it
# after setup.sh: it exports PYTHON_TRITON (the environment's interpreter). A torch for CUDA comes with Triton and needs no
# such environment.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"

PYTHON_TRITON="$DISTILL_RL_ROOT/.venv-triton/bin/python"
export PYTHON_TRITON

distill_rl_triton_install() {
    distill_rl_pip install --no-input --editable "$DISTILL_RL_ROOT[dev,triton,quantization]" \
        --constraint "$DISTILL_RL_ROOT/launch/constraints.txt"
}

distill_rl_environment setup-triton .venv-triton distill_rl_triton_install \
    pyproject.toml launch/constraints.txt launch/setup-triton.sh
