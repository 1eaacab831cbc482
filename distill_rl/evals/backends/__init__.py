"""The backends that run a model on the items of a suite."""
