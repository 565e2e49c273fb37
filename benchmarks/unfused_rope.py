"""Train with RoPE as elementwise operations in BF16, to compare losses with those of the fused kernels.

python benchmarks/unfused_rope.py FLAGS takes the flags of pretrain_gpt.py. As in most models of PyTorch, cosines and
sines are rounded to BF16, and so is every product and every sum, forward and backward. The kernels round each rotated
value once. It is for losses, not for speeds, and for attention in 16 bits with `--fp8-recipe delayed` or `tensorwise`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Run as a script from a clone, installed or not.
sys.path.insert(0, str(Path(__file__).parents[1]))
from fp8_megatron.commands.pretrain_gpt import main as pretrain
from fp8_megatron.commands.program import exit_status
from fp8_megatron.kernels import ops
from fp8_megatron.kernels.ops import Rotation


def elementwise(x: Tensor, rotation: Rotation, *, inverse: bool = False) -> Tensor:
    """Query or key [s, b, groups, heads · d] with every head rotated, each operation rounded to the dtype of `x`."""
    half = rotation.cos_sin.shape[2]
    assert not rotation.interleaved and rotation.head_dim == 2 * half, rotation
    heads = x.reshape(*x.shape[:2], -1, rotation.head_dim)
    cos, sin = (torch.cat([part, part], dim=-1)[:, None, None].to(x.dtype) for part in rotation.cos_sin.unbind(1))
    turned = torch.cat([-heads[..., half:], heads[..., :half]], dim=-1) * sin
    return (heads * cos - turned if inverse else heads * cos + turned).view(x.shape)


def rotate_qk_(y: Tensor, rotation: Rotation, *, heads_per_group: int) -> None:
    """In the place of `ops.rotate_qk_`."""
    sequence = rotation.cos_sin.shape[0]
    grouped = y.view(sequence, y.shape[0] // sequence, -1, (heads_per_group + 2) * rotation.head_dim)
    query_key = grouped[..., : -rotation.head_dim]
    query_key.copy_(elementwise(query_key, rotation))


def split_rotated_qkv(y: Tensor, rotation: Rotation, *, heads_per_group: int) -> tuple[Tensor, Tensor, Tensor]:
    """In the place of `ops.split_rotated_qkv`."""
    y = y.clone()
    rotate_qk_(y, rotation, heads_per_group=heads_per_group)
    heads = heads_per_group * rotation.head_dim
    grouped = y.view(y.shape[0], -1, heads + 2 * rotation.head_dim)
    query, key, value = grouped.split([heads, rotation.head_dim, rotation.head_dim], dim=2)
    query, key, value = (part.reshape(y.shape[0], -1) for part in (query, key, value))
    return query, key, value


def rotated_back(grads: Sequence[Tensor], rotation: Rotation) -> list[Tensor]:
    """Gradients of query, key and value before the rotation."""
    query, key, value = grads
    return [elementwise(query, rotation, inverse=True), elementwise(key, rotation, inverse=True), value]


def unrotate_qkv_grad(grads: list[Tensor], rotation: Rotation) -> Tensor:
    """In the place of `ops.unrotate_qkv_grad`."""
    joined = torch.cat(rotated_back(grads, rotation), dim=-1)
    return joined.view(joined.shape[0] * joined.shape[1], -1)


def rotated_qkv_grad_amax(grads: list[Tensor], rotation: Rotation) -> Tensor:
    """In the place of `ops.rotated_qkv_grad_amax`."""
    return ops.amax(unrotate_qkv_grad(grads, rotation))


def quantize_rotated_qkv_grad(
    grads: list[Tensor], rotation: Rotation, dtype: torch.dtype, *, grad_scales: Sequence[Tensor] = (), **settings: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """In the place of `ops.quantize_rotated_qkv_grad`."""
    assert not grad_scales, "attention in FP8 rotates inside its own casts"
    return ops.quantize_qkv_grad(rotated_back(grads, rotation), dtype, **settings)


def main(words: Sequence[str] | None = None) -> int:
    """Exit status of the training."""
    for function in (
        *(rotate_qk_, split_rotated_qkv),
        *(unrotate_qkv_grad, rotated_qkv_grad_amax, quantize_rotated_qkv_grad),
    ):
        setattr(ops, function.__name__, function)
    return pretrain(words)


if __name__ == "__main__":
    sys.exit(exit_status(main))
