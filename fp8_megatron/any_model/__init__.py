"""FP8 for any PyTorch model: linear layers, an optimizer and data parallelism behind `fp8_megatron.initialize`."""

from .linears import replace_linears
from .report import LinearReport, report

__all__ = ["LinearReport", "replace_linears", "report"]
