"""Weights sharded over ranks in FP8, over torch's FSDP2."""

from .fsdp import FP8FullyShardedDataParallel, FsdpReplacer

__all__ = ["FP8FullyShardedDataParallel", "FsdpReplacer"]
