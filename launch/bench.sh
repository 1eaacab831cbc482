#!/usr/bin/env bash
# Runs a benchmark, prints a table and writes docs/benchmarks/NAME.json with hardware and commit.
#
#   bash launch/bench.sh NAME [--out JSON] [arguments of the benchmark]
#
# Use an otherwise idle machine: no benchmark fails because it is slow.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
source "$DISTILL_RL_ROOT/launch/environment.sh"
cd -- "$DISTILL_RL_ROOT"

name=${1:-}
names=$(cd distill_rl/bench && ls -- *.py | sed -e 's/\.py$//' -e '/^_/d' -e '/^record$/d' | paste -sd ' ')
if [[ -z $name || " $names " != *" $name "* ]]; then
    echo "bench: error: unknown benchmark '$name'; the benchmarks are: $names" >&2
    exit 2
fi
shift
exec "$PYTHON" -m "distill_rl.bench.$name" "$@"
