"""Stores of teacher targets."""
