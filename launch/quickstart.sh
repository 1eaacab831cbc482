#!/usr/bin/env bash
# Makes the quickstart's models and data, distils, trains the control, evaluates, exports, and prints a table.
#
#   bash launch/quickstart.sh [--seed N] [key=value ...]       writes runs/quickstart and runs/quickstart-ce
#   bash launch/quickstart.sh --cross [...]                    a teacher with another tokenizer; runs/quickstart-cross…
#   bash launch/quickstart.sh --stored [...]                   stores the teacher's targets first, then trains without it
#
# Deletes the runs of an earlier quickstart.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
source "$DISTILL_RL_ROOT/launch/environment.sh"
cd -- "$DISTILL_RL_ROOT"
exec "$PYTHON" -m distill_rl quickstart --clean "$@"
