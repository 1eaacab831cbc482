"""From files to token rows: sources, global order, tokenisation, packing."""
