#!/usr/bin/env bash
# Shows what works on this machine's GPU and how fast it is; writes one page of text and one JSON into a folder.
#
#   bash launch/gpu_check.sh [--out DIR]              all that needs no Ray, in under ten minutes
#   bash launch/gpu_check.sh --ray [--out DIR]        also what needs Ray, OmegaConf and pytest
#   bash launch/gpu_check.sh --device cpu --tiny      the same at small sizes without a GPU, to see that it works
#   bash launch/gpu_check.sh --help                   the other options
#
# It needs a Python with torch, transformers, numpy and safetensors, and neither a network nor an installation:
# DISTILL_RL_PYTHON names the interpreter (python3). docs/gpu.md explains the page.
set -euo pipefail
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
# The truth that results are compared with is computed on the CPU, by one process at a time: with up to eight threads.
cores=$(nproc)
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores < 8 ? cores : 8))}"
source "$root/launch/environment.sh"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "${DISTILL_RL_PYTHON:-python3}" -m distill_rl.gpu_check "$@"
