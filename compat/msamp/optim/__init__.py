"""MS-AMP's optimizers: `fp8_megatron.FP8Optimizer` under their names."""

from ..refusals import refuse
from .adamw import DSAdam, FSDPAdam, FSDPAdamW, LBAdam, LBAdamW, LBAdamWBase, named_class

__all__ = ["DSAdam", "FSDPAdam", "FSDPAdamW", "LBAdam", "LBAdamW", "LBAdamWBase", "named_class"]

__getattr__ = refuse(__name__, {"LBOptimizer": "all optimizers here are fp8_megatron.FP8Optimizer: derive from that"})
