"""MS-AMP's optimizers: `fp8_megatron.FP8Optimizer` under their names."""

import torch

from fp8_megatron import FP8Optimizer

from ..refusals import refuse
from .adam import DSAdam, LBAdam
from .adamw import LBAdamW
from .adamw_base import LBAdamWBase

__all__ = ["DSAdam", "FSDPAdam", "FSDPAdamW", "LBAdam", "LBAdamW", "LBAdamWBase", "named_class"]

__getattr__ = refuse(
    __name__,
    {"LBOptimizer": "all optimizers here are fp8_megatron.FP8Optimizer: derive from that"},
    late=dict.fromkeys(("FSDPAdam", "FSDPAdamW"), "msamp.optim.fsdp"),  # importing torch's FSDP2 takes seconds
)


def named_class(optimizer: torch.optim.Optimizer) -> type[FP8Optimizer]:
    """MS-AMP's class for a torch optimizer."""
    return LBAdamW if isinstance(optimizer, torch.optim.AdamW) else LBAdam
