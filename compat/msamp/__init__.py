"""MS-AMP's names over fp8_megatron. Importing it changes nothing of torch."""

import sys

from .initialize import initialize, opt_levels
from .nn import clip_grad_norm_
from .refusals import Refusals

if Refusals not in sys.meta_path:
    sys.meta_path.append(Refusals)

__version__ = "0.4.0.post1"
__all__ = ["clip_grad_norm_", "initialize", "opt_levels"]
