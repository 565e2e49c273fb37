"""Predictions of the memory that a run needs."""
