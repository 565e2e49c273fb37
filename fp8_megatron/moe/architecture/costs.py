"""Bytes of a rank in the forward and backward of a layer with experts, as `moe.layers.experts` keeps them; a layer
without experts costs what a decoder's does."""

from __future__ import annotations

from typing import NamedTuple

from ...config.moe import expert_capacity
from ...config.schema import Config
from ...models.architecture import ForwardBeside
from ...models.decoder import costs as decoder
from ...storage import GROUP_ROWS

#: Bytes of an element of the 16-bit types, and of the router's numbers.
_HALF, _FP32 = 2, 4


class _Rank(NamedTuple):
    """What a rank has of a layer with experts.

    Attributes:
        experts: that it holds, or has parts of.
        own: its tokens over those of a micro-batch, which tensor-parallel ranks may share.
        received: the tokens that it gets from the ranks that share its experts and itself, over the same; 0 if no
            others do.
        rows: of its experts, with those that fill up each expert, over the same. Where it gets all tokens, they are the
            most that there can be: memory is taken before counts are known. Where it gets those of its experts, all
            ranks are taken to get equally many, and a token's experts to be on as many ranks as they can.
        columns, width: of an expert's input to the activation, and of its output.
        shared: columns of the shared expert's input to its activation and, in 16 bits, of its output.
    """

    experts: int
    own: float
    received: float
    rows: float
    columns: int
    width: int
    shared: int


def _rank(config: Config, *, is_fp8: bool) -> _Rank:
    model, parallel = config.model, config.parallel
    assert model.num_experts is not None
    experts, cuts = model.num_experts // parallel.expert_model_parallel_size, parallel.expert_tensor_size
    ranks, own = parallel.matrix_holders, 1 / parallel.sequence_shares
    if not parallel.gathers_tokens:
        ranks = cuts * min(model.moe_router_topk, parallel.expert_model_parallel_size)
    shared = (model.moe_shared_expert_intermediate_size or 0) // parallel.tensor_model_parallel_size
    return _Rank(
        experts=experts,
        own=own,
        received=ranks * own if parallel.matrix_holders > 1 else 0.0,
        rows=_rows(config, experts) / config.tokens_per_micro_batch,
        columns=model.expert_columns // cuts,
        width=model.expert_ffn_hidden_size // cuts,
        shared=((2 if model.is_gated else 1) + (0 if is_fp8 else 1)) * shared,
    )


