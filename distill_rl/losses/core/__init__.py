"""What all losses share: streaming over logits, what is computed per row, vocabulary shards, argument checks."""
