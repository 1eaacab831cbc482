"""Teacher targets on disk, found by the content of the document that they are for. docs/store.md has the format."""