def _rows(config: Config, experts: int) -> float:
    """Rows of `experts`, which ranks share, each with its own tokens."""
    model, parallel = config.model, config.parallel
    tokens, ranks = config.tokens_per_micro_batch / parallel.sequence_shares, parallel.matrix_holders
    assert model.num_experts is not None
    of_token = parallel.expert_tensor_size * model.moe_router_topk
    if parallel.gathers_tokens:
        of_token = ranks * min(model.moe_router_topk, experts)
    routed = tokens * of_token + GROUP_ROWS * experts
    factor = model.moe_expert_capacity_factor
    capacity = ranks * expert_capacity(round(tokens), model.moe_router_topk, model.num_experts, factor)
    return min(routed, experts * -(-capacity // GROUP_ROWS) * GROUP_ROWS)


def kept_bytes(config: Config, layer: int) -> float:
    """As `Architecture.kept_bytes`.

    Beside what a decoder's layer keeps outside the MLP, a layer with experts keeps the router's input, its logits and
    probabilities, and where each row comes from and goes. In FP8 it keeps the experts' input with its scales, in the
    order of the tokens, and their input to the activation. What --recompute-modules names is left out.
    """
    model, is_fp8 = config.model, config.is_fp8_layer(layer)
    if layer not in model.expert_layers:
        return decoder.kept_bytes(config, layer)
    rank, hidden = _rank(config, is_fp8=is_fp8), model.hidden_size
    of_router = _HALF * hidden + 3 * _FP32 * (model.num_experts or 0) + _FP32 * model.moe_router_topk
    if is_fp8:
        of_token, of_row = of_router + decoder.fp8_bytes(config) * hidden, _HALF * rank.columns
    else:
        of_token, of_row = of_router, _HALF * hidden + _half_activation(rank)
    of_experts = rank.own * of_token + rank.rows * (2 * _FP32 + of_row)
    kept = decoder.kept_around_mlp(config, layer) + of_experts + _HALF * rank.shared
    return kept - recomputed_bytes(config, layer)


def recomputed_bytes(config: Config, layer: int) -> float:
    """As `Architecture.recomputed_bytes`: in FP8 the experts' input to the activation; in 16 bits with moe_act what the
    activation keeps but its input, with moe also the rows of the experts' input; the shared expert's of both."""
    model, modules, is_fp8 = config.model, set(config.training.recomputed_modules), config.is_fp8_layer(layer)
    if layer not in model.expert_layers:
        return decoder.recomputed_bytes(config, layer)
    rank, of_row = _rank(config, is_fp8=is_fp8), 0
    if "moe" in modules:
        of_row = _HALF * (rank.columns if is_fp8 else model.hidden_size)
        of_row += 0 if is_fp8 else _half_activation(rank)
    elif "moe_act" in modules and not is_fp8:
        of_row = _half_activation(rank) - _HALF * rank.columns
    shared = rank.shared if {"moe", "shared_experts"} & modules else 0
    return rank.rows * of_row + _HALF * shared


def forward_bytes(config: Config, layer: int) -> int:
    """As `Architecture.forward_bytes`: four residual streams, what the router says, the experts' input in a byte, and
    of each row the input to the activation, its output and the output of the expert. One stream, or what is exchanged
    of the experts' output, comes when rows are summed. What is computed again of FP8 experts is gone by then."""
    model, is_fp8 = config.model, config.is_fp8_layer(layer)
    if layer not in model.expert_layers:
        return decoder.forward_bytes(config, layer)
    rank, hidden, fp8 = _rank(config, is_fp8=is_fp8), model.hidden_size, decoder.fp8_bytes(config)
    of_row: float = _HALF * hidden
    of_row += _HALF * rank.columns + fp8 * rank.width if is_fp8 else _half_activation(rank)
    of_token = (4 * _HALF + fp8 * is_fp8) * hidden + 5 * _FP32 * (model.num_experts or 0)
    exchanged = _exchanged(config, rank, has_tokens=config.parallel.gathers_tokens or not is_fp8)
    per_token = rank.own * of_token + rank.rows * of_row + _HALF * rank.shared + exchanged
    if is_fp8 and "moe" in config.training.recomputed_modules:
        of_sums = _HALF * hidden * (2 * rank.received or rank.own)
        per_token -= min(of_sums, rank.rows * _HALF * rank.columns)
    return round(config.tokens_per_micro_batch * per_token)


def backward_bytes(config: Config, layer: int) -> int:
    """As `Architecture.backward_bytes`: the gradient of a row of the experts' output in both layouts; that of the
    hidden state; that of the activation's input in both layouts, with the activation. When those of the output are
    gone, the row's input, and its gradient in 16 bits. In FP8 also the transposes of all weights. In 16 bits the
    gradients of a row's input and of what the activation takes."""
    model, is_fp8 = config.model, config.is_fp8_layer(layer)
    if layer not in model.expert_layers:
        return decoder.backward_bytes(config, layer)
    rank, hidden, fp8 = _rank(config, is_fp8=is_fp8), model.hidden_size, decoder.fp8_bytes(config)
    of_row: float
    if is_fp8:
        of_output = fp8 * (2 * hidden + 2 * rank.columns + rank.width) + _HALF * rank.width
        of_row = max(of_output, fp8 * (hidden + 2 * rank.columns) + _HALF * hidden)
    else:
        of_row = _HALF * (hidden + rank.columns)
    per_token = rank.own * (_HALF + 2 * fp8) * hidden + rank.rows * of_row + _exchanged(config, rank)
    transposes = rank.experts * hidden * (rank.columns + rank.width) if is_fp8 else 0
    return round(config.tokens_per_micro_batch * per_token) + transposes


def forward_beside(config: Config) -> ForwardBeside | None:
    """As `Architecture.forward_beside`, with --overlap-moe-expert-parallel-comm.

    A layer's backward has three turns if it sends tokens again, its forward always two.
    """
    if not config.parallel.overlap_moe_expert_parallel_comm:
        return None
    tokens, layers = config.tokens_per_micro_batch, range(config.model.num_layers)
    of_layer = max(kept_bytes(config, layer) * tokens + forward_bytes(config, layer) for layer in layers)
    return ForwardBeside(round(of_layer), 1 / 3 if "moe" in config.training.recomputed_modules else 0.0)


def _half_activation(rank: _Rank) -> int:
    """Bytes that autograd keeps of the activation of a row in 16 bits: its input and its output."""
    return _HALF * (rank.columns + rank.width)


def _exchanged(config: Config, rank: _Rank, *, has_tokens: bool = True) -> float:
    """Bytes that ranks which share experts hold of each other's tokens: in 16 bits what the experts of a rank give to
    them, and what is sent of that; and the tokens in FP8, which are gone by then where `has_tokens` is False."""
    of_tokens = decoder.fp8_bytes(config) if has_tokens else 0.0
    return rank.received * (of_tokens + 2 * _HALF) * config.model.hidden_size
