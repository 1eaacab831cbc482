"""Destinations for metrics: JSON lines, TensorBoard, the terminal, W&B and MLflow."""
