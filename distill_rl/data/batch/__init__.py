"""From the documents of a batch to the rows of every rank: tokenise, align, split, pack, lay out."""
