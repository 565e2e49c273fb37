"""Attention within documents and windows against softmax attention written out in float64, document by document."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids
from megatron.core.transformer.utils import get_sliding_window_causal_mask
from torch import Tensor

from fp8_megatron.data.document_bounds import DocumentBounds
from fp8_megatron.nn.masked_attention import allowed_keys, dense_attention, flash_attention
from fp8_megatron.quantization.stats import snr_db

SEQ, BATCH, HEADS, WIDTH, SCALE = 48, 2, 4, 32, 1 / math.sqrt(32)
#: Documents of 7, 30 and 11 tokens, and of 48; three without tokens fill the room.
BOUNDS = torch.tensor([0, 7, 37, 48, 96, 96, 96, 96], dtype=torch.int32)


def one_by_one(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """Every document alone: its tokens are cut out, attended to, and put back."""
    out = torch.empty(SEQ, BATCH, HEADS * WIDTH, dtype=query.dtype)
    per_group = HEADS // key.shape[2]
    for sequence, start, end in ((0, 0, 7), (0, 7, 37), (0, 37, 48), (1, 0, 48)):
        rows = slice(start, end)
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)[None, :]
        hidden = (distance < 0) | (distance > (SEQ if window is None else window))
        for head in range(HEADS):
            q, k, v = (
                x[rows, sequence, index]
                for x, index in ((query, head), (key, head // per_group), (value, head // per_group))
            )
            weights = torch.softmax((q @ k.T * SCALE).masked_fill(hidden, -math.inf), dim=-1)
            out[rows, sequence, head * WIDTH : (head + 1) * WIDTH] = weights @ v
    return out


def assert_matches(
    attend: Callable[..., Tensor],
    groups: int,
    window: int | None,
    dtype: torch.dtype,
    device: str,
    db: float,
    grad_db: float,
) -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    inputs = [normal(SEQ, BATCH, heads, WIDTH) for heads in (HEADS, groups, groups)]
    cotangent = normal(SEQ, BATCH, HEADS * WIDTH)
    ours = [x.clone().to(device).requires_grad_() for x in inputs]
    exact = [x.double().requires_grad_() for x in inputs]
    context = attend(*ours, cu_seqlens=BOUNDS.to(device), window=window, scale=SCALE, dropout=0.0)
    truth = one_by_one(*exact, window)
    assert context.dtype == dtype and context.shape == truth.shape
    assert snr_db(context.cpu(), truth) > db
    context.backward(cotangent.to(device))
    truth.backward(cotangent.double())
    for x, exact_x in zip(ours, exact, strict=True):
        assert x.grad is not None and exact_x.grad is not None
        assert snr_db(x.grad.cpu(), exact_x.grad) > grad_db


@pytest.mark.parametrize("window", [None, 9, 0])
@pytest.mark.parametrize("groups", [HEADS, 2, 1])
def test_documents_are_attended_to_one_by_one(groups: int, window: int | None) -> None:
    # FP32: 2⁻²⁴ roundings in sums of tens of terms. Under window 0 the softmax's gradient is 0 in both.
    if window == 0:
        exact = [torch.randn(SEQ, BATCH, heads, WIDTH) for heads in (HEADS, groups, groups)]
        context = dense_attention(*exact, cu_seqlens=BOUNDS, window=0, scale=SCALE, dropout=0.0)
        torch.testing.assert_close(context, exact[2].repeat_interleave(HEADS // groups, dim=2).flatten(2))
        return
    assert_matches(dense_attention, groups, window, torch.float32, "cpu", db=115.0, grad_db=110.0)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("groups", [HEADS, 2, 1])
def test_flash_attention_on_a_gpu(groups: int, window: int | None) -> None:
    # BF16: 55.6 dB per rounding; forward rounds weights and output; a gradient passes through four roundings, and the
    # softmax's backward subtracts, which costs a few dB more.
    assert_matches(flash_attention, groups, window, torch.bfloat16, "cuda", db=50.0, grad_db=44.0)


@pytest.mark.gpu
def test_room_without_documents_changes_nothing() -> None:
    inputs = [torch.randn(SEQ, BATCH, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    settings = {"window": None, "scale": SCALE, "dropout": 0.0}
    padded, exact = (flash_attention(*inputs, cu_seqlens=b.cuda(), **settings) for b in (BOUNDS, BOUNDS[:5]))
    assert torch.equal(padded, exact)


def test_the_mask_is_megatrons() -> None:
    """Of documents (`_get_ltor_masks_and_position_ids`), where ends may follow one another, and of windows."""
    eod = 3
    tokens = torch.randint(6, (4, SEQ), generator=torch.Generator().manual_seed(1))
    tokens[1, :3], tokens[2, -1], tokens[3] = eod, eod, 5
    ours = allowed_keys(SEQ, 4, cu_seqlens=DocumentBounds(eod).of(tokens), window=None, device=torch.device("cpu"))
    for row, sequence in enumerate(tokens):
        hidden, _, _ = _get_ltor_masks_and_position_ids(sequence, eod, False, True, False, True)
        assert torch.equal(ours[row, 0], ~hidden[0])
    window = allowed_keys(SEQ, 4, cu_seqlens=None, window=9, device=torch.device("cpu"))
    make = torch.ones
    with pytest.MonkeyPatch.context() as patch:  # megatron-core makes the mask on a GPU
        patch.setattr(torch, "ones", lambda *shape, **settings: make(*shape, **{**settings, "device": "cpu"}))
        theirs = get_sliding_window_causal_mask(SEQ, SEQ, (9, 0))
    assert torch.equal(window[0, 0], ~theirs)
