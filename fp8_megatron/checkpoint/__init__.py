"""Saving, resuming and resharding."""
