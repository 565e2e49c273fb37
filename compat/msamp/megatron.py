"""Not provided: MS-AMP's copies of Megatron-LM's files."""

from .refusals import not_provided

raise not_provided(__name__, "pretrain_gpt.py of fp8_megatron runs megatron-core with Megatron's own flags in FP8")
