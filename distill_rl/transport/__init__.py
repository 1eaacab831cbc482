"""How a teacher's outputs reach the student."""
