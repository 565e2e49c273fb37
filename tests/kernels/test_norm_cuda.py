"""csrc/norm_backward_quantize.cu: what it is made for, and on a GPU its values against the specification.

Its cast is that of the gradient it gives, bit for bit; the gradient itself is summed along a row in another order than
the specification's, so one in some thousand of its BF16 values is rounded otherwise.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from fp8_megatron.dtypes import E5M2
from fp8_megatron.kernels import extension, ops, reference
from fp8_megatron.kernels.extension import ExtensionError, compile_source
from fp8_megatron.kernels.norm import reference as norm
from fp8_megatron.kernels.norm.cuda_plan import KernelPlan, plan
from fp8_megatron.quantization.stats import snr_db

BF16_DB, FP32_DB = 60.0, 110.0
#: Of a block on Hopper.
SHARED_BYTES = 232_448
WITH_BOTH_LAYOUTS = (512, 768, 1024, 1280, 2048, 2560, 3072, 4096, 5120)
ROWS_ALONE = ((6144, 1), (8192, 2), (4096, 4), (1024, 8))


def chosen_plan(columns: int, parts: int = 1, *, transposed: bool = True) -> KernelPlan | None:
    return plan(columns, parts, transposed=transposed, shared_bytes=SHARED_BYTES)


@pytest.mark.parametrize("columns", WITH_BOTH_LAYOUTS)
def test_plans_of_both_layouts(columns: int) -> None:
    chosen = chosen_plan(columns)
    assert chosen is not None and chosen.shared_bytes <= SHARED_BYTES and chosen.stages >= 2
    assert chosen.tile_rows == 32 and chosen.tile_rows % chosen.groups == 0
    assert columns % (8 * chosen.row_threads) == 0 and chosen.row_threads % 32 == 0


@pytest.mark.parametrize(("columns", "parts"), ROWS_ALONE)
def test_plans_of_rows_alone(columns: int, parts: int) -> None:
    chosen = chosen_plan(columns, parts, transposed=False)
    assert chosen is not None and chosen.shared_bytes <= SHARED_BYTES and chosen.tile_rows == chosen.groups


def test_what_it_is_not_made_for_has_no_plan() -> None:
    assert chosen_plan(6144) is None  # 32 rows do not fit
    assert chosen_plan(1600) is None and chosen_plan(1600, transposed=False) is None  # no whole warps
    assert chosen_plan(16384, transposed=False) is None  # more threads than registers


def normal(*shape: int, seed: int, size: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * size).bfloat16()


def check(
    rows: int, columns: int, *, parts: int = 1, transposed: bool = True, rms: bool = False, has_bias: bool = True,
    has_residual: bool = True, damage: float | None = None,
) -> None:  # fmt: skip
    x, weight = normal(rows, columns, seed=1, size=3.0) + 0.5, 1 + normal(columns, seed=2, size=0.3)
    grad = normal(parts, rows, columns, seed=3, size=1e-3)
    residual = normal(rows, columns, seed=4, size=1e-3) if has_residual else None
    if damage is not None:
        grad[0, rows // 2, columns // 3] = damage
    arguments = (grad, residual, x, weight, *norm.statistics(x, 1e-5, rms))
    scale = torch.full((1,), 1.3e-7)
    expected = norm.norm_backward_quantize(
        *arguments, E5M2, has_bias=has_bias, scale=scale, amax_out=None, transposed=transposed
    )
    on_gpu = [None if tensor is None else tensor.cuda() for tensor in arguments]
    amax = torch.zeros(1, device="cuda")
    *grads, payload, payload_t, sums = (
        tensor.cpu()
        for tensor in ops.norm_backward_quantize(
            *on_gpu, E5M2, has_bias=has_bias, scale=scale.cuda(), amax_out=amax, transposed=transposed
        )
    )
    cast = reference.encode(grads[0], scale, E5M2).view(torch.uint8)
    same = cast == payload.view(torch.uint8)
    if damage is not None:  # which NaN a cast gives is the machine's affair
        nan = grads[0].isnan()
        assert nan.any() and payload.float().isnan().equal(nan) and amax.isnan() and same[~nan].all()
        return
    assert same.all() and amax.item() == grads[0].float().abs().max()
    assert payload_t.shape == ((columns, rows) if transposed else (0,))
    assert not transposed or torch.equal(payload_t.view(torch.uint8), payload.view(torch.uint8).t())
    assert snr_db(grads[0], expected[0]) > BF16_DB and snr_db(grads[1], expected[1]) > FP32_DB
    assert grads[2].shape == expected[2].shape and (not has_bias or snr_db(grads[2], expected[2]) > FP32_DB)
    assert snr_db(sums, grads[0].double().sum(dim=0)) > FP32_DB


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [*WITH_BOTH_LAYOUTS, 6144, 1600])
@pytest.mark.parametrize(("rms", "has_bias", "has_residual"), [*product([False, True], repeat=3)])
def test_both_layouts(columns: int, rms: bool, has_bias: bool, has_residual: bool) -> None:
    # More tiles than multiprocessors, the last round not full.
    check(32 * 150, columns, rms=rms, has_bias=has_bias, has_residual=has_residual)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [32, 64, 100, 4096])
def test_few_rows_and_broken_tiles(rows: int) -> None:
    check(rows, 1024)
    check(rows, 4096)


@pytest.mark.gpu
@pytest.mark.parametrize(("columns", "parts"), [*ROWS_ALONE, (5120, 2), (4096, 2), (2048, 2), (12288, 2)])
def test_rows_alone(columns: int, parts: int) -> None:
    check(1000, columns, parts=parts, transposed=False)


@pytest.mark.gpu
@pytest.mark.parametrize("damage", [float("nan"), float("inf")])
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "both_layouts"])
def test_what_is_not_finite_stays_so(damage: float, transposed: bool) -> None:
    check(96, 1024, transposed=transposed, damage=damage)


@pytest.mark.gpu
@pytest.mark.parametrize("operand", [0, 1, 2, 3], ids=["grad", "residual", "x", "weight"])
def test_operands_at_odd_addresses(operand: int) -> None:
    """Views into a buffer, two bytes beside a vector's address."""
    shapes = ((1, 64, 1024), (64, 1024), (64, 1024), (1024,))
    operands = [normal(*shape, seed=seed).cuda() for seed, shape in enumerate(shapes)]
    statistics = norm.statistics(operands[2], 1e-5, rms=False)
    odd = list(operands)
    flat = torch.cat([operands[operand].new_zeros(1), operands[operand].flatten()])
    odd[operand] = flat[1:].view(shapes[operand])
    assert odd[operand].data_ptr() % 16 == 2
    scale = torch.ones(1, device="cuda")
    settings = dict(has_bias=True, scale=scale, amax_out=None, transposed=True)
    measured, expected = (ops.norm_backward_quantize(*o, *statistics, E5M2, **settings) for o in (odd, operands))
    assert snr_db(measured[0], expected[0]) > BF16_DB and snr_db(measured[1], expected[1]) > FP32_DB


