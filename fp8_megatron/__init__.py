"""fp8_megatron: LLM pre-training with FP8 end to end on megatron-core.

Importing it changes nothing and loads nothing.
"""

__version__ = "0.1.0"
