"""Where metrics go: JSON lines, TensorBoard, the terminal, W&B and MLflow."""