@pytest.mark.gpu
def test_the_same_bits_again() -> None:
    """Column sums are added up in one order."""
    x, weight, grad = (normal(*shape, seed=1).cuda() for shape in ((8192, 1024), (1024,), (1, 8192, 1024)))
    statistics = norm.statistics(x, 1e-5, rms=False)
    scale = torch.ones(1, device="cuda")
    first, second = (
        ops.norm_backward_quantize(
            grad, x, x, weight, *statistics, E5M2, has_bias=True, scale=scale, amax_out=None, transposed=True
        )
        for _ in range(2)
    )
    for mine, theirs in zip(first, second, strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_it_compiles(capability: tuple[int, int]) -> None:
    chosen = chosen_plan(4096)
    assert chosen is not None
    macros = chosen.macros(rms=False, has_bias=True, has_residual=True)
    assert compile_source("norm_backward_quantize.cu", macros, capability).startswith(b"\x7fELF")
    with pytest.raises(ExtensionError, match=r"does not compile with .*-DCOLUMNS=4104"):
        compile_source("norm_backward_quantize.cu", {**macros, "COLUMNS": 4104}, capability)


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a torch without CUDA")
def test_without_cuda_it_says_so() -> None:
    with pytest.raises(ExtensionError, match="this torch has no CUDA"):
        compile_source("norm_backward_quantize.cu", {}, (9, 0))


def test_its_source_is_in_the_package() -> None:
    assert b"norm_backward_quantize(" in extension._source("norm_backward_quantize.cu")
    with pytest.raises(ExtensionError, match=r"no_such\.cu.*not installed whole"):
        extension._source("no_such.cu")
