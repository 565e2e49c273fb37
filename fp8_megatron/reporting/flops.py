"""Model FLOPs per token and dense peak rates: the numerator and the denominator of MFU.

The count covers forward and backward of linear layers, LM head and core attention in any precision. It leaves out
recomputation, quantisation, norms and the embedding look-up.
"""

from __future__ import annotations

from ..config.precision import Precision
from ..config.schema import Config, ModelConfig

#: How `model_flops_per_token` counts core attention, as logs name it: ``FLOPS_CONVENTION[causal]``.
FLOPS_CONVENTION = {False: "full attention", True: "causal attention"}

#: Dense peak (no sparsity) in FLOP/s by device name, as (bf16, fp8); fp8 is None if the tensor cores have no FP8.
#: The first name that the device's name contains is used, so a variant precedes the shorter name.
PEAK_FLOPS: dict[str, tuple[float, float | None]] = {
    "GB200": (2500e12, 5000e12),
    "B200": (2250e12, 4500e12),
    "GH200": (989e12, 1979e12),
    "H200 NVL": (835e12, 1671e12),
    "H200": (989e12, 1979e12),
    "H100 NVL": (835e12, 1671e12),
    "H100 PCIe": (756e12, 1513e12),
    "H100": (989e12, 1979e12),
    "H20": (148e12, 296e12),
    "A100": (312e12, None),
}


def linear_params_per_layer(model: ModelConfig) -> int:
    """Elements of one layer's matrices: QKV (grouped or not), attention output, MLP (gated or not); no biases."""
    query_width = model.num_attention_heads * model.head_dim
    key_value_width = 2 * model.query_groups * model.head_dim
    attention = model.hidden_size * (query_width + key_value_width) + query_width * model.hidden_size
    num_mlp_matrices = 3 if model.is_gated else 2
    return attention + num_mlp_matrices * model.hidden_size * model.padded_ffn_hidden_size


def model_flops_per_token(model: ModelConfig, *, causal: bool, padded_vocab_size: int) -> float:
    """FLOPs of forward and backward for one token of a sequence of ``model.seq_length``.

    ``3 · (2 · linear params + 2 · hidden · vocabulary + layers · attention)``: the backward of a GEMM costs two
    forwards. Attention is two GEMMs of ``2 · seq · heads · head_dim`` per token and layer with ``causal=False``, the
    convention of all TFLOP/s that Megatron and FP8-LM (arXiv 2310.18313) publish. ``causal=True`` gives half of
    that: it counts only the positions that a token sees, also of a window. With --reset-attention-mask both are upper
    bounds: how many positions a token sees depends on the text.

    Args:
        padded_vocab_size: rows of the LM head. The head is counted whether or not it is tied.
    """
    linear = 2 * model.num_layers * linear_params_per_layer(model)
    head = 2 * model.hidden_size * padded_vocab_size
    seen = sum(_seen_positions(model.seq_length, window) for window in model.windows)
    positions = seen if causal else model.num_layers * model.seq_length
    attention = 2 * 2 * positions * model.num_attention_heads * model.head_dim
    return 3.0 * (linear + head + attention)


def layer_flops(config: Config) -> float:
    """Model FLOPs of one layer, forward and backward, for one micro-batch on one GPU. Attention is counted in full."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    per_token = model_flops_per_token(model, causal=False, padded_vocab_size=0) / model.num_layers
    return config.tokens_per_micro_batch * per_token / tp


def _seen_positions(seq_length: int, window: int | None) -> float:
    """Positions that a token of a sequence sees on average: half of it, or fewer under a window.

    As half counts the diagonal by half, so does a window: w + 1 positions, of which early tokens lack a triangle.
    """
    width = seq_length if window is None else min(window + 1, seq_length)
    return width - width * width / (2 * seq_length)


def peak_flops(device_name: str, precision: Precision) -> float | None:
    """Dense peak in FLOP/s of the tensor cores that ``precision`` runs its linear layers on.

    Args:
        device_name: as ``torch.cuda.get_device_name`` gives it, e.g. ``NVIDIA H100 80GB HBM3``.
        precision: bf16 and fp16 have the BF16 peak, te and fp8 the FP8 peak.

    Returns:
        None (no MFU) for a device that is not in `PEAK_FLOPS`, for a MIG slice, and for FP8 on a device without FP8.
    """
    if " MIG " in device_name:
        return None
    for name, (bf16, fp8) in PEAK_FLOPS.items():
        # Match whole words, so that "H20" does not match "H200" and "A100" does not match "A1000".
        if f" {name} " in f" {device_name.replace('-', ' ')} ":
            return bf16 if precision in ("bf16", "fp16") else fp8
    return None
