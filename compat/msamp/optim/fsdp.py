"""Adam and AdamW over the shards that `msamp.fsdp.FP8FullyShardedDataParallel` makes."""

from __future__ import annotations

from typing import Any

import torch

from fp8_megatron import FP8Optimizer
from fp8_megatron.any_model.fsdp import FullyShard
from fp8_megatron.any_model.fsdp_reduce import reduce_in_fp8
from fp8_megatron.sharding.storage import ModelStorage

from .adam import AdamArguments
from .adamw_base import Moments, model_of, names_of


class FSDPAdamW(Moments, FP8Optimizer):
    """AdamW over this rank's shards. Arguments are those of `Moments`.

    Raises:
        ValueError: the parameters are not those of a sharded model.
    """

    def _start(self, groups: list[dict[str, Any]], defaults: dict[str, Any], storage: ModelStorage) -> None:
        model = model_of(groups)
        if model is None:
            raise ValueError(
                f"{type(self).__name__} takes the parameters of a model after FP8FullyShardedDataParallel(model)"
            )
        names, ranks = names_of(groups), FullyShard(storage)
        FP8Optimizer.__init__(
            self, groups, defaults, names=names, values={}, storage=storage, ranks=ranks, rules=["adamw"]
        )
        # FSDP2 looks at its parameters' memory again after a load.
        torch.nn.Module.load_state_dict(model, {}, strict=False)
        reduce_in_fp8(model)


class FSDPAdam(AdamArguments, FSDPAdamW):
    """Adam over this rank's shards."""
