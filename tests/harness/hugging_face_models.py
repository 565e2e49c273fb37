"""Small models with random weights made by transformers, which conversions are tested with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCAB_SIZE = 203
_GPT2 = {"vocab_size": VOCAB_SIZE, "n_positions": 40, "n_embd": 96, "n_layer": 3, "n_head": 4}
_LLAMA = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}

#: 5 of 12 pairs, or 7 of 16, turn at least once within 40 positions, and are not divided by the whole factor.
_YARN = {"rope_theta": 60.0, "rope_type": "yarn", "original_max_position_embeddings": 40}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

#: Name → (class of transformers, settings): tied and untied; multi-head, grouped and multi-query; biases; head width.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2_tied": ("GPT2", {**_GPT2, "layer_norm_epsilon": 1e-4}),
    "gpt2_erf": ("GPT2", {**_GPT2, "activation_function": "gelu"}),
    "gpt2_untied": ("GPT2", {**_GPT2, "n_inner": 160, "tie_word_embeddings": False}),
    "llama_mha": ("Llama", {**_LLAMA, "num_key_value_heads": 4, "rms_norm_eps": 1e-4}),
    "llama_gqa": ("Llama", {**_LLAMA, "num_key_value_heads": 2, "rope_theta": 50000.0}),
    "llama_gqa_tied": ("Llama", {**_LLAMA, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama_mqa_wide_heads": ("Llama", {**_LLAMA, "num_key_value_heads": 1, "head_dim": 32}),
    "llama_biases": ("Llama", {**_LLAMA, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}),
    "llama_3.1": (
        "Llama",
        {
            **_LLAMA,
            "num_key_value_heads": 2,
            "max_position_embeddings": 16384,
            "rope_parameters": {"rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0, **_LLAMA3},
        },
    ),
    "llama_linear": (
        "Llama",
        {**_LLAMA, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0}},
    ),
    "llama_yarn": ("Llama", {**_LLAMA, "num_key_value_heads": 2, "rope_parameters": {**_YARN, "factor": 4.0}}),
    "llama_yarn_magnitude": (
        "Llama",
        {**_LLAMA, "rope_parameters": {**_YARN, "factor": 8.0, "attention_factor": 1.7, "truncate": False}},
    ),
    "mistral_window": ("Mistral", {**_LLAMA, "num_key_value_heads": 2, "sliding_window": 5}),
    "qwen3_yarn": (
        "Qwen3",
        {
            **_LLAMA,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "attention_bias": False,
            "rope_parameters": {**_YARN, "factor": 4.0, "beta_fast": 6.0, "mscale": 1.5, "mscale_all_dim": 0.5},
        },
    ),
    "qwen3": (
        "Qwen3",
        {**_LLAMA, "num_key_value_heads": 2, "head_dim": 32, "rope_theta": 1e6, "attention_bias": False},
    ),
}
_EXPERTS = {**_LLAMA, "num_key_value_heads": 2, "num_experts_per_tok": 2}
_QWEN_MOE = {**_EXPERTS, "num_experts": 6, "moe_intermediate_size": 128}
#: As `MODELS`, with experts.
MODELS |= {
    "qwen3_moe": ("Qwen3Moe", {**_QWEN_MOE, "head_dim": 32, "norm_topk_prob": True}),
    "qwen3_moe_mixed": ("Qwen3Moe", {**_QWEN_MOE, "mlp_only_layers": [0], "router_aux_loss_coef": 0.01}),
    "mixtral": ("Mixtral", {**_EXPERTS, "intermediate_size": 128, "num_local_experts": 4, "router_jitter_noise": 0.1}),
    "qwen2_moe": ("Qwen2Moe", {**_QWEN_MOE, "shared_expert_intermediate_size": 48, "norm_topk_prob": True}),
}
#: Clamped inputs, sinks, and windows of five tokens in two of three layers.
_GPT_OSS = {
    **_EXPERTS,
    "head_dim": 32,
    "intermediate_size": 128,
    "num_local_experts": 4,
    "sliding_window": 5,
    "swiglu_limit": 0.5,
    "rope_parameters": {**_YARN, "factor": 8.0, "truncate": False},
}
MODELS |= {
    "gpt_oss": ("GptOss", _GPT_OSS),
    "gpt_oss_window_last": ("GptOss", {**_GPT_OSS, "layer_types": ["full_attention"] * 2 + ["sliding_attention"]}),
}
#: Read alone: written as a Llama, which computes the same.
READ_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", {**_LLAMA, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": None}),
    "qwen2_yarn": (
        "Qwen2",
        {**_LLAMA, "num_key_value_heads": 2, "rope_parameters": {**_YARN, "factor": 2.5, "attention_factor": 0.8}},
    ),
    "qwen2": ("Qwen2", {**_LLAMA, "num_key_value_heads": 2, "tie_word_embeddings": True}),
}


def make_model(name: str) -> Any:
    """A transformers model in FP32, every parameter moved away from its initial 0 or 1."""
    import transformers

    kind, settings = (MODELS | READ_MODELS)[name]
    config = getattr(transformers, f"{kind}Config")(**settings, bos_token_id=None, eos_token_id=None)
    model = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model.float().eval()


def save_model(model: Any, folder: Path, *, dtype: torch.dtype = torch.float32, max_shard_size: str = "5GB") -> Path:
    """Save as transformers does, in another dtype if asked."""
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    model.float()
    return folder


@torch.no_grad()
def load_logits(folder: Path, tokens: Tensor, **options: Any) -> Tensor:
    """Logits of a folder through transformers' whole model in FP32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()(tokens).logits
