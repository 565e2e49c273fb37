"""Sums of rows received from other ranks."""
