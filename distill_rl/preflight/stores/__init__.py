"""Stores of teacher targets before a run starts: making them, what they hold, and whether they have every document."""
