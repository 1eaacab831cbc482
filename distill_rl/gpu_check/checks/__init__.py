"""What the GPU check looks at: one module per part, called by name (`parts.py`)."""
