"""Rows grouped by expert: routing, movement of rows, products with weights, and the activation with its casts."""
