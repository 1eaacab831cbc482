"""Alignment by dynamic programming, for the stretches where bytes and offsets give no exact answer."""
