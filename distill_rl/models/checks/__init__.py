"""What is tried out when a model is loaded, for families that the tests do not cover."""
