"""Rows grouped by expert: routing, movement of rows, and the activation of experts with its casts."""
