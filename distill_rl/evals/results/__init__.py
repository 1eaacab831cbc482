"""Results: rows, scores, their uncertainty, files, and comparisons."""
