#!/usr/bin/env bash
# Tests what works on this machine's GPU and how fast it is, and writes a page of text and a JSON file into a folder.
#
#   bash launch/gpu_check.sh [--out DIR]              everything that needs no Ray, in under ten minutes
#   bash launch/gpu_check.sh --ray [--out DIR]        also the parts that need Ray and OmegaConf
#   bash launch/gpu_check.sh --device cpu --tiny      a trial without a GPU, at small sizes
#   bash launch/gpu_check.sh --list                   the parts
#   bash launch/gpu_check.sh --help                   further options
#
# Needs a Python with torch, transformers, numpy, safetensors, pytest and rich, but no network and no installation of this
# package.
# DISTILL_RL_PYTHON is the interpreter (python3). docs/gpu.md explains the page.
set -euo pipefail
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
# Reference results are computed on the CPU, by one process at a time, with up to eight threads.
cores=$(nproc)
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores < 8 ? cores : 8))}"
source "$root/launch/environment.sh"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "${DISTILL_RL_PYTHON:-python3}" -m tests.gpu.check "$@"
