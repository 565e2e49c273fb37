"""Scales from amax histories, and counts of underflow."""
