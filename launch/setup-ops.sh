#!/usr/bin/env bash
# Makes or updates .venv-ops: the packages of .venv, with Ray's dashboard and metrics agent, W&B and MLflow. Does nothing if
# nothing has changed. Run it, or source it after setup.sh: it exports PYTHON_OPS (the environment's interpreter).
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"

PYTHON_OPS="$DISTILL_RL_ROOT/.venv-ops/bin/python"
export PYTHON_OPS

distill_rl_ops_install() {
    distill_rl_pip install --no-input --editable "$DISTILL_RL_ROOT[dev,dashboard,wandb,mlflow]" \
        --constraint "$DISTILL_RL_ROOT/launch/constraints-ops.txt"
}

distill_rl_environment setup-ops .venv-ops distill_rl_ops_install \
    pyproject.toml launch/constraints-ops.txt launch/setup-ops.sh
