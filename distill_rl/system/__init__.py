"""What every part may use: whole-file writes, redaction, ownership of folders, signals, GPU memory errors."""
