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

    Beside what a decoder's layer keeps outside the MLP, a layer with experts keeps the router's input, its logits and
    probabilities, and where each row comes from and goes. In FP8 it keeps the experts' input in a byte, in the order of
    the tokens, and their input to the activation.
    """
    model, is_fp8 = config.model, config.is_fp8_layer(layer)
    if layer not in model.expert_layers:
        return decoder.kept_bytes(config, layer)
    rows, hidden, experts = _rows_of_token(config), model.hidden_size, model.num_experts or 0
    router = _HALF * hidden + 3 * _FP32 * experts + _FP32 * (2 * rows + model.moe_router_topk)
    if is_fp8:
        of_experts = hidden + _HALF * rows * model.expert_columns
    else:
        of_experts = rows * (_HALF * hidden + _half_activation(config))
    shared = _HALF * _shared_columns(config, is_fp8=is_fp8)
    return decoder.kept_around_mlp(config, layer) + router + of_experts + shared


def _half_activation(config: Config) -> int:
    """Bytes that autograd keeps of the activation of a row in 16 bits: in FP32 its input, its factors and its output;
    in 16 bits the product with the probability."""
    model = config.model
    outputs = 2 if model.is_gated else 1
    return (
        _FP32 * (model.expert_columns + outputs * model.expert_ffn_hidden_size) + _HALF * model.expert_ffn_hidden_size
    )


def recomputed_mlp_bytes(config: Config, layer: int) -> float:
    """As `Architecture.recomputed_mlp_bytes`: experts are not computed again."""
    return 0.0 if layer in config.model.expert_layers else decoder.recomputed_mlp_bytes(config, layer)


def forward_bytes(config: Config, layer: int) -> int:
    """As `Architecture.forward_bytes`: four residual streams, what the router says, the experts' input in a byte, and
    of each row the input to the activation, its output and the output of the expert."""
    model, is_fp8 = config.model, config.is_fp8_layer(layer)
    if layer not in model.expert_layers:
        return decoder.forward_bytes(config, layer)
    if is_fp8:
        rows = _HALF * model.expert_columns + model.expert_ffn_hidden_size + _HALF * model.hidden_size
    else:
        rows = _HALF * model.hidden_size + _half_activation(config)
    shared = _HALF * _shared_columns(config, is_fp8=is_fp8)
    per_token = (4 * _HALF + int(is_fp8)) * model.hidden_size + 5 * _FP32 * (model.num_experts or 0)
    per_token += shared + _exchanged(config)
    return round(config.tokens_per_micro_batch * (per_token + _rows_of_token(config) * rows))


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
        rows = _HALF * hidden + (_HALF + _FP32) * ffn + _FP32 * 2 * columns
    per_token = (_HALF + 2) * hidden + _exchanged(config)
    return round(config.tokens_per_micro_batch * (per_token + _rows_of_token(config) * rows))


def _rows_of_token(config: Config) -> float:
    """Rows of a rank's experts, with those that fill up each expert, over the tokens of a micro-batch.

    They are the most that there can be: memory is taken before counts are known. Expert-parallel ranks compute each
    other's tokens.
    """
    model, ranks = config.model, config.parallel.expert_model_parallel_size
    assert model.num_experts is not None
    experts = model.num_experts // ranks
    return ranks * min(model.moe_router_topk, experts) + _GROUP_ROWS * experts / config.tokens_per_micro_batch


def _exchanged(config: Config) -> int:
    """Bytes that expert-parallel ranks hold of each other's tokens, over those of a rank: the tokens in a byte, and in
    16 bits what its experts give to them, and what is sent of that."""
    ranks = config.parallel.expert_model_parallel_size
    return 0 if ranks == 1 else ranks * (1 + 2 * _HALF) * config.model.hidden_size


def _shared_columns(config: Config, *, is_fp8: bool) -> int:
    """Columns of the shared expert's input to its activation and, in 16 bits, of its output."""
    model = config.model
    shared = model.moe_shared_expert_intermediate_size or 0
    return ((2 if model.is_gated else 1) + (0 if is_fp8 else 1)) * shared
