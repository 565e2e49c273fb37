"""The one list of inputs that every variant of every kernel is tested on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8_megatron.dtypes import E4M3, E5M2
from fp8_megatron.kernels import ops


@dataclass(frozen=True)
class Case:
    """An input: its shape, dtype and what it is filled with (see `make`)."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    fill: str = "gaussian"

    def __str__(self) -> str:
        return "-".join(["x".join(map(str, self.shape)), str(self.dtype).removeprefix("torch."), self.fill])

    def make(self, device: str, seed: int = 0) -> Tensor:
        """The input, drawn on the CPU from `seed`."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(self.shape, generator=generator)
        position = int(torch.randint(x.numel(), (1,), generator=generator))
        if self.fill == "zero":
            x.zero_()
        elif self.fill == "outlier":
            x.view(-1)[position] = -1e4
        elif self.fill == "nan":
            x.view(-1)[position] = torch.nan
        elif self.fill == "inf":
            x.view(-1)[position] = -torch.inf
        elif self.fill == "denormal":  # in FP32, in the input's dtype and after the division by the scale
            x *= 1e-6 if self.dtype == torch.float16 else 1e-39
        elif self.fill == "wide":  # magnitudes over the exponents of the dtype, signs and zeros mixed
            exponents = torch.rand(self.shape, generator=generator) * 2 - 1
            x = x.sign() * 2 ** (exponents * (14 if self.dtype == torch.float16 else 120))
            x[x.abs() < 2.0**-100] = -0.0
        elif self.fill == "limit":  # each 128 elements' amax is a largest number times a power of two, or next to it
            runs = torch.arange(x.numel()) // 128
            num_runs = int(runs[-1]) + 1
            limits = torch.tensor([448.0, 57344.0, 65504.0, 1.0])[torch.randint(4, (num_runs,), generator=generator)]
            limits = torch.ldexp(limits, torch.randint(-8, 1, (num_runs,), generator=generator))
            limits = (limits.view(torch.int32) + torch.randint(-1, 2, (num_runs,), generator=generator).int()).view(
                torch.float32
            )
            x = (x.view(-1).clamp(-3, 3) / 3 * limits[runs]).view(self.shape)
            x.view(-1)[::128] = limits
        else:
            assert self.fill == "gaussian", self.fill
        return x.to(self.dtype).to(device)


class _OnGpu(torch.Tensor):
    device = torch.device("cuda")  # type: ignore[assignment]


def claiming_a_gpu(tensor: Tensor) -> Tensor:
    """`tensor`, claiming to be on a GPU, to test on a CPU what code does for a GPU."""
    return tensor.as_subclass(_OnGpu)


FILLS = ("gaussian", "zero", "outlier", "nan", "inf", "denormal", "wide", "limit")
FP8 = (E4M3, E5M2)
INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

#: [M, K] of tensorwise quantisation: one tile and less, sizes that are no multiple of a tile, tall, wide, large.
_SHAPES = ((16, 16), (48, 80), (1000, 208), (128, 128), (16, 4112), (4112, 16), (512, 1024))
MATRICES = (
    [Case(shape, dtype) for shape in _SHAPES for dtype in INPUT_DTYPES]
    + [Case((272, 336), dtype, fill) for fill in FILLS[1:] for dtype in INPUT_DTYPES]
    + [Case((4096, 4096))]
)

#: Flat [n] of blockwise storage: one block, a part of a tile, several tiles and a part, large.
FLATS = [Case((n,), dtype) for n in (256, 5 * 256, 9 * 4096 + 256, 2**20) for dtype in INPUT_DTYPES] + [
    Case((3 * 4096 + 512,), dtype, fill) for fill in FILLS[1:] for dtype in INPUT_DTYPES
]
BLOCK_PAYLOADS = (E4M3, torch.float16)
BLOCKS = (128, 256)


@dataclass(frozen=True)
class AdamCase:
    """Storage of the fused step: each operand's dtype, with its block where it is scaled."""

    name: str
    grad: tuple[torch.dtype, int | None]
    exp_avg: tuple[torch.dtype, int | None]
    exp_avg_sq: tuple[torch.dtype, int | None]
    master: tuple[torch.dtype, int | None]
    weight: torch.dtype | None = None
    chunk: int | None = None
    num_elements: int = 3 * 4096
    decoupled: bool = True

    def __str__(self) -> str:
        return self.name


