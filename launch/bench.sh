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
names="" module=""
for file in $(cd distill_rl/bench && grep -l '^if __name__ == "__main__"' -- *.py gpu/*.py); do
    benchmark=$(basename -- "$file" .py)
    names+=" $benchmark"
    if [[ $benchmark == "$name" ]]; then
        path=${file%.py}
        module=distill_rl.bench.${path//\//.}
    fi
done
if [[ -z $module ]]; then
    echo "bench: error: unknown benchmark '$name'; the benchmarks are:$names" >&2
    exit 2
fi
shift
exec "$PYTHON" -m "$module" "$@"
