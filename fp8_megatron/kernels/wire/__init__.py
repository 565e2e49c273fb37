"""Sums of the rows that ranks send each other."""
