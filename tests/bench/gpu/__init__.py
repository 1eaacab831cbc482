"""Benchmarks that need a GPU, and the cost model that says what they should find."""
