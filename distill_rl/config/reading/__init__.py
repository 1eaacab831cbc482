"""From text to raw settings: files, overrides, interpolation, and the walk that checks types."""
