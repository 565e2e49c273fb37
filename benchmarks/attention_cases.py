"""Cases of `kernels.py` for core attention: whole sequences in each backend and in FP8, documents, a window, and the
sums of blocks of shared sequences.

FLOP/s count the pairs of tokens that attend to each other: two GEMMs forward, five backward (arXiv 2205.14135).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from kernel_timing import Case
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fp8_megatron.data.document_bounds import DocumentBounds
from fp8_megatron.dtypes import E4M3, E5M2
from fp8_megatron.kernels import ops
from fp8_megatron.nn.masked_attention import dense_attention, flash_attention

HEADS, WIDTH = 32, 128
SCALE = WIDTH**-0.5
#: Tokens of a document, and of a window beside a token itself.
DOCUMENT, WINDOW = 512, 1023

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention(device: torch.device, batch: int, seq: int, heads: int = HEADS) -> Iterator[Case]:
    """Forward, and forward with backward, of [seq, batch, heads, 128] in BF16."""
    on_gpu = device.type == "cuda"
    backends = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION) if on_gpu else (SDPBackend.MATH,)
    whole = batch * seq * seq / 2
    for backend in backends:
        yield from _both(f"whole, {backend.name}", partial(_whole, backend=backend), device, batch, seq, heads, whole)
    yield from _fp8(device, batch, seq, heads, whole)
    masked = partial(flash_attention if on_gpu else dense_attention, scale=SCALE, dropout=0.0)
    ends = torch.ones(batch, seq, dtype=torch.int64)
    ends[:, DOCUMENT - 1 :: DOCUMENT] = 0
    for name, room in (("", None), (", room for one in 128", batch * (seq // 128 + 1))):
        bounds = DocumentBounds(0, room).of(ends).to(device)
        documents = partial(masked, cu_seqlens=bounds, window=None)
        yield from _both(
            f"documents of {DOCUMENT}{name}", documents, device, batch, seq, heads, batch * seq * min(DOCUMENT, seq) / 2
        )
    window = partial(masked, cu_seqlens=None, window=WINDOW)
    width = min(WINDOW + 1, seq)
    pairs = batch * (seq * width - width * width / 2)
    yield from _both(f"window of {WINDOW + 1}", window, device, batch, seq, heads, pairs)


def _both(
    name: str, attend: Attend, device: torch.device, batch: int, seq: int, heads: int, pairs: float
) -> Iterator[Case]:
    at = f"{batch}×{seq}×{heads}×{WIDTH}"
    # One tensor, as the QKV projection writes it.
    qkv = torch.randn(seq, batch, heads, 3 * WIDTH, device=device, dtype=torch.bfloat16)
    grad = torch.randn(seq, batch, heads * WIDTH, device=device, dtype=torch.bfloat16)
    flops = 2 * 2 * pairs * heads * WIDTH

    def forward(_: int) -> Tensor:
        with torch.no_grad():
            return attend(*qkv.split(WIDTH, dim=3))

    def backward(_: int) -> tuple[Tensor, ...]:
        operands = [part.detach().requires_grad_() for part in qkv.split(WIDTH, dim=3)]
        return torch.autograd.grad(attend(*operands), operands, grad)

    yield Case(f"attention forward, {name} {at}", forward, num_flops=flops)
    yield Case(f"attention forward and backward, {name} {at}", backward, num_flops=3.5 * flops)


def _fp8(device: torch.device, batch: int, seq: int, heads: int, pairs: float) -> Iterator[Case]:
    """The kernels alone, on FP8 operands."""
    at = f"{batch}×{seq}×{heads}×{WIDTH}"
    one = torch.ones(4, device=device)[:1]
    operands = [torch.randn(seq, batch, heads, WIDTH, device=device).to(E4M3) for _ in range(3)]
    inputs = ops.AttentionInputs(*operands, one, one, one)
    casts = ops.AttentionGradCasts(*(ops.WrittenCast(one, one, torch.zeros(4, device=device)[:1]) for _ in range(4)))
    grad = torch.randn(seq, batch, heads, WIDTH, device=device).to(E5M2)
    out, log_sum_exp = ops.fp8_attention(inputs, one, softmax_scale=SCALE)
    flops = 2 * 2 * pairs * heads * WIDTH

    def forward(_: int) -> tuple[Tensor, Tensor]:
        return ops.fp8_attention(inputs, one, softmax_scale=SCALE)

    def backward(_: int) -> tuple[Tensor, ...]:
        return ops.fp8_attention_backward(inputs, grad, one, out, one, log_sum_exp, casts, softmax_scale=SCALE)

    yield Case(f"attention forward, whole, FP8 {at}", forward, num_flops=flops)
    yield Case(f"attention backward, whole, FP8 {at}", backward, num_flops=2.5 * flops)


def sums(device: torch.device, batch: int, seq: int, heads: int = HEADS) -> Iterator[Case]:
    """Of the blocks of a rank that shares sequences of twice the tokens: all its rows, all, and the last half."""
    at = f"{batch}×{seq}×{heads}×{WIDTH}"
    rows = (seq, seq, seq // 2)
    blocks = [torch.randn(n, batch, heads, WIDTH, device=device).bfloat16() for n in rows]
    log_sums = [torch.randn(batch, heads, n, device=device) for n in rows]
    num_bytes = sum(block.nbytes for block in blocks) + blocks[0].nbytes
    of_log_sums = sum(log_sum.nbytes for log_sum in log_sums) + log_sums[0].nbytes

    def merge(_: int) -> tuple[Tensor, Tensor]:
        return ops.merge_attention(blocks, log_sums, dtype=torch.bfloat16)

    def add(_: int) -> Tensor:
        return ops.sum_partials(blocks, at_end=True, dtype=torch.bfloat16)

    yield Case(f"merge of three blocks' outputs {at}", merge, num_bytes=num_bytes + of_log_sums)
    yield Case(f"sum of three blocks' gradients {at}", add, num_bytes=num_bytes)


def _whole(query: Tensor, key: Tensor, value: Tensor, *, backend: SDPBackend) -> Tensor:
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    with sdpa_kernel(backend):
        context = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE)
    return context.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)
