"""What the files of a model say about it, without loading weights."""
