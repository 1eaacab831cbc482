"""What all losses share: streaming over logits, vocabulary shards, argument checks, reductions."""
