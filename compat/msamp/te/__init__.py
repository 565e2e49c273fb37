"""Transformer Engine's modules with FP8 weights at rest."""

from .replacer import TeReplacer

__all__ = ["TeReplacer"]
