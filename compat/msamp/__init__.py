"""MS-AMP's names over fp8_megatron. Importing it changes nothing of torch."""

from .initialize import initialize, opt_levels
from .nn import clip_grad_norm_

__version__ = "0.4.0.post1"
__all__ = ["clip_grad_norm_", "initialize", "opt_levels"]
