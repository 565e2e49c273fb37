"""Flags of small runs for tests: of the trainer, its checkpoints and its errors, and on GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fp8_megatron.dtypes import StorageDtype

#: Flags of a model that a CPU steps in a few hundredths of a second; random tokens.
TINY_RUN: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "seq_length": 16,
    "vocab_size": 64,
    "make_vocab_size_divisible_by": 16,
    "micro_batch_size": 2,
    "mock_data": True,
    "num_workers": 0,
    "eval_interval": 0,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "lr": 1e-2,
    "lr_decay_style": "cosine",
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "train_iters": 1000,
    "eval_iters": 10,
    "log_interval": 1000,
    "tensorboard": False,
}

#: Over `TINY_RUN`: large enough that the CUDA kernels take their usual paths.
GPU_RUN: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "seq_length": 256,
    "vocab_size": 1024,
    "make_vocab_size_divisible_by": 128,
    "micro_batch_size": 4,
    "lr": 1e-3,
}
#: A model of Llama's style, for a model with a multiple of two heads.
LLAMA_STYLE_FLAGS: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "group_query_attention": True,
    "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
    "disable_bias_linear": True,
}
#: That of `GPU_RUN` in this style, whose steps are not recorded: to choose what layers keep for backward.
GPU_LLAMA_RUN: dict[str, Any] = {**GPU_RUN, **LLAMA_STYLE_FLAGS, "cuda_graph_impl": "none"}
#: The style with experts, and losses of their router.
EXPERT_FLAGS: dict[str, Any] = {
    **LLAMA_STYLE_FLAGS,
    "fp8_recipe": "delayed",
    "num_experts": 4,
    "moe_ffn_hidden_size": 256,
    "moe_aux_loss_coeff": 1e-2,
    "moe_z_loss_coeff": 1e-3,
}


def tiny_flags(output_dir: Path, **overrides: Any) -> list[str]:
    """Command-line flags of the tiny run; an override of None leaves a flag out."""
    flags: list[str] = ["--output-dir", str(output_dir)]
    for name, value in {**TINY_RUN, **overrides}.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(flag if value else "--no-" + flag[2:])
        elif isinstance(value, StorageDtype):
            flags += [flag, value.value]
        elif isinstance(value, list | tuple):
            flags += [flag, *map(str, value)]
        elif value is not None:
            flags += [flag, str(value)]
    return flags
