"""Cases of `kernels.py` for kernels that compute and cast to FP8 in one pass, and for the loss.

With a known scale (delayed scaling) an operand is read once. Current scaling reads it a second time for the amax.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from kernel_timing import Case, Rotating
from torch import Tensor

from fp8_megatron.activation_functions import Activation
from fp8_megatron.dtypes import E4M3, E5M2
from fp8_megatron.kernels import ops


class Scaling:
    """Arguments of the operators beside their operands: a known scale with storage for the amax, or none."""

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((1,), 0.02, device=device)  # clamps nothing, as most steps do
        self.amax = torch.zeros(3, device=device)

    def __iter__(self) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """(name, passes over the operands, arguments)."""
        yield "known scale", 1, dict(scale=self.scale, amax_out=self.amax)
        yield "current", 2, dict(scale=None)


def norms(device: torch.device, tokens: int, hidden: int) -> Iterator[Case]:
    """LayerNorm and RMSNorm of [tokens, hidden]: to FP8, again transposed for wgrad, backward."""
    for rms in (False, True):
        yield from _norm(device, tokens, hidden, rms=rms)


def _norm(device: torch.device, tokens: int, hidden: int, *, rms: bool) -> Iterator[Case]:
    kind, n = "RMSNorm" if rms else "LayerNorm", tokens * hidden
    at = f"{tokens}×{hidden}"
    x = rotating(device, tokens, hidden)
    grad, residual = rotating(device, tokens, hidden), rotating(device, tokens, hidden)
    weight = torch.ones(hidden, device=device, dtype=torch.bfloat16)
    bias = None if rms else torch.zeros_like(weight)
    statistics = (4 if rms else 8) * tokens
    scaling = Scaling(device)
    for name, passes, scale in scaling:
        yield _norm_quantize(
            f"{kind} → E4M3, {name} {at}", x, weight, bias, rms, scale, (2 * passes + 1) * n + statistics
        )
    _, _, mean, rstd = ops.norm_quantize(x(0), weight, bias, E4M3, eps=1e-5, rms=rms, scale=scaling.scale)
    yield Case(
        f"{kind} again → E4M3 transposed {at}",
        lambda i: ops.norm_requantize(x(i), weight, bias, mean, rstd, scaling.scale, E4M3, transposed=True),
        (2 + 1) * n + statistics,
    )
    yield Case(
        f"{kind} backward with residual gradient {at}",
        lambda i: ops.norm_backward(grad(i)[None], residual(i), x(i), weight, mean, rstd, has_bias=not rms),
        (3 * 2 + 2) * n + statistics,
    )
    yield Case(
        f"{kind} backward with residual gradient → E5M2 both layouts with column sums, known scale {at}",
        lambda i: ops.norm_backward_quantize(
            grad(i)[None],
            residual(i),
            x(i),
            weight,
            mean,
            rstd,
            E5M2,
            has_bias=not rms,
            scale=scaling.scale,
            amax_out=scaling.amax,
            transposed=True,
        ),
        (3 * 2 + 2 + 2) * n + statistics,
    )


def _norm_quantize(
    name: str, x: Rotating, weight: Tensor, bias: Tensor | None, rms: bool, scale: dict[str, Any], num_bytes: float
) -> Case:
    return Case(name, lambda i: ops.norm_quantize(x(i), weight, bias, E4M3, eps=1e-5, rms=rms, **scale), num_bytes)


def gradients(device: torch.device, tokens: int, width: int) -> Iterator[Case]:
    """Output gradients [tokens, width] to FP8 in both layouts, with a bias's gradient and without."""
    n, at = tokens * width, f"{tokens}×{width}"
    g = rotating(device, tokens, width)
    scaling = Scaling(device)
    for name, passes, scale in scaling:
        yield _grad_output(f"gradient → E5M2 both layouts, bias sums, {name} {at}", g, scale, (2 * passes + 2) * n)
    yield Case(
        f"gradient → E5M2 both layouts, known scale {at}",
        lambda i: ops.quantize_with_scale(g(i), scaling.scale, E5M2, transposed=True, amax_out=scaling.amax),
        (2 + 2) * n,
    )
    yield Case(
        f"gradient → E5M2 both layouts, current {at}",
        lambda i: ops.quantize_current(g(i), E5M2, transposed=True),
        (2 * 2 + 2) * n,
    )


def _grad_output(name: str, g: Rotating, scale: dict[str, Any], num_bytes: float) -> Case:
    return Case(name, lambda i: ops.quantize_grad_output(g(i), E5M2, **scale), num_bytes)


