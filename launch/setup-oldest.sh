#!/usr/bin/env bash
# Makes or updates .venv-oldest with the oldest supported packages, on Python 3.12 if available. Does nothing if nothing has
# changed. Run it, or source it after setup.sh: it exports PYTHON_OLDEST (the environment's interpreter).
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/make_environment.sh"

PYTHON_OLDEST="$DISTILL_RL_ROOT/.venv-oldest/bin/python"
export PYTHON_OLDEST

distill_rl_oldest_install() {
    distill_rl_say "torch 2.11 needs about 4 GB for CUDA libraries, unless pip is configured for CPU wheels (docs/development.md)"
    distill_rl_pip install --no-input --editable "${DISTILL_RL_ROOT}[dev,liger]" \
        --constraint "$DISTILL_RL_ROOT/launch/constraints-oldest.txt"
}

distill_rl_oldest() {
    # pyenv does not put its interpreters on the PATH under their versions.
    local candidates=(python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12 python3.11 python3.13 python3)
    local DISTILL_RL_PYTHON="${DISTILL_RL_PYTHON:-${candidates[*]}}"
    distill_rl_environment setup-oldest .venv-oldest distill_rl_oldest_install \
        pyproject.toml launch/constraints-oldest.txt launch/setup-oldest.sh
}

distill_rl_oldest
