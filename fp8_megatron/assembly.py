"""Finds what a kind of model has in the rooms above `models`, as `models.registry` finds its architecture."""

from __future__ import annotations

from collections.abc import Callable

from .checkpoint.loading import FirstWeights
from .config.schema import CheckpointConfig, Config
from .mcore.parts import Parts
from .models.architecture import Architecture
from .models.registry import architecture_of
from .moe import architecture as moe
from .moe.megatron.parts import mixture_parts
from .moe.router_report import TOKENS_FILE
from .moe.upcycling import Upcycling

#: (architecture, its parts in megatron-core's GPT). Others have none of their own.
_PARTS: tuple[tuple[Architecture, Callable[[Config], Parts]], ...] = ((moe, mixture_parts),)
#: What parts of layers may write, of any run.
LAYER_FILES = (TOKENS_FILE,)


def parts_of(config: Config) -> Parts:
    """What a configuration's model has in megatron-core's GPT beside a decoder's parts."""
    architecture = architecture_of(config.model)
    return next((parts(config) for each, parts in _PARTS if each is architecture), Parts())


def first_weights(checkpoint: CheckpointConfig) -> FirstWeights | None:
    """What makes a run's first weights of another model's checkpoint; None: they are in the checkpoint."""
    return None if checkpoint.upcycles is None else Upcycling(checkpoint.upcycles)
