#!/usr/bin/env bash
# Sourced by the setup scripts: makes an environment once, and again if its dependencies have changed, one process at a time.
# Keeps the caller's working directory.
set -euo pipefail

DISTILL_RL_ROOT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
export DISTILL_RL_ROOT

# distill_rl_environment NAME FOLDER INSTALL DEPENDENCY...
#   NAME        name of the script, for messages
#   FOLDER      folder of the environment, in the repository
#   INSTALL     function that calls distill_rl_pip
#   DEPENDENCY  word, or file in the repository; a change of any of them installs again
distill_rl_environment() {
    local DISTILL_RL_NAME=$1 DISTILL_RL_FOLDER=$2 install=$3 stamp lock
    local DISTILL_RL_VENV="$DISTILL_RL_ROOT/$DISTILL_RL_FOLDER"
    stamp="$(distill_rl_stamp "${@:4}")"
    if distill_rl_ready "$stamp"; then return; fi
    # If two processes come here at once, the second waits for the lock and then finds the work done.
    mkdir -p -- "$DISTILL_RL_ROOT/.cache"
    exec {lock}>"$DISTILL_RL_ROOT/.cache/$DISTILL_RL_NAME.lock"
    flock --nonblock "$lock" || { distill_rl_say "waiting for another setup to finish"; flock "$lock"; }
    distill_rl_ready "$stamp" || distill_rl_make "$stamp" "$install"
    exec {lock}>&-
}

# distill_rl_extension NAME FOLDER EXTRAS CONSTRAINTS: an environment that sees the packages of .venv, and has those of the extras of
# pyproject.toml (EXTRAS, with commas) that .venv lacks. Ready in seconds. It is made anew if .venv has changed.
distill_rl_extension() {
    local distill_rl_extras=$3 distill_rl_constraints=$4
    distill_rl_environment "$1" "$2" distill_rl_extend .venv/pyvenv.cfg .venv/.stamp "launch/$1.sh" "$4"
}

distill_rl_extend() {
    local base="$DISTILL_RL_ROOT/.venv" packages script
    local purelib='import sysconfig; print(sysconfig.get_path("purelib"))'
    "$base/bin/python" -m venv --clear --without-pip "$DISTILL_RL_VENV"
    packages="$("$DISTILL_RL_VENV/bin/python" -c "$purelib")"
    # `addsitedir` also reads the .pth files of .venv, one of which names this repository.
    printf 'import site; site.addsitedir("%s")\n' "$("$base/bin/python" -c "$purelib")" >"$packages/venv.pth"
    distill_rl_pip install --no-input "distill_rl[$distill_rl_extras]" --constraint "$DISTILL_RL_ROOT/$distill_rl_constraints" || return 1
    # The commands of .venv (`distill-rl`, `ray`), which must start this environment's interpreter.
    for script in "$base"/bin/*; do
        if [[ -f $script && ! -e $DISTILL_RL_VENV/bin/${script##*/} ]] && head -n 2 -- "$script" | grep -qF "$base/bin/python"; then
            sed "1,2s|$base/bin/python|$DISTILL_RL_VENV/bin/python|" "$script" >"$DISTILL_RL_VENV/bin/${script##*/}"
            chmod +x "$DISTILL_RL_VENV/bin/${script##*/}"
        fi
    done
}

distill_rl_say() { printf '%-9s %s\n' "$DISTILL_RL_NAME" "$*" >&2; }

distill_rl_stamp() {
    (
        cd -- "$DISTILL_RL_ROOT"
        printf '%s\n' "$PWD"
        for item in "$@"; do if [[ -f $item ]]; then cat -- "$item"; else printf '%s\n' "$item"; fi; done
    ) | sha256sum | cut -d ' ' -f 1
}

distill_rl_ready() { [[ -x $DISTILL_RL_VENV/bin/python && "$(cat -- "$DISTILL_RL_VENV/.stamp" 2>/dev/null)" == "$1" ]]; }

distill_rl_make() {
    local stamp=$1 install=$2 base
    if [[ $install != distill_rl_extend ]] && ! "$DISTILL_RL_VENV/bin/python" -c 'import pip' 2>/dev/null; then
        base="$(distill_rl_find_python)"
        distill_rl_say "making $DISTILL_RL_FOLDER with $base"
        "$base" -m venv --clear "$DISTILL_RL_VENV"
    fi
    rm -f -- "$DISTILL_RL_VENV/.stamp" "$DISTILL_RL_VENV/install.log"
    if [[ $install == distill_rl_extend ]]; then
        distill_rl_say "making $DISTILL_RL_FOLDER from .venv (log in $DISTILL_RL_FOLDER/install.log)"
    else
        distill_rl_say "installing (several minutes the first time; log in $DISTILL_RL_FOLDER/install.log)"
    fi
    "$install" || return 1
    printf '%s' "$stamp" >"$DISTILL_RL_VENV/.stamp.$$" && mv -f -- "$DISTILL_RL_VENV/.stamp.$$" "$DISTILL_RL_VENV/.stamp"
    distill_rl_say "ready"
}

distill_rl_find_python() {
    local candidate
    for candidate in ${DISTILL_RL_PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    echo "$DISTILL_RL_NAME: error: no Python 3.11 or newer with the venv and ensurepip modules found; install one, or set DISTILL_RL_PYTHON" >&2
    return 2
}

distill_rl_pip() { # distill_rl_pip COMMAND ARGUMENTS...: prints the end of the log if pip fails
    local log="$DISTILL_RL_VENV/install.log"
    "$DISTILL_RL_VENV/bin/python" -m pip "$1" --disable-pip-version-check "${@:2}" >>"$log" 2>&1 && return
    tail -n 20 -- "$log" >&2
    echo "$DISTILL_RL_NAME: error: pip could not install the packages; the whole log is in $log" >&2
    return 1
}
