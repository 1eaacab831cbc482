"""What is right and how fast it is on a machine with a GPU; plain functions that need neither Ray nor pytest."""
