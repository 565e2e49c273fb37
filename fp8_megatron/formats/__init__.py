"""Formats of FP8 matrices: one object says how a matrix is cast, transposed, multiplied and gathered."""
