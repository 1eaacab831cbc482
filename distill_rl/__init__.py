"""Off-policy knowledge distillation of causal language models."""

__version__ = "0.1.0"
