"""Runs on a Ray cluster that is always there, through its Jobs API: submitted, watched and stopped by name."""

import distill_rl.workers  # noqa: F401  (sets what Ray must find in the environment when it is imported)
