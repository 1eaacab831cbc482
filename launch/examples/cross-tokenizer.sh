#!/usr/bin/env bash
# Submits to Slurm: Llama-3.2-1B learns from Qwen3-4B, which has another tokenizer: two nodes of eight GPUs.
#
#   ACCOUNT=me PARTITION=gpu RUNS=/shared/runs bash launch/examples/cross-tokenizer.sh [key=value ...]
#
# The settings are those of configs/recipes/llama3.2-1b-from-qwen3-4b-2n8g.yaml; arguments override them. Models and
# data are fetched on this machine first (`hf download`), or are given as paths that all nodes see:
#   student.model=/models/student teachers.0.model=/models/teacher data.path='/data/climbmix/*.parquet'
set -euo pipefail
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"
source "$root/launch/setup.sh"
source "$root/launch/environment.sh"

runs="${RUNS:-runs}" name=llama3.2-1b-from-qwen3-4b-2n8g
"$PYTHON" -m distill_rl train -c "$root/configs/recipes/$name.yaml" --dry-run --gpus-per-node 8 \
    "$@" run.dir="$runs" run.name="$name" --resume auto
options=()
[[ -z ${ACCOUNT:-} ]] || options+=(--account="$ACCOUNT")
[[ -z ${PARTITION:-} ]] || options+=(--partition="$PARTITION")
exec sbatch "${options[@]}" "$runs/$name/submit.sbatch"
