"""Flat parameter spaces: gradients, their reduction, weights and their gather."""
