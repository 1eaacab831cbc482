"""Results: rows and their summary, files, confidence intervals and comparisons."""
