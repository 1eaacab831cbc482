#!/usr/bin/env bash
# Makes or updates .venv-ops: it sees the packages of .venv, and has Ray's dashboard and metrics agent, W&B and MLflow. Does nothing if
# nothing has changed. Run it, or source it after setup.sh: it exports PYTHON_OPS (the environment's interpreter).
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"

PYTHON_OPS="$DISTILL_RL_ROOT/.venv-ops/bin/python"
export PYTHON_OPS

distill_rl_extension setup-ops .venv-ops dashboard,wandb,mlflow launch/constraints-ops.txt
