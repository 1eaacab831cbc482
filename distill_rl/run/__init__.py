"""One run: what is open of its files, its directory and job, its loop and checkpoints, and the look-ahead of its teachers."""
