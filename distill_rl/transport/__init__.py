"""The teacher's outputs on their way to the student."""
