#!/usr/bin/env bash
# Makes the quickstart's material, distils, trains the control, evaluates, exports, and prints the table.
#
#   bash launch/quickstart.sh [--seed N] [key=value ...]       runs go to runs/quickstart and runs/quickstart-ce
#   bash launch/quickstart.sh --cross [...]                    a teacher with another tokenizer; runs/quickstart-cross…
#
# It deletes what an earlier quickstart left there.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
source "$DISTILL_RL_ROOT/launch/environment.sh"
cd -- "$DISTILL_RL_ROOT"
exec "$PYTHON" -m distill_rl.quickstart --clean "$@"
