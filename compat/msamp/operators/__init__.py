"""Explicit FP8 operations on `ScalingTensor`."""
