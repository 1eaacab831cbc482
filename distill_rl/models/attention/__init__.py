"""Attention implementations: which one a model gets, and attention over packed documents."""
