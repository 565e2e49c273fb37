"""MS-AMP's optimizers: `fp8_megatron.FP8Optimizer` under their names."""

from typing import Any

from ..refusals import not_provided
from .adamw import DSAdam, LBAdam, LBAdamW, LBAdamWBase, named_class

__all__ = ["DSAdam", "FSDPAdam", "FSDPAdamW", "LBAdam", "LBAdamW", "LBAdamWBase", "named_class"]


def __getattr__(name: str) -> Any:
    if name in ("FSDPAdam", "FSDPAdamW"):
        from . import fsdp  # importing torch's FSDP2 takes seconds

        return getattr(fsdp, name)
    if name == "LBOptimizer":
        raise not_provided(f"{__name__}.{name}", "all optimizers here are fp8_megatron.FP8Optimizer: derive from that")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
