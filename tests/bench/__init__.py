"""Measurements and their tests. `launch/bench.sh NAME` runs one, prints its table and writes docs/benchmarks/NAME.json."""
