#!/usr/bin/env bash
# Runs a benchmark, prints a table and writes docs/benchmarks/NAME.json with hardware and commit.
#
#   bash launch/bench.sh                          lists the benchmarks
#   bash launch/bench.sh NAME [--out JSON] [arguments of the benchmark]
#
# Use an otherwise idle machine: no benchmark fails because it is slow.
set -euo pipefail
if [[ ! -d "$(dirname -- "${BASH_SOURCE[0]}")/../tests/bench" ]]; then
    echo "bench: error: benchmarks are in tests/bench of the repository, which a package does not have; run this script in a clone" >&2
    exit 2
fi
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
source "$DISTILL_RL_ROOT/launch/environment.sh"
cd -- "$DISTILL_RL_ROOT"

name=${1:-}
# A benchmark is a file that ends with its main program; helpers of benchmarks have none.
files=$(grep -l '^    sys.exit(main())' tests/bench/*.py tests/bench/*/*.py)
file=$(grep -E "/$name\.py$" <<<"$files" || true)
if [[ -z $name ]]; then
    for each in $(sort <<<"$files"); do # with the first line of its docstring
        title=$(grep -m 1 '^"""' "$each")
        title=${title//\"/}
        printf '%-22s %s\n' "$(basename "$each" .py)" "${title%.}"
    done
    exit 0
fi
if [[ ! $name =~ ^[a-z_]+$ || -z $file ]]; then
    names=$(sed -e 's|.*/||' -e 's|\.py$||' <<<"$files" | sort | paste -sd ' ')
    echo "bench: error: unknown benchmark '$name'; the benchmarks are: $names" >&2
    exit 2
fi
shift
if [[ $name == served ]]; then
    source "$DISTILL_RL_ROOT/launch/setup-vllm.sh"
    PYTHON=$PYTHON_VLLM
fi
if [[ $name == memory || " $* " == *" pretrained "* ]]; then # these need torchao, or gguf
    source "$DISTILL_RL_ROOT/launch/setup-triton.sh"
    PYTHON=$PYTHON_TRITON
fi
module=${file%.py}
export PYTHONPATH=$DISTILL_RL_ROOT${PYTHONPATH:+:$PYTHONPATH}
exec "$PYTHON" -m "${module//\//.}" "$@"