def qkv_gradients(device: torch.device, tokens: int, hidden: int, *, head_dim: int = 128) -> Iterator[Case]:
    """Gradients of query, key and value as one gradient of the projection, from either layout of attention's output."""
    batch, heads = 4, hidden // head_dim
    seq, n, at = tokens // batch, 3 * tokens * hidden, f"3 × {tokens}×{hidden}"
    by_head = [torch.randn(batch, heads, seq, head_dim, device=device).bfloat16().permute(2, 0, 1, 3) for _ in range(3)]
    by_token = [torch.randn(seq, batch, heads, head_dim, device=device).bfloat16() for _ in range(3)]
    for layout, grads in (("[b, h, s, d]", by_head), ("[s, b, h, d]", by_token)):
        for sums in (True, False):
            for name, passes, scale in Scaling(device):
                title = f"QKV gradients {layout} → E5M2{', bias sums' if sums else ''}, {name} {at}"
                yield _qkv(title, grads, scale, (2 * passes + 2) * n, column_sums=sums)


def _qkv(name: str, grads: list[Tensor], scale: dict[str, Any], num_bytes: float, *, column_sums: bool) -> Case:
    return Case(name, lambda _: ops.quantize_qkv_grad(grads, E5M2, column_sums=column_sums, **scale), num_bytes)


