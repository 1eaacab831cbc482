"""Time and memory of the losses, beside those of other implementations."""
