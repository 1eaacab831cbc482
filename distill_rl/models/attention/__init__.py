"""Attention implementations: which one a model takes, and attention over packed documents."""
