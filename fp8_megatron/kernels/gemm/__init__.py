"""FP8 matrix products."""
