"""Shared by tests: ranks as processes, tiny models and runs."""

from fp8_megatron.device.cudnn import load_bundled

load_bundled()  # tests are programs of their own: before megatron-core, which imports Transformer Engine
