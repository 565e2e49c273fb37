"""Model FLOPs per token and dense peak rates: the numerator and the denominator of MFU.

The count covers forward and backward of linear layers, LM head and core attention in any precision. It leaves out
recomputation, quantisation, norms and the embedding look-up.
"""

from __future__ import annotations

from ..config.precision import Precision
from ..config.schema import Config, ModelConfig
from ..models.registry import architecture_of

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


def linear_params_per_layer(model: ModelConfig) -> float:
    """Elements of a layer's linear weights that a token is multiplied with, without biases. The mean of all layers.

    Of a weight [M, N, K] a token takes some matrices (`Parameter.matrices_of_token`).
    """
    rows = [row for row in architecture_of(model).parameters(model, 0) if row.is_linear]
    return sum(row.numel_of_token * len(row.layers_of(range(model.num_layers))) for row in rows) / model.num_layers


def model_flops_per_token(model: ModelConfig, *, causal: bool, padded_vocab_size: int) -> float:
    """FLOPs of forward and backward for one token of a sequence of ``model.seq_length``.

    ``3 · (2 · linear params + 2 · hidden · vocabulary + attention)``: the backward of a GEMM costs two forwards. How
    attention counts: `Architecture.attention_flops`.

    Args:
        padded_vocab_size: rows of the LM head. The head is counted whether or not it is tied.
    """
    linear = 2 * model.num_layers * linear_params_per_layer(model)
    head = 2 * model.hidden_size * padded_vocab_size
    return 3.0 * (linear + head + architecture_of(model).attention_flops(model, causal=causal))


def layer_flops(config: Config) -> float:
    """Model FLOPs of one layer, forward and backward, for one micro-batch on one GPU. Attention is counted in full."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    per_token = model_flops_per_token(model, causal=False, padded_vocab_size=0) / model.num_layers
    return config.tokens_per_micro_batch * per_token / tp


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
