"""The choice of experts in Triton: one launch forward and one backward, a tile of tokens a program.

Bytes: forward reads the logits and writes probabilities and the map, 9 an element (7 from BF16). Backward reads logits,
map and gradient and writes the logits' gradient, 13 an element. The choice is the specification's bit for bit, but
where two sigmoids with a bias, or two sums of groups, are equal to the last bits.
"""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import MOST_SHAPES, PreparedLaunch
from ..shapes import cdiv, empty, next_power_of_2
from .reference import TINY, Choice

# Elements that a program holds at once, and its warps.
_TILE, _NUM_WARPS = 4096, 8


@triton.jit
def _take_first(key, experts):
    """The map of the first of the largest in each row of [TOKENS, EXPERTS]."""
    return experts == tl.argmax(key, axis=1, tie_break_left=True)[:, None]


@triton.jit
def _softmax(logits, inside):
    """Over those inside, each row of [TOKENS, EXPERTS]; 0 elsewhere."""
    largest = tl.max(tl.where(inside, logits, float("-inf")), axis=1)
    powers = tl.where(inside, tl.exp(logits - largest[:, None]), 0.0)
    return powers / tl.sum(powers, axis=1)[:, None]


@triton.jit
def _in_best_groups(
    key, experts, E, NUM_GROUPS: tl.constexpr, GROUPS: tl.constexpr, GROUP_TOP_K: tl.constexpr, BEST: tl.constexpr
):  # fmt: skip
    """Whether each expert is in one of the best groups, by the sums of their `BEST` largest keys."""
    size = E // NUM_GROUPS
    groups = tl.arange(0, GROUPS)[None, :]
    sums = tl.full([key.shape[0], GROUPS], float("-inf"), tl.float32)
    for group in tl.static_range(NUM_GROUPS):
        left = tl.where(experts // size == group, key, float("-inf"))
        total = tl.zeros([key.shape[0]], tl.float32)
        for _ in tl.static_range(BEST):
            total += tl.max(left, axis=1)
            left = tl.where(_take_first(left, experts), float("-inf"), left)
        sums = tl.where(groups == group, total[:, None], sums)
    inside = experts < 0
    for _ in tl.static_range(GROUP_TOP_K):
        best = tl.argmax(sums, axis=1, tie_break_left=True)[:, None]
        inside = inside | (experts // size == best)
        sums = tl.where(groups == best, float("-inf"), sums)
    return inside


@triton.jit
def _probabilities(
    logits, chosen, is_expert, TOP_K: tl.constexpr, IS_SIGMOID: tl.constexpr, OVER_ALL: tl.constexpr, TINY: tl.constexpr
):  # fmt: skip
    """Without the factor, and what sigmoids were divided by."""
    total = tl.full([logits.shape[0]], 1.0, tl.float32)
    if IS_SIGMOID:
        probs = tl.where(chosen, tl.sigmoid(logits), 0.0)
        if TOP_K > 1:
            total = tl.sum(probs, axis=1) + TINY
            probs = probs / total[:, None]
    elif OVER_ALL:
        probs = tl.where(chosen, _softmax(logits, is_expert), 0.0)
    else:
        probs = _softmax(logits, chosen)
    return probs, total


@triton.jit
def _choose(
    logits, bias, probs, chosen, T, E, factor,
    TOP_K: tl.constexpr, IS_SIGMOID: tl.constexpr, OVER_ALL: tl.constexpr, HAS_BIAS: tl.constexpr,
    NUM_GROUPS: tl.constexpr, GROUPS: tl.constexpr, GROUP_TOP_K: tl.constexpr,
    TINY: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """A tile of tokens; `bias` is not read without `HAS_BIAS`."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    experts = tl.arange(0, EXPERTS)[None, :]
    places = tokens.to(tl.int64) * E + experts
    is_expert, inside = experts < E, (experts < E) & (tokens < T)
    x = tl.load(logits + places, mask=inside, other=float("-inf")).to(tl.float32)
    key = x
    if HAS_BIAS:
        key = tl.where(is_expert, tl.sigmoid(x) + tl.load(bias + experts, mask=is_expert, other=0.0), float("-inf"))
    if NUM_GROUPS:
        score = key
        if IS_SIGMOID and not HAS_BIAS:
            score = tl.sigmoid(x)
        elif OVER_ALL and not IS_SIGMOID:
            score = _softmax(x, is_expert)
        best = _in_best_groups(score, experts, E, NUM_GROUPS, GROUPS, GROUP_TOP_K, TOP_K // GROUP_TOP_K)
        key = tl.where(best & is_expert, key, float("-inf"))
    taken = experts < 0
    for _ in tl.static_range(TOP_K):
        first = _take_first(key, experts)
        taken = taken | first
        key = tl.where(first, float("-inf"), key)
    taken = taken & inside
    value, _ = _probabilities(x, taken, inside, TOP_K, IS_SIGMOID, OVER_ALL, TINY)
    tl.store(probs + places, tl.where(taken, value * factor, 0.0), mask=inside)
    tl.store(chosen + places, taken.to(tl.uint8), mask=inside)


@triton.jit
def _choose_backward(
    logits, chosen, grad, out, T, E, factor,
    TOP_K: tl.constexpr, IS_SIGMOID: tl.constexpr, OVER_ALL: tl.constexpr,
    TINY: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    experts = tl.arange(0, EXPERTS)[None, :]
    places = tokens.to(tl.int64) * E + experts
    inside = (experts < E) & (tokens < T)
    x = tl.load(logits + places, mask=inside, other=float("-inf")).to(tl.float32)
    taken = tl.load(chosen + places, mask=inside, other=0) > 0
    g = tl.where(taken, tl.load(grad + places, mask=inside, other=0.0), 0.0) * factor
    probs, total = _probabilities(x, taken, inside, TOP_K, IS_SIGMOID, OVER_ALL, TINY)
    probs = tl.where(taken, probs, 0.0)
    if IS_SIGMOID:
        if TOP_K > 1:
            g = tl.where(taken, g - tl.sum(probs * g, axis=1)[:, None], 0.0) / total[:, None]
        score = tl.sigmoid(x)
        result = g * score * (1.0 - score)
    else:
        mean = tl.sum(probs * g, axis=1)[:, None]
        if OVER_ALL:
            probs = _softmax(x, inside)
        result = probs * (g - mean)
    tl.store(out + places, result, mask=inside)


def choose_experts(logits: Tensor, bias: Tensor | None, how: Choice) -> tuple[Tensor, Tensor]:
    """`reference.choose_experts` in one launch."""
    num_tokens, num_experts = logits.shape
    probs = empty(num_tokens, num_experts, torch.float32, logits.device)
    chosen = empty(num_tokens, num_experts, torch.uint8, logits.device)
    logits = logits.contiguous()
    launch = _launch(num_tokens, num_experts, how, bias is not None)
    launch(logits, logits if bias is None else bias, probs, chosen)
    return probs, chosen.view(torch.bool)


def choose_experts_backward(logits: Tensor, chosen: Tensor, grad: Tensor, how: Choice) -> Tensor:
    """`reference.choose_experts_backward` in one launch."""
    num_tokens, num_experts = logits.shape
    out = empty(num_tokens, num_experts, torch.float32, logits.device)
    codes = chosen.contiguous().view(torch.uint8)
    _backward_launch(num_tokens, num_experts, how)(logits.contiguous(), codes, grad.contiguous(), out)
    return out


@lru_cache(maxsize=MOST_SHAPES)
def _launch(T: int, E: int, how: Choice, has_bias: bool) -> PreparedLaunch:
    tile, groups = _tile(E), (how.num_groups, next_power_of_2(max(how.num_groups, 1)), how.group_top_k)
    numbers = (T, E, how.factor, how.top_k, how.is_sigmoid, how.over_all, has_bias, *groups, TINY, *tile)
    return PreparedLaunch(_choose, (cdiv(T, tile[0]),), *numbers, num_warps=_NUM_WARPS, enable_fp_fusion=False)


@lru_cache(maxsize=MOST_SHAPES)
def _backward_launch(T: int, E: int, how: Choice) -> PreparedLaunch:
    tile = _tile(E)
    numbers = (T, E, how.factor, how.top_k, how.is_sigmoid, how.over_all, TINY, *tile)
    return PreparedLaunch(_choose_backward, (cdiv(T, tile[0]),), *numbers, num_warps=_NUM_WARPS, enable_fp_fusion=False)


def _tile(E: int) -> tuple[int, int]:
    """Tokens and experts of a program."""
    experts = max(next_power_of_2(E), 16)
    return max(_TILE // experts, 1), experts
