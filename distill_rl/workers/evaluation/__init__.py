"""Evaluation in Ray actors: of models offline, and of a student while it trains."""
