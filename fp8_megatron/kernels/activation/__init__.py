"""GELU and SwiGLU with the cast to FP8."""
