#!/usr/bin/env bash
# Scores models on evaluation suites, offline. Takes the arguments of `distill-rl eval`.
#
#   bash launch/eval.sh --model runs/my/export --suites math500,mmlu,gsm8k --data evals --out results/my
#   bash launch/eval.sh --model teacher=/models/big student=runs/my/export --suites mmlu --data evals --out results/both
#   bash launch/eval.sh --list
#
# The same command continues after a stop. Exit code 85: stopped by SIGTERM or SIGUSR1.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
source "$DISTILL_RL_ROOT/launch/environment.sh"
exec "$PYTHON" -m distill_rl eval "$@"
