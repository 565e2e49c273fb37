"""Linear layers in FP8, in place of a model's own."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist

import fp8_megatron
from fp8_megatron import FP8Linear
from fp8_megatron.any_model.te_modules import te_kind

from ..common.dtype import Dtypes, QType
from ..common.dtype.dtypes import WEIGHT_STORAGE

__all__ = ["FP8Linear", "LinearReplacer", "remember"]


def _takes_fp8(name: str, module: torch.nn.Module) -> bool:
    """Whether a linear layer is torch's, without MS-AMP's mark of one that stays: ``layer.use_fp32_linear = True``."""
    return te_kind(module) is None and not getattr(module, "use_fp32_linear", False)


class Whole:
    """The model that a parameter is of. A copied or pickled parameter forgets it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = weakref.ref(model)

    @property
    def model(self) -> torch.nn.Module | None:
        """The model, while it exists."""
        return self._model()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def remember(model: torch.nn.Module) -> None:
    """Leave on each parameter its name and its model, for optimizers that are given parameters alone."""
    whole = Whole(model)
    for name, parameter in model.named_parameters():
        parameter._param_name, parameter._whole = name, whole  # type: ignore[attr-defined]


class LinearReplacer:
    """MS-AMP's `LinearReplacer` over `fp8_megatron.replace_linears`."""

    @classmethod
    def replace(
        cls,
        model: torch.nn.Module,
        weight_qtype: QType = Dtypes.kfloat16,
        src_rank: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> torch.nn.Module:
        """Turn the model's linear layers into `FP8Linear`, in place, and return the model.

        Layers whose sizes an FP8 GEMM does not take stay as they are, and the log names them. An optimizer is built
        from ``model.parameters()`` afterwards. It sends rank 0's weights to the other ranks.

        Args:
            weight_qtype: how trained weights are stored: kfloat16 with block scales, or kfloat8_e4m3.

        Raises:
            ValueError: another `weight_qtype`, or a `src_rank` other than 0.
        """
        if weight_qtype not in (Dtypes.kfloat16, Dtypes.kfloat8_e4m3):
            raise ValueError(f"weight_qtype({weight_qtype.name}) is not kfloat16 or kfloat8_e4m3: choose one of them")
        if src_rank != 0:
            raise ValueError(f"src_rank({src_rank}) is not 0: models start with rank 0's weights")
        fp8_megatron.replace_linears(model, weight=WEIGHT_STORAGE[weight_qtype], filter=_takes_fp8)
        remember(model)
        return model
