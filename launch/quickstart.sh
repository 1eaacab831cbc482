#!/usr/bin/env bash
# Makes the quickstart's models and data, distils, trains the control, evaluates, exports, and prints a table.
#
#   bash launch/quickstart.sh [--seed N] [key=value ...]       writes runs/quickstart and runs/quickstart-ce
#   bash launch/quickstart.sh --cross [...]                    a teacher with another tokenizer; runs/quickstart-cross…
#   bash launch/quickstart.sh --stored [...]                   stores the teacher's targets first, then trains without it
#   bash launch/quickstart.sh --real [--cross] [...]           pretrained models, fetched once, and real text; runs/quickstart-real…
#
# Deletes the runs of an earlier quickstart; with --real, a run that was stopped goes on, and --clean starts over.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
source "$DISTILL_RL_ROOT/launch/environment.sh"
cd -- "$DISTILL_RL_ROOT"
clean=(--clean)
if [[ " $* " == *" --real "* ]]; then
    clean=()
    "$PYTHON" -c "import gguf" 2>/dev/null ||
        "$PYTHON" -m pip install --quiet --no-input --disable-pip-version-check --constraint launch/constraints.txt gguf
fi
exec "$PYTHON" -m distill_rl quickstart "${clean[@]}" "$@"
