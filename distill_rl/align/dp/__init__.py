"""Alignment by dynamic programming, for windows in which bytes and offsets give no exact answer."""
