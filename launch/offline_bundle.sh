#!/usr/bin/env bash
# Packs into a folder the wheels that a host without a package registry lacks to run this package, and prints how to install them there.
#
#   bash launch/offline_bundle.sh DIR                            for this machine's Python and processor, beside a PyTorch container's packages
#   bash launch/offline_bundle.sh DIR --python 3.12 --machine aarch64 --glibc 2.31
#   bash launch/offline_bundle.sh DIR --all                      everything, torch included
#   bash launch/offline_bundle.sh DIR --has torch,numpy          everything but these and what only they need
#   bash launch/offline_bundle.sh DIR --extras quantization,mlflow
#
# Versions are those of launch/constraints-ops.txt, which has all of launch/constraints.txt. Ray's wheel is packed without Java, RLlib,
# the dashboard's pages and debug symbols. DISTILL_RL_PYTHON is the interpreter that packs; packages come from where its pip finds them.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/make_environment.sh"
DISTILL_RL_NAME=offline_bundle
python="$(distill_rl_find_python)"
exec "$python" "$DISTILL_RL_ROOT/launch/offline_bundle.py" "$@"
