"""Activations of an MLP with the cast to FP8."""
