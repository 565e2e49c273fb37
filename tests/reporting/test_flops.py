"""FLOPs against numbers worked out by hand and against the GEMM shapes of a layer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8_megatron.config.schema import ModelConfig
from fp8_megatron.reporting.flops import PEAK_FLOPS, linear_params_per_layer, model_flops_per_token, peak_flops

GPT_7B = ModelConfig(num_layers=32, hidden_size=4096, num_attention_heads=32, seq_length=2048)
LLAMA_GQA = ModelConfig(
    num_layers=2,
    hidden_size=1024,
    ffn_hidden_size=2816,
    num_attention_heads=8,
    kv_channels=96,
    group_query_attention=True,
    num_query_groups=2,
    seq_length=512,
    swiglu=True,
    untie_embeddings_and_output_weights=True,
)


def test_gpt_7b_in_megatrons_convention() -> None:
    # Parameters in GEMMs: 32 · (4 · 4096² + 2 · 4096 · 16384) + 4096 · 50304 = 6 648 496 128.
    # Full attention: 32 · 4 · 2048 · 4096 = 1 073 741 824. Three times 2 · parameters + attention.
    assert model_flops_per_token(GPT_7B, causal=False, padded_vocab_size=50304) == 43_112_202_240
    assert model_flops_per_token(GPT_7B, causal=True, padded_vocab_size=50304) == 41_501_589_504


def test_only_attention_is_halved_by_causal() -> None:
    full, causal = (model_flops_per_token(GPT_7B, causal=c, padded_vocab_size=50304) for c in (False, True))
    assert full - causal == 3 * 32 * 2 * 2048 * 4096


def test_a_window_counts_the_positions_that_a_token_sees() -> None:
    """In every other layer 512 of 2048 and itself; the diagonal counts by half, as without a window."""
    windowed = replace(GPT_7B, window_size="512,0", window_attn_skip_freq="2")
    full, causal = (
        [model_flops_per_token(model, causal=c, padded_vocab_size=50304) for model in (GPT_7B, windowed)]
        for c in (False, True)
    )
    assert full[0] == full[1]
    left_out = sum(max(0, i - 512) for i in range(2048)) / 2048
    assert causal[0] - causal[1] == pytest.approx(3 * 16 * 4 * left_out * 4096, rel=1e-3)


def test_grouped_queries_and_gated_mlp() -> None:
    gemms = {
        "query": (1024, 8 * 96),
        "key": (1024, 2 * 96),
        "value": (1024, 2 * 96),
        "output": (8 * 96, 1024),
        "gate": (1024, 2816),
        "up": (1024, 2816),
        "down": (2816, 1024),
    }
    assert linear_params_per_layer(LLAMA_GQA) == sum(rows * columns for rows, columns in gemms.values())
    # Query heads that share keys still each have scores of their own: 768 wide, not 192.
    attention = 2 * 4 * 512 * 768
    expected = 3 * (2 * 2 * linear_params_per_layer(LLAMA_GQA) + 2 * 1024 * 32000 + attention)
    assert model_flops_per_token(LLAMA_GQA, causal=False, padded_vocab_size=32000) == expected


@pytest.mark.parametrize(
    ("device_name", "precision", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 80GB HBM3", "fp8", 1979e12),
        ("NVIDIA H200", "te", 1979e12),
        ("NVIDIA GH200 480GB", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "fp8", 1513e12),
        ("NVIDIA H200 NVL", "bf16", 835e12),
        ("NVIDIA H20", "bf16", 148e12),
        ("NVIDIA B200", "fp8", 4500e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A100-SXM4-80GB", "fp8", None),
        ("NVIDIA H200 MIG 1g.18gb", "bf16", None),
        ("NVIDIA RTX A1000", "bf16", None),
        ("cpu", "bf16", None),
    ],
)
def test_peak_by_device_name(device_name: str, precision: str, expected: float | None) -> None:
    assert peak_flops(device_name, precision) == expected  # type: ignore[arg-type]


def test_every_device_of_the_table_is_reachable() -> None:
    for name, (bf16, _) in PEAK_FLOPS.items():
        assert peak_flops(f"NVIDIA {name}", "bf16") == bf16
