"""FP8 layers and fused functions on torch alone."""
