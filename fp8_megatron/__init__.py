"""fp8_megatron: LLM pre-training with FP8 end to end on megatron-core.

Importing the package loads no other module and has no side effects.
"""

__version__ = "0.1.0"
