"""Frozen models with quantised weights: made while they are read (`apply`), or stored like that (`stored`)."""
