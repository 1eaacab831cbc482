#!/usr/bin/env bash
# Makes or updates .venv in the repository; does nothing when nothing changed. Run it, or source it: it exports
# DISTILL_RL_ROOT and PYTHON (the environment's interpreter) and leaves the caller's working directory alone.
#
#   DISTILL_RL_PYTHON=/path/to/python3.12 bash launch/setup.sh     the interpreter of a new .venv (3.11 or newer)
#
# Packages come from wherever pip is configured to look. A plain `torch` wheel may bring gigabytes of CUDA libraries;
# where there is no GPU, point pip at CPU wheels before the first run (docs/development.md).
set -euo pipefail

DISTILL_RL_ROOT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="$DISTILL_RL_ROOT/.venv/bin/python"
export DISTILL_RL_ROOT PYTHON

distill_rl_find_python() {
    local candidate
    for candidate in ${DISTILL_RL_PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    echo "setup: error: no Python 3.11 or newer with the venv and ensurepip modules found; install one, or set DISTILL_RL_PYTHON" >&2
    return 2
}

distill_rl_wanted() { # what the environment depends on; a change of it installs again
    (cd -- "$DISTILL_RL_ROOT" && { printf '%s\n' "$PWD"; cat pyproject.toml launch/constraints.txt launch/setup.sh; } |
        sha256sum | cut -d ' ' -f 1)
}

distill_rl_ready() { [[ -x $PYTHON && "$(cat -- "$DISTILL_RL_ROOT/.venv/.stamp" 2>/dev/null)" == "$1" ]]; }

distill_rl_install() {
    local wanted=$1 venv="$DISTILL_RL_ROOT/.venv" base log
    if ! "$PYTHON" -c 'import pip' 2>/dev/null; then
        base="$(distill_rl_find_python)"
        echo "setup     making .venv with $base" >&2
        "$base" -m venv --clear "$venv"
    fi
    log="$venv/install.log"
    rm -f -- "$venv/.stamp"
    echo "setup     installing the pinned packages (several minutes the first time; log in .venv/install.log)" >&2
    if ! "$PYTHON" -m pip install --disable-pip-version-check --no-input \
        --editable "$DISTILL_RL_ROOT[dev]" --constraint "$DISTILL_RL_ROOT/launch/constraints.txt" >"$log" 2>&1; then
        tail -n 20 -- "$log" >&2
        echo "setup: error: pip could not install the packages; the whole log is in $log" >&2
        return 1
    fi
    printf '%s' "$wanted" >"$venv/.stamp.$$" && mv -f -- "$venv/.stamp.$$" "$venv/.stamp"
    echo "setup     ready" >&2
}

distill_rl_setup() {
    local wanted lock
    wanted="$(distill_rl_wanted)"
    if distill_rl_ready "$wanted"; then return; fi
    # Two first calls at once: the second waits here and then finds the work done.
    mkdir -p -- "$DISTILL_RL_ROOT/.cache"
    exec {lock}>"$DISTILL_RL_ROOT/.cache/setup.lock"
    flock --nonblock "$lock" || { echo "setup     waiting for another setup to finish" >&2; flock "$lock"; }
    distill_rl_ready "$wanted" || distill_rl_install "$wanted"
    exec {lock}>&-
}

distill_rl_setup
