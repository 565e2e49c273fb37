"""Dtypes and explicit casts."""
