"""The benchmarks: what each asks, how it prompts, and how they are found by name."""
