"""AdamW under MS-AMP's names."""

from ..refusals import refuse
from .adamw_base import LBAdamWBase

__getattr__ = refuse(__name__, {}, late={"FSDPAdamW": "msamp.optim.fsdp"})


class LBAdamW(LBAdamWBase):
    """AdamW over FP8 weights, gradients and moments."""
