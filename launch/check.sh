#!/usr/bin/env bash
# Checks to run before a commit, in under two minutes: lint, format, types, import directions, fast unit tests.
#
#   bash launch/check.sh            changes nothing
#   bash launch/check.sh --fix      first lets ruff fix what it can
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
source "$DISTILL_RL_ROOT/launch/environment.sh"
cd -- "$DISTILL_RL_ROOT"

if [[ ${1:-} == --fix ]]; then
    "$PYTHON" -m ruff check --fix --quiet . || true
    "$PYTHON" -m ruff format --quiet .
elif [[ $# -gt 0 ]]; then
    echo "check: error: unknown argument $1; the only option is --fix" >&2
    exit 2
fi

failed=()
step() { # step NAME COMMAND...: runs the command and records a failure
    local name=$1
    shift
    echo "== $name"
    "$@" || failed+=("$name")
}
step lint "$PYTHON" -m ruff check .
step format "$PYTHON" -m ruff format --check --quiet .
step types "$PYTHON" -m mypy
step imports "$PYTHON" -m pytest -q tests/unit/test_imports.py
step units "$PYTHON" -m pytest -q tests/unit/config tests/unit/test_errors.py tests/unit/run/test_prefetch.py tests/unit/test_launch_scripts.py tests/properties

if ((${#failed[@]})); then
    echo "check: failed: ${failed[*]}" >&2
    exit 1
fi
echo "check: all good"
