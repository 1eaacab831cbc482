"""One run: its loop, its checkpoints, and the look-ahead that keeps teachers ahead of the student."""
