"""FP8 for any PyTorch model: linear layers, an optimizer and data parallelism behind `fp8_megatron.initialize`."""

from .linears import replace_linears
from .plain_model import plain_model
from .report import LinearReport, report

__all__ = ["LinearReport", "plain_model", "replace_linears", "report"]
