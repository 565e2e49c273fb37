"""gpt-oss's router and experts: each tensor has all experts of a layer, and columns of gate and up in turns.

In 16 bits a weight of theirs is the transpose of ours. The published weights are MXFP4 (OCP Microscaling Formats
Specification 1.0): 32 values of E2M1 share a power of two. Of each row of ours, ``_blocks`` has the values of a block
in 16 bytes, the first of two in the lower half, and ``_scales`` the exponents with a bias of 127.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...models.hugging_face import Rule
from .table import EXPERTS_FC1, EXPERTS_FC2, ROUTER

#: Values of a block.
_BLOCK = 32
#: Of E2M1 by its code.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127


def mixture_rules() -> list[Rule]:
    """Of a layer's router, experts and their biases."""
    layer = "model.layers.{}.mlp."
    experts, fc1, fc2 = layer + "experts.", EXPERTS_FC1 + "weight", EXPERTS_FC2 + "weight"
    packed1, packed2 = (
        tuple(f"{experts}{name}_proj_{part}" for part in ("blocks", "scales")) for name in ("gate_up", "down")
    )
    return [
        *(Rule(ROUTER + part, (f"{layer}router.{part}",)) for part in ("weight", "bias")),
        Rule(
            fc1,
            (experts + "gate_up_proj",),
            lambda parts: _apart(parts[0].t()),
            lambda weight: (_in_turns(weight).t(),),
            has_all_matrices=True,
            otherwise=Rule(fc1, packed1, lambda parts: _apart(_unpacked(parts)), _packed_like, has_all_matrices=True),
        ),
        Rule(
            EXPERTS_FC1 + "bias",
            (experts + "gate_up_proj_bias",),
            lambda parts: _apart(parts[0]),
            lambda bias: (_in_turns(bias),),
            has_all_matrices=True,
        ),
        Rule(
            fc2,
            (experts + "down_proj",),
            lambda parts: parts[0].t(),
            lambda weight: (weight.t(),),
            has_all_matrices=True,
            otherwise=Rule(fc2, packed2, lambda parts: _unpacked(parts), _packed_like, has_all_matrices=True),
        ),
        Rule(EXPERTS_FC2 + "bias", (experts + "down_proj_bias",), has_all_matrices=True),
    ]


def _apart(rows: Tensor) -> Tensor:
    """[2F, …] with rows of gate and up in turns → gate, then up."""
    return torch.cat([rows[0::2], rows[1::2]])


def _in_turns(rows: Tensor) -> Tensor:
    """The inverse of `_apart`."""
    return torch.stack(rows.chunk(2), dim=1).flatten(0, 1)


def _unpacked(parts: Sequence[Tensor]) -> Tensor:
    """Blocks [N, K / 32, 16] and scales [N, K / 32], whole numbers in any dtype → FP32 [N, K]."""
    blocks, scales = (part.to(torch.int32) for part in parts)
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1)
    magnitudes = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)])
    values = magnitudes[codes].flatten(-2)
    return torch.ldexp(values, scales[..., None] - _EXPONENT_BIAS).flatten(1)


def _packed_like(weight: Tensor) -> tuple[Tensor, ...]:
    """Tensors of the shapes that an MXFP4 form of `weight` [N, K] has; this project writes none."""
    blocks = (weight.shape[0], -(-weight.shape[1] // _BLOCK))
    return weight.new_empty((*blocks, _BLOCK // 2)), weight.new_empty(blocks)
