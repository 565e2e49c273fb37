"""fp8_megatron: LLM pre-training with FP8 end to end on megatron-core."""

from .device.cudnn import load_bundled

__version__ = "0.1.0"

load_bundled()
