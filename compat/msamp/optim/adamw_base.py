"""What MS-AMP's optimizers have in common, for optimizers that a user builds from a model's parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from fp8_megatron import FP8Optimizer
from fp8_megatron.any_model.data_parallel import Replication
from fp8_megatron.any_model.replica_hooks import MeetsForState, allow_ddp
from fp8_megatron.dtypes import E4M3, StorageDtype, StorageFormats
from fp8_megatron.quantization.weight_shards import stored_part
from fp8_megatron.sharding.storage import ModelStorage

_STATES = {
    torch.uint8: StorageDtype.FP8,
    torch.float16: StorageDtype.FP16,
    torch.bfloat16: StorageDtype.BF16,
    torch.float32: StorageDtype.FP32,
}


class Moments:
    """The arguments of MS-AMP's AdamW: moments are stored as asked. A class beside it holds the state.

    Args:
        params: parameters of a model after `LinearReplacer.replace`, or torch's param groups.
        exp_avg_dtype, exp_avg_sq_dtype: torch.uint8 (E4M3 with block scales), torch.float16 (with block scales),
            torch.bfloat16 or torch.float32. Vectors always keep FP32.
        bias_correction: only True. amsgrad, maximize: only False.
        tensor_scale: no effect; each block of 256 elements has a scale.

    Raises:
        ValueError: an option that the FP8 optimizer does not have, or another dtype.
    """

    #: AdamW's decay; False is Adam's L2 term.
    decoupled_weight_decay = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        exp_avg_dtype: torch.dtype = torch.uint8,
        exp_avg_sq_dtype: torch.dtype = torch.float16,
        tensor_scale: bool = True,
    ) -> None:
        kind = type(self).__name__
        for option, value, supported in (
            ("bias_correction", bias_correction, True),
            ("amsgrad", amsgrad, False),
            ("maximize", maximize, False),
        ):
            if value is not supported:
                raise ValueError(f"{kind}({option}={value}): the FP8 optimizer has only {option}={supported}")
        for option, dtype in (("exp_avg_dtype", exp_avg_dtype), ("exp_avg_sq_dtype", exp_avg_sq_dtype)):
            if dtype not in _STATES:
                known = ", ".join(str(known) for known in _STATES)
                raise ValueError(f"{kind}({option}={dtype}): moments are stored in {known}; choose one")
        groups = _groups(params)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self._start(
            groups,
            defaults | {"decoupled_weight_decay": self.decoupled_weight_decay},
            ModelStorage(
                _formats(groups, _STATES[exp_avg_dtype], _STATES[exp_avg_sq_dtype]), accumulator=StorageDtype.FP32
            ),
        )

    def _start(self, groups: list[dict[str, Any]], defaults: dict[str, Any], storage: ModelStorage) -> None:
        """Build the optimizer."""
        raise NotImplementedError


class LBAdamWBase(Moments, FP8Optimizer):
    """AdamW over FP8 weights, gradients and moments. Arguments are those of `Moments`.

    Over several ranks, gradients are averaged and states are sharded.
    """

    def _start(self, groups: list[dict[str, Any]], defaults: dict[str, Any], storage: ModelStorage) -> None:
        """Build the optimizer, over the replicas of the parameters' model."""
        model = model_of(groups)
        device = groups[0]["params"][0].device
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        is_replicated = model is not None and world is not None and world.size() > 1
        replication = Replication(world, device) if is_replicated else None
        if replication is not None:
            replication.broadcast([*model.parameters(), *model.buffers()])
        names = names_of(groups)
        FP8Optimizer.__init__(
            self, groups, defaults, names=names, values={}, storage=storage, ranks=replication, rules=["adamw"]
        )
        if model is not None and world is not None:
            allow_ddp(model, [space.buffer for space in self._spaces], replication)
        if replication is not None and storage.formats.master_weight is not None:
            model.register_state_dict_pre_hook(MeetsForState(replication, lambda: self.is_consolidated))


def model_of(groups: list[dict[str, Any]]) -> torch.nn.Module | None:
    """The model of the first parameter, where `LinearReplacer` left it."""
    whole = getattr(groups[0]["params"][0], "_whole", None)
    return None if whole is None else whole.model


def _groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    given = list(params)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    for group in groups:
        members = group["params"]
        group["params"] = [members] if isinstance(members, torch.Tensor) else list(members)
    return groups


def names_of(groups: list[dict[str, Any]]) -> dict[torch.nn.Parameter, str]:
    """Parameters → their names in the model, where `LinearReplacer` left them, or their places in the groups."""
    names: dict[torch.nn.Parameter, str] = {}
    for number, group in enumerate(groups):
        for index, param in enumerate(group["params"]):
            names[param] = getattr(param, "_param_name", f"param_groups[{number}].params[{index}]")
    return names


def _formats(groups: list[dict[str, Any]], exp_avg: StorageDtype, exp_avg_sq: StorageDtype) -> StorageFormats:
    """The level that weights and moments make: FP8 weights have a master in FP16, others are their own."""
    parts = [stored_part(param) for group in groups for param in group["params"] if param.requires_grad]
    in_fp8 = any(part is not None and part.payload.dtype == E4M3 for part in parts)
    weight, master = (StorageDtype.FP8, StorageDtype.FP16) if in_fp8 else (StorageDtype.FP16, None)
    return StorageFormats(weight, StorageDtype.FP8, master, exp_avg, exp_avg_sq)
