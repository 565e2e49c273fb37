"""Rotary position embedding of the QKV projection's output, and of its gradient."""
