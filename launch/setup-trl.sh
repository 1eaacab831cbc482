#!/usr/bin/env bash
# Makes or updates .venv-trl: TRL with the torch and Transformers of .venv, for `launch/bench.sh methods --table peers`. Does
# nothing if nothing has changed. Run it, or source it after setup.sh: it exports PYTHON_TRL (the environment's interpreter).
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"

PYTHON_TRL="$DISTILL_RL_ROOT/.venv-trl/bin/python"
export PYTHON_TRL

distill_rl_trl_install() {
    distill_rl_pip install --no-input trl==1.16.0 torch transformers \
        --constraint "$DISTILL_RL_ROOT/launch/constraints.txt"
}

distill_rl_environment setup-trl .venv-trl distill_rl_trl_install launch/constraints.txt launch/setup-trl.sh
