"""Attention on FP8 operands."""
