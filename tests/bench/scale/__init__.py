"""What the driver costs with many ranks, measured with workers that compute nothing."""
