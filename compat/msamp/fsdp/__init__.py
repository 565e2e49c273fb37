"""Weights sharded over ranks in FP8, over torch's FSDP2."""

from .fully_sharded_data_parallel import FP8FullyShardedDataParallel
from .replacer import FsdpReplacer

__all__ = ["FP8FullyShardedDataParallel", "FsdpReplacer"]
