"""The quickstart: makes models and data offline, runs a distillation and its control, and compares them in a table."""
