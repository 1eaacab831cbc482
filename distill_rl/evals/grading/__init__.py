"""Grading of completions in child processes: answer extraction, normalisation and equivalence."""