def rotations(device: torch.device, tokens: int, hidden: int, *, head_dim: int = 128) -> Iterator[Case]:
    """RoPE of the QKV projection's output in place, and back in the cast of its gradients, at b = 4."""
    batch, heads = 4, hidden // head_dim
    seq, n, at = tokens // batch, tokens * hidden, f"3 × {tokens}×{hidden}"
    angles = torch.rand(seq, 2, head_dim // 2, device=device)
    by_head = [torch.randn(batch, heads, seq, head_dim, device=device).bfloat16().permute(2, 0, 1, 3) for _ in range(3)]
    y = rotating(device, tokens, 3 * hidden)
    for interleaved in (False, True):
        rotation = ops.Rotation(angles, head_dim, interleaved)
        yield _rotation(f"RoPE{', interleaved' if interleaved else ''} {at}", y, rotation, 2 * n * 4 + angles.nbytes)
    rotation = ops.Rotation(angles, head_dim, False)
    yield Case(
        f"QKV gradients [b, h, s, d] rotated back → BF16 {at}",
        lambda _: ops.unrotate_qkv_grad(by_head, rotation),
        3 * n * 4 + angles.nbytes,
    )
    for name, passes, scale in Scaling(device):
        title = f"QKV gradients [b, h, s, d] rotated back → E5M2, {name} {at}"
        yield _rotated_qkv(title, by_head, rotation, scale, (2 * passes + 2) * 3 * n + passes * angles.nbytes)


def grouped_rotations(device: torch.device, tokens: int, hidden: int, *, head_dim: int = 128) -> Iterator[Case]:
    """RoPE of four query heads a group into memory of their own, without and with norms of query and key, at b = 1."""
    groups = hidden // head_dim // 4
    width, at = 6 * groups * head_dim, f"{tokens}×{6 * groups * head_dim}"
    rotation = ops.Rotation(torch.rand(tokens, 2, head_dim // 2, device=device), head_dim, False)
    y, n, angles = rotating(device, tokens, width), tokens * width, rotation.cos_sin.nbytes
    yield Case(
        f"RoPE of grouped queries, split {at}",
        lambda i: ops.split_rotated_qkv(y(i), rotation, heads_per_group=4),
        4 * n + angles,
    )
    weight = torch.ones(head_dim, device=device, dtype=torch.bfloat16)
    norm = ops.QKNorm(weight, weight, None, None, 1e-6, True)
    yield Case(
        f"RMSNorm of query and key and RoPE {at}",
        lambda i: ops.norm_rotate_qk(y(i), rotation, norm, heads_per_group=4),
        2 * n * 5 // 6 * 2 + angles,
    )
    grads = [torch.randn(tokens, 1, groups, own * head_dim, device=device).bfloat16() for own in (4, 1, 1)]
    yield Case(
        f"RMSNorm of query and key and RoPE, backward {at}",
        lambda i: ops.norm_rotate_qk_backward(grads, y(i), rotation, norm),
        4 * n + 2 * n * 5 // 6 + angles,
    )


def attention_casts(
    device: torch.device, tokens: int, heads: int, heads_per_group: int, *, head_dim: int = 128
) -> Iterator[Case]:
    """Casts around FP8 attention, at b = 1: rotated heads to E4M3, and gradients rotated back to E5M2."""
    groups = heads // heads_per_group
    width = (heads + 2 * groups) * head_dim
    n, at = tokens * width, f"{tokens}×{width}, {heads_per_group} a group"
    rotation = ops.Rotation(torch.rand(tokens, 2, head_dim // 2, device=device), head_dim, False)
    y, angles = rotating(device, tokens, width), rotation.cos_sin.nbytes
    known = [ops.KnownCast(torch.ones(4, device=device)[:1], torch.zeros(4, device=device)[:3]) for _ in range(3)]
    yield Case(
        f"RoPE → query, key, value in E4M3 {at}",
        lambda i: ops.quantize_rotated_qkv(y(i), rotation, ops.QKVCasts(*known), heads_per_group=heads_per_group),
        3 * n + angles,
    )
    grads = [
        torch.randn(tokens, 1, groups, own * head_dim, device=device).bfloat16() for own in (heads_per_group, 1, 1)
    ]
    scale: dict[str, Any] = dict(scale=known[0].scale, amax_out=known[0].record, column_sums=False)
    yield Case(
        f"QKV gradients rotated back → E5M2, known scale {at}",
        lambda _: ops.quantize_rotated_qkv_grad(grads, rotation, E5M2, **scale),
        4 * n + angles,
    )
    in_fp8 = [grad.to(E5M2) for grad in grads]
    yield Case(
        f"QKV gradients in E5M2 rotated back → E5M2, known scale {at}",
        lambda _: ops.quantize_rotated_qkv_grad(
            in_fp8, rotation, E5M2, grad_scales=[cast.scale for cast in known], **scale
        ),
        3 * n + angles,
    )


def _rotation(name: str, y: Rotating, rotation: ops.Rotation, num_bytes: float) -> Case:
    return Case(name, lambda i: ops.rotate_qk_(y(i), rotation, heads_per_group=1), num_bytes)


def _rotated_qkv(
    name: str, grads: list[Tensor], rotation: ops.Rotation, scale: dict[str, Any], num_bytes: float
) -> Case:
    return Case(
        name, lambda _: ops.quantize_rotated_qkv_grad(grads, rotation, E5M2, column_sums=False, **scale), num_bytes
    )


def activations(device: torch.device, tokens: int, width: int, kind: str) -> Iterator[Case]:
    """An activation with an output of [tokens, width]: to FP8; backward in both layouts, the activation again."""
    function = Activation(kind)
    columns, title, at = function.row.num_inputs, function.row.title, f"{tokens}×{width}"
    n = tokens * width
    z = rotating(device, tokens, columns * width)
    grad = rotating(device, tokens, width)
    scaling = Scaling(device)
    for name, passes, scale in scaling:
        yield _activation(f"{title} → E4M3, {name} {at}", z, function, scale, (2 * columns * passes + 1) * n)
    for sums in (True, False):
        for name, passes, scale in scaling:
            yield _activation_backward(
                f"{title} backward → E5M2{', bias sums' if sums else ''}, {name} {at}",
                (grad, z, function, scaling.scale),
                scale,
                ((2 + 2 * columns) * passes + 2 * columns + 1) * n,
                column_sums=sums,
            )


def _activation(name: str, z: Rotating, function: Activation, scale: dict[str, Any], num_bytes: float) -> Case:
    return Case(name, lambda i: ops.activation_quantize(z(i), function, E4M3, **scale), num_bytes)


def _activation_backward(
    name: str,
    operands: tuple[Rotating, Rotating, Activation, Tensor],
    scale: dict[str, Any],
    num_bytes: float,
    *,
    column_sums: bool,
) -> Case:
    grad, z, function, activation_scale = operands
    again = dict(activation_dtype=E4M3, activation_scale=activation_scale, column_sums=column_sums)
    return Case(
        name, lambda i: ops.activation_backward_quantize(grad(i), z(i), function, E5M2, **again, **scale), num_bytes
    )


def cross_entropy(device: torch.device, tokens: int, vocab_size: int) -> Iterator[Case]:
    """The loss: the reduction of each row of logits, and the gradient in place of the logits."""
    at = f"{tokens}×{vocab_size}"
    logits = torch.randn(tokens, vocab_size, device=device, dtype=torch.bfloat16)
    labels = torch.randint(vocab_size, (tokens,), device=device)
    log_sum_exp = torch.full((tokens,), 12.0, device=device)
    grad = torch.full((tokens,), 1.0 / tokens, device=device)
    yield Case(
        f"cross-entropy statistics {at}", lambda _: ops.cross_entropy_statistics(logits, labels), 2 * logits.numel()
    )
    yield Case(
        f"cross-entropy backward {at}",
        lambda _: ops.cross_entropy_backward_(logits, labels, log_sum_exp, grad),
        4 * logits.numel(),
    )


def rotating(device: torch.device, rows: int, columns: int) -> Rotating:
    return Rotating(lambda: torch.randn(rows, columns, device=device, dtype=torch.bfloat16))
