"""Judging answers in child processes: extraction, normalisation, equivalence."""
