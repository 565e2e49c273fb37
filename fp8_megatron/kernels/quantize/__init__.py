"""Casts to FP8: whole tensors, output gradients, blocks."""
