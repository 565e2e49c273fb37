"""Bytes of a rank in the forward and backward of a layer with experts, as `docs/design.md` says; a layer without
experts costs what a decoder's does."""

from __future__ import annotations

from ...config.schema import Config
from ..decoder import costs as decoder

#: The rows of an expert are a multiple of this, so this is the most that are added for each (`kernels.grouped`).
_GROUP_ROWS = 128
#: Bytes of an element of the 16-bit types, and of the router's numbers.
_HALF, _FP32 = 2, 4


def kept_bytes(config: Config, layer: int) -> float:
    """As `Architecture.kept_bytes`.

    Beside what a decoder's layer keeps outside the MLP, a layer with experts keeps the router's input, the experts'
    input to their activation, where each row comes from and goes, and the router's logits and probabilities. In FP8 it
    also keeps the experts' input in a byte, in the order of the tokens; in 16 bits that is the router's.
    """
    model, is_fp8 = config.model, config.is_fp8_layer(layer)
    if layer not in model.expert_layers:
        return decoder.kept_bytes(config, layer)
    rows, hidden, experts = _rows_of_token(config), model.hidden_size, model.num_experts or 0
    router = _HALF * hidden + 3 * _FP32 * experts + _FP32 * (2 * rows + model.moe_router_topk)
    operands = hidden if is_fp8 else 0
    shared = _HALF * _shared_columns(config, is_fp8=is_fp8)
    around = decoder.kept_around_mlp(config, layer)
    return around + router + operands + _HALF * rows * model.expert_columns + shared


def recomputed_mlp_bytes(config: Config, layer: int) -> float:
    """As `Architecture.recomputed_mlp_bytes`: experts are not computed again."""
    return 0.0 if layer in config.model.expert_layers else decoder.recomputed_mlp_bytes(config, layer)


def forward_bytes(config: Config, layer: int) -> int:
    """As `Architecture.forward_bytes`: four residual streams, and rows of the experts' input or output with their
    hidden state before and behind the activation."""
    model, is_fp8 = config.model, config.is_fp8_layer(layer)
    if layer not in model.expert_layers:
        return decoder.forward_bytes(config, layer)
    each = 1 if is_fp8 else _HALF
    behind = max(_HALF * model.hidden_size, _HALF * model.expert_columns)  # the activation's input, or the output
    rows = each * (model.hidden_size + model.expert_ffn_hidden_size) + behind
    shared = _HALF * _shared_columns(config, is_fp8=is_fp8)
    per_token = 4 * _HALF * model.hidden_size + _rows_of_token(config) * rows + shared
    return round(config.tokens_per_micro_batch * per_token)


def backward_bytes(config: Config, layer: int) -> int:
    """As `Architecture.backward_bytes`: the gradient of a row of the experts' output in both layouts; that of the
    hidden state; that of the activation's input in both layouts, with the activation. When those of the output are
    gone, the row's input, and its gradient in 16 bits."""
    model, is_fp8 = config.model, config.is_fp8_layer(layer)
    if layer not in model.expert_layers:
        return decoder.backward_bytes(config, layer)
    hidden, ffn, columns = model.hidden_size, model.expert_ffn_hidden_size, model.expert_columns
    if is_fp8:
        rows = max(2 * hidden + _HALF * ffn + 2 * columns + ffn, (1 + _HALF) * hidden + 2 * columns)
    else:
        rows = _HALF * max(hidden + 2 * ffn + columns, 2 * hidden + columns)
    return round(config.tokens_per_micro_batch * ((_HALF + 2) * hidden + _rows_of_token(config) * rows))


def _rows_of_token(config: Config) -> float:
    """Rows of all experts, with those that fill up each expert, over the tokens of a micro-batch: the most."""
    model = config.model
    assert model.num_experts is not None
    return model.moe_router_topk + _GROUP_ROWS * model.num_experts / config.tokens_per_micro_batch


def _shared_columns(config: Config, *, is_fp8: bool) -> int:
    """Columns of the shared expert's input to its activation and, in 16 bits, of its output."""
    model = config.model
    shared = model.moe_shared_expert_intermediate_size or 0
    return ((2 if model.is_gated else 1) + (0 if is_fp8 else 1)) * shared
