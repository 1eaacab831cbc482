"""Which settings are refused, and which have no effect."""
