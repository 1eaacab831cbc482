"""Files → rows by index: formats, columns, blocks of large files, and the cache."""
