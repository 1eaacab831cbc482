"""The benchmark suites: their questions, prompts and scoring, and the registry that finds them by name."""
