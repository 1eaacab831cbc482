#!/usr/bin/env bash
# The default test suite, or one of the lanes that need more than two cores and PyPI packages.
#
#   bash launch/test.sh                       everything that runs anywhere; the last line is pytest's
#   bash launch/test.sh -k packing -x         arguments go to pytest
#   bash launch/test.sh tests/unit            and so do paths
#   bash launch/test.sh gpu                   what needs a CUDA device
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
source "$DISTILL_RL_ROOT/launch/environment.sh"
cd -- "$DISTILL_RL_ROOT"

case "${1:-}" in
gpu)
    shift
    exec "$PYTHON" -m pytest tests/gpu "$@"
    ;;
"" | -* | tests | tests/* | */*) ;;
*)
    echo "test: error: unknown lane $1; the lanes are: gpu. Without one, the default suite runs" >&2
    exit 2
    ;;
esac
for argument in "$@"; do
    # Paths among the arguments replace the whole suite.
    if [[ -e ${argument%%::*} ]]; then exec "$PYTHON" -m pytest "$@"; fi
done
exec "$PYTHON" -m pytest tests "$@"
