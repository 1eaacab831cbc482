"""Questions from files: where they are, how they are read, and what the published data look like."""
