#!/usr/bin/env bash
# Makes or updates .venv in the repository. Does nothing if nothing has changed. Run it, or source it: it exports
# DISTILL_RL_ROOT and PYTHON (the environment's interpreter) and keeps the caller's working directory.
#
#   DISTILL_RL_PYTHON=/path/to/python3.12 bash launch/setup.sh     the interpreter of a new .venv (3.11 or newer)
#
# Packages come from the sources that pip is configured for. The default `torch` wheel may bring gigabytes of CUDA libraries:
# without a GPU, configure pip for CPU wheels before the first run (docs/development.md).
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/make_environment.sh"

PYTHON="$DISTILL_RL_ROOT/.venv/bin/python"
export PYTHON

distill_rl_install() {
    distill_rl_pip install --no-input \
        --editable "${DISTILL_RL_ROOT}[dev]" --constraint "$DISTILL_RL_ROOT/launch/constraints.txt"
}

distill_rl_environment setup .venv distill_rl_install pyproject.toml launch/constraints.txt launch/setup.sh
