#!/usr/bin/env bash
# Makes or updates .venv-triton: it sees the packages of .venv, and has Triton, torchao and gguf. Does nothing if nothing has changed. Run it,
# or source it after setup.sh: it exports PYTHON_TRITON (the environment's interpreter). A torch for CUDA comes with Triton and
# needs no such environment.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"

PYTHON_TRITON="$DISTILL_RL_ROOT/.venv-triton/bin/python"
export PYTHON_TRITON

distill_rl_extension setup-triton .venv-triton triton,quantization,gguf launch/constraints.txt
