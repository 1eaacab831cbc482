"""Submits, monitors and stops runs on an existing Ray cluster by name, through its Jobs API."""

import distill_rl.workers  # noqa: F401  (sets environment variables that Ray reads when it is imported)