_FP32 = (torch.float32, None)
_GRAD = (E4M3, 128)
ADAM_CASES = (
    AdamCase("bf16_level", _FP32, _FP32, _FP32, _FP32, weight=torch.bfloat16),
    AdamCase("fp32_odd_size", _FP32, _FP32, _FP32, _FP32, weight=torch.float32, num_elements=4099),
    AdamCase("fp32_l2", _FP32, _FP32, _FP32, _FP32, chunk=4096, decoupled=False),
    AdamCase("O1", _GRAD, _FP32, _FP32, (torch.float16, 256), chunk=4096),
    AdamCase("O3", _GRAD, (E4M3, 256), (torch.float16, 256), (torch.float16, 256), chunk=4096),
    AdamCase(
        "O3_bf16_weight",
        _GRAD,
        (E4M3, 256),
        (torch.float16, 256),
        (torch.float16, 256),
        weight=torch.bfloat16,
        num_elements=8448,
    ),
    AdamCase("O3_l2", _GRAD, (E4M3, 256), (torch.float16, 256), (torch.float16, 256), chunk=4096, decoupled=False),
    AdamCase("O3_part_of_tile", _GRAD, (E4M3, 256), (torch.float16, 256), (torch.float16, 256), num_elements=5 * 256),
    AdamCase("bf16_states", (torch.bfloat16, None), *[(torch.bfloat16, None)] * 3, chunk=4096),
    AdamCase("grad_256_state_128", (E4M3, 256), (E4M3, 128), (torch.float16, 128), (torch.float16, 128), chunk=1024),
    AdamCase("fp16_weight", _GRAD, (E4M3, 256), (torch.float16, 256), _FP32, weight=torch.float16, num_elements=8448),
)


#: Ways in which the elements of flat storage lie in a model: a unit's elements, and the width of rows with gaps.
PLACES = {"whole": (4096, 0), "blocks": (256, 0), "wide": (4096, 600), "wide_blocks": (256, 264), "narrow": (4096, 40)}


def places_of(kind: str, n: int, device: str = "cpu") -> ops.Places:
    """Two parameters, each a part of a larger one."""
    unit, width = PLACES[kind]
    start = torch.arange(0, n, unit)
    parameter = (start >= n // unit // 2 * unit).int()
    element = start - parameter * (n // unit // 2 * unit)
    if not width:
        facts = [torch.full_like(start, value) for value in (1 << 30, 1 << 30, 0)]
    else:
        element += 77
        facts = [width - element % width, torch.full_like(start, width), torch.full_like(start, 3 * width)]
        element += element // width * 3 * width
    table = torch.stack([parameter * 99 - 50, element + 2**31 - 3000, *facts], dim=1)
    table = (table + 2**31) % 2**32 - 2**31
    return ops.Places(table.to(torch.int32).to(device), width)


def adam(*operands: Tensor | None, places: ops.Places | None = None, **hyper: Any) -> dict[str, Any]:
    """What `adamw_step_` takes, from payload and scales of gradient, moments and master, and the four after them."""
    grad, exp_avg, exp_avg_sq, master = (ops.FlatState(*operands[i : i + 2]) for i in (0, 2, 4, 6))  # type: ignore[arg-type]
    rest = dict(zip(("weight", "chunk_amax", "grad_factor", "step"), operands[8:], strict=True))
    state = ops.AdamState(grad, exp_avg, exp_avg_sq, master, places or ops.Places())
    return dict(state=state, hyper=ops.AdamHyper(**hyper), **rest)


def split_adam(*operands: Tensor | None, places: ops.Places | None = None, **hyper: Any) -> dict[str, Any]:
    """What `adamw_split_step_` takes, from payload and scales of gradient and moments, and the eight after them."""
    stored = [ops.FlatState(*operands[i : i + 2]) for i in (0, 2, 4)]  # type: ignore[arg-type]
    state = ops.SplitAdamState(*stored, *operands[6:11], places or ops.Places())  # type: ignore[arg-type]
    rest = dict(zip(("chunk_amax", "grad_factor", "step"), operands[11:], strict=True))
    return dict(state=state, hyper=ops.AdamHyper(**hyper), **rest)
