"""What a run across tokenizers depends on, checked for a user's own pair of tokenizers: the losses on its chunks and its stop tokens."""
