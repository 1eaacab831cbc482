"""Estimated memory of the workers, by part, so that a user sees what to change.

`launch/bench.sh memory` compares the estimate with measured peaks (docs/benchmarks/memory.md).
"""
