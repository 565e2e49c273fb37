"""Scales from amax histories, counts of underflow."""
