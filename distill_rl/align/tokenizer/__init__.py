"""One tokenizer: the exact bytes of its tokens, how it encodes, and what its family does to a text."""
