"""Sums of wire rows and companded state, whose contract is every bit; AdamW over companded state and a split master.

Against the reference on the CPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fp8_megatron.dtypes import E4M3, GRAD_BLOCK, STATE_BLOCK
from fp8_megatron.kernels import ops
from fp8_megatron.kernels.adamw import reference as adamw
from fp8_megatron.kernels.adamw import split_master
from fp8_megatron.kernels.quantize import blockwise
from fp8_megatron.kernels.wire import reference as wire
from tests.kernels.cases import BLOCKS, FLATS, PLACES, Case, adam, places_of, split_adam
from tests.kernels.test_triton import Guards, assert_same

pytestmark = pytest.mark.gpu

INT8, UINT8, FP16, BF16, FP32 = torch.int8, torch.uint8, torch.float16, torch.bfloat16, torch.float32
DEVICE = "cuda"
LARGE = 2**22


def copies(tensors: list[Tensor | None], guards: Guards) -> list[Tensor | None]:
    """The tensors on the GPU, guarded."""
    return [
        None if tensor is None else guards.empty(tensor.shape, dtype=tensor.dtype, device=DEVICE).copy_(tensor)
        for tensor in tensors
    ]


def assert_all_same(values: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for value, wanted in zip(values, expected, strict=True):
        assert (value is None) == (wanted is None)
        if value is not None and wanted is not None:
            assert_same(value, wanted)


# The share of elements that AdamW may store one number further: quotients and roots are approximate, so the chance of
# rounding up differs by 2⁻¹⁵.
_FURTHER = 1e-3
# Squares below FP32's normal range: the reference rounds the numbers beside them, too, to subnormal ones.
_FURTHER_IF_SUBNORMAL = 0.1
# The error of a step's change in units of a learning rate, and that of a sum in units of its larger part: products may
# be fused with sums.
_CHANGE_ERROR, _SUM_ERROR = 2.0**-17, 2.0**-22


def assert_state_alike(
    value: Tensor | None,
    scales: Tensor | None,
    expected: Tensor | None,
    wanted: Tensor | None,
    *,
    before: Tensor | None,
    lr: float = 1e-3,
) -> None:
    """The same stored numbers but for neighbours; those of a block whose scale is a NaN are none.

    Args:
        before: what was stored before the step, FP32.
    """
    assert (value is None) == (expected is None)
    if value is None or expected is None or before is None:
        return
    value = value.cpu()
    if scales is not None and wanted is not None:
        scales = scales.cpu()
        torch.testing.assert_close(scales, wanted, rtol=1e-6, atol=0, equal_nan=True)
    measured, exact = (blockwise.load_state(*given) for given in ((value, scales), (expected, wanted)))
    live = ~exact.isnan()
    assert torch.equal(live, ~measured.isnan())
    if value.is_floating_point():
        bits = {E4M3: 3, FP16: 10, BF16: 7, FP32: 22}[value.dtype]
        smallest = {E4M3: 2.0**-9, FP16: 2.0**-24, BF16: 0.0, FP32: 0.0}[value.dtype]
        scale = torch.ones(1) if wanted is None else wanted.repeat_interleave(exact.numel() // wanted.numel())
        step = torch.maximum(exact.abs() * 2.0**-bits, smallest * scale)
        slack = _SUM_ERROR * torch.maximum(before.abs(), exact.abs()) + _CHANGE_ERROR * lr
        assert ((measured == exact) | ((measured - exact).abs() <= 2 * step + 4 * slack))[live].all()
        further = measured != exact
    else:
        further = value != expected
        assert not bool(((value.int() - expected.int())[live].abs() > 1).any())
    if value.dtype is not FP32 and bool(live.any()):
        is_subnormal = wanted is not None and bool((wanted < 1e-37).any())
        share = further[live].double().mean()
        assert share <= (_FURTHER_IF_SUBNORMAL if is_subnormal else _FURTHER)


def assert_split_alike(parts: list[Tensor], expected: list[Tensor], scale: Tensor, lr: float = 1e-3) -> None:
    """The same split masters [tensors, elements] of `scale` [tensors, 1] but for neighbours."""
    joined, exact = (
        split_master.join_master(*(part.cpu().view(len(scale), -1) for part in given), scale)
        for given in (parts, expected)
    )
    live = ~exact.isnan()
    assert torch.equal(live, ~joined.isnan())
    step = torch.maximum(exact.abs() * 2.0**-11, scale * 2.0**-17)
    slack = _SUM_ERROR * exact.abs() + _CHANGE_ERROR * lr
    assert ((joined - exact).abs() <= 1.01 * step + slack)[live].all()
    chance = (0.1 * slack / step).clamp_(max=1.0)[live].double().mean()
    assert (joined != exact)[live].double().mean() <= _FURTHER + chance


# Rows of the wire.


def wire_rows(num_rows: int, n: int) -> tuple[Tensor, Tensor]:
    """Every E4M3 code, NaNs too; scales over 40 powers of two, some at the ends of FP32's range, one NaN."""
    generator = torch.Generator().manual_seed(num_rows * n)
    payload = torch.randint(256, (num_rows * n,), generator=generator, dtype=torch.uint8)
    payload[payload & 0x7F == 0x7F] = 0x80  # NaNs would leave no block a number
    payload[3 % n] = 0x7F
    exponents = torch.randint(-20, 21, (num_rows * n // GRAD_BLOCK,), generator=generator)
    exponents[::7] = -126
    exponents[5::11] = 120
    scales = torch.ldexp(torch.ones(exponents.numel()), exponents)
    scales[-1] = math.nan
    return payload.view(E4M3), scales


@pytest.mark.parametrize("add", [False, True], ids=["write", "add"])
@pytest.mark.parametrize(
    ("num_rows", "n"),
    [(1, 128), (2, 5 * 128), (3, 1024), (4, 37 * 128), (6, 1024), (8, 4096), (11, 3 * 128), (16, 9 * 1024)],
)
def test_accumulate_rows(num_rows: int, n: int, add: bool) -> None:
    rows_are_summed(num_rows, n, add)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("num_rows", "n"), [(4, 37 * 128), (2, 4096)])
def test_accumulate_rows_in_bf16(num_rows: int, n: int, add: bool) -> None:
    rows_are_summed(num_rows, n, add, torch.bfloat16)


@pytest.mark.parametrize("num_rows", [3, 4])
def test_accumulate_many_rows(num_rows: int) -> None:
    rows_are_summed(num_rows, LARGE, True)


def rows_are_summed(num_rows: int, n: int, add: bool, dtype: torch.dtype = torch.float32) -> None:
    payload, scales = wire_rows(num_rows, n)
    accumulator = torch.randn(n).to(dtype)
    accumulator[::3] = -0.0
    for factor in (1.0, 1.0 / num_rows):
        guards = Guards()
        on_gpu = copies([payload, scales, accumulator], guards)
        expected = accumulator.clone()
        wire.accumulate_rows_(payload, scales, expected, factor=factor, add=add)
        ops.accumulate_rows_(*on_gpu, factor=factor, add=add)
        assert_all_same(on_gpu, [payload, scales, expected])
        guards.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("accumulated", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("num_rows", "n", "own_row"), [(1, 128, None), (4, 37 * 128, 2), (11, 4096, None), (16, 1024, 9)]
)
def test_accumulate_rows_without_scales(
    num_rows: int, n: int, own_row: int | None, dtype: torch.dtype, accumulated: torch.dtype
) -> None:
    payload = torch.randn(num_rows * n).to(dtype)
    payload[::5] = -0.0
    accumulator = torch.randn(n).to(accumulated)
    for factor, add in ((1.0, True), (1.0 / num_rows, False)):
        expected = accumulator.clone()
        wire.accumulate_rows_(payload, None, expected, factor=factor, add=add)
        given = payload.clone()
        if own_row is not None:
            given.view(num_rows, n)[own_row] = math.nan
        own_payload = payload.view(num_rows, n)[0 if own_row is None else own_row].clone()
        guards = Guards()
        on_gpu = copies([given, accumulator, own_payload], guards)
        own = {} if own_row is None else {"own_row": own_row, "own_payload": on_gpu[2]}
        ops.accumulate_rows_(on_gpu[0], None, on_gpu[1], factor=factor, add=add, **own)
        assert_all_same(on_gpu[1:2], [expected])
        guards.check()


@pytest.mark.parametrize(("num_rows", "n"), [(1, 128), (2, 37 * 128), (4, 4096)])
def test_accumulate_rows_and_what_is_added_to_their_rounded_sum(num_rows: int, n: int) -> None:
    payload, addend = torch.randn(num_rows * n).bfloat16(), 30 * torch.randn(n).bfloat16()
    expected = torch.empty(n, dtype=torch.bfloat16)
    wire.accumulate_rows_(payload, None, expected, factor=1.0, add=False, addend=addend)
    guards = Guards()
    on_gpu = copies([payload, torch.full_like(addend, math.nan), addend], guards)
    ops.accumulate_rows_(on_gpu[0], None, on_gpu[1], factor=1.0, add=False, addend=on_gpu[2])
    assert_all_same(on_gpu, [payload, expected, addend])
    guards.check()


@pytest.mark.parametrize("own_row", [0, 2, 10])
@pytest.mark.parametrize(("num_rows", "n"), [(11, 3 * 128), (16, 9 * 1024)])
def test_accumulate_rows_with_one_elsewhere(num_rows: int, n: int, own_row: int) -> None:
    payload, scales = wire_rows(num_rows, n)
    own_payload = payload.view(num_rows, n)[own_row].clone()
    own_scales = scales.view(num_rows, -1)[own_row].clone()
    accumulator = torch.randn(n)
    expected = accumulator.clone()
    wire.accumulate_rows_(payload, scales, expected, factor=0.5, add=True)
    scales.view(num_rows, -1)[own_row] = math.nan
    guards = Guards()
    on_gpu = copies([payload, scales, accumulator, own_payload, own_scales], guards)
    own = {"own_row": own_row, "own_payload": on_gpu[3], "own_scales": on_gpu[4]}
    ops.accumulate_rows_(*on_gpu[:3], factor=0.5, add=True, **own)
    assert_all_same(on_gpu[:3], [payload, scales, expected])
    guards.check()


def test_accumulate_rows_beyond_two_billion_elements() -> None:
    """Offsets of 64 bits: the third row begins beyond 2³¹. Compared at both ends."""
    num_rows, n = 3, 2**30 + 1024
    payload, scales = wire_rows(num_rows, 2**20)
    payload = (
        payload.to(DEVICE).view(torch.uint8).repeat(-(-num_rows * n // payload.numel()))[: num_rows * n].view(E4M3)
    )
    scales = torch.exp2(torch.randint(-20, 21, (num_rows * n // GRAD_BLOCK,)).float()).to(DEVICE)
    accumulator = torch.ones(n, device=DEVICE)
    ops.accumulate_rows_(payload, scales, accumulator, factor=1.0 / num_rows, add=True)
    for part in (slice(0, 2**16), slice(n - 2**16, n)):
        of_scales = slice(part.start // GRAD_BLOCK, part.stop // GRAD_BLOCK)
        rows = payload.view(torch.uint8).view(num_rows, n)[:, part].cpu().contiguous().view(E4M3).view(-1)
        row_scales = scales.view(num_rows, -1)[:, of_scales].cpu().contiguous().view(-1)
        expected = torch.ones(2**16)
        wire.accumulate_rows_(rows, row_scales, expected, factor=1.0 / num_rows, add=True)
        assert_same(accumulator[part], expected)


# Companded storage.


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dtype", [INT8, UINT8], ids=str)
@pytest.mark.parametrize("case", [*FLATS, Case((LARGE,), FP32, "wide")], ids=str)
def test_companded_blockwise(case: Case, dtype: torch.dtype, block: int) -> None:
    x = case.make("cpu")
    x = x if dtype is INT8 or case.fill == "outlier" else x.abs()  # a uint8 of what is below zero is zero
    n = x.numel()
    expected: list[Tensor | None] = [torch.empty(n, dtype=dtype), torch.empty(n // block)]
    guards = Guards()
    on_gpu = copies(expected, guards)
    blockwise.quantize_blockwise_(x, *expected)  # type: ignore[arg-type]
    ops.quantize_blockwise_(x.to(DEVICE), *on_gpu)  # type: ignore[arg-type]
    assert_all_same(on_gpu, expected)
    assert_same(ops.dequantize_blockwise(*on_gpu), blockwise.dequantize_blockwise(*expected))  # type: ignore[arg-type]
    guards.check()


@pytest.mark.parametrize("dtype", [E4M3, FP16, INT8, UINT8], ids=str)
@pytest.mark.parametrize("numel", [1, 4096 - 256, 4096 + 16, 3 * 4096 - 130])
def test_a_shorter_input_is_filled_up_with_zeros(numel: int, dtype: torch.dtype) -> None:
    n = 3 * 4096
    x = Case((numel,)).make("cpu").abs()
    expected: list[Tensor | None] = [torch.empty(n, dtype=dtype), torch.empty(n // GRAD_BLOCK)]
    guards = Guards()
    on_gpu = copies(expected, guards)
    blockwise.quantize_blockwise_(x, *expected)  # type: ignore[arg-type]
    ops.quantize_blockwise_(x.to(DEVICE), *on_gpu)  # type: ignore[arg-type]
    assert_all_same(on_gpu, expected)
    guards.check()


# AdamW.

#: What gradients, first and second moments are filled with; `size` is the gradient's.
FILLS = {
    "gaussian": 1e-3,
    "zero": 0.0,
    "nan": 1.0,
    "inf": 1.0,
    "tiny": 1e-20,  # its square is below FP32's normal range
    "vanishing": 1e-26,  # its square is 0
    "huge": 1e15,
    "overflowing": 1e25,  # its square is inf
}


def values(n: int, fill: str, seed: int = 0) -> list[Tensor]:
    """Gradient, first and second moment and master, FP32 [n]; blocks spread over four decades."""
    generator = torch.Generator().manual_seed(seed)
    size = FILLS[fill]
    decades = 10.0 ** (-4 * torch.rand(-(-n // STATE_BLOCK), generator=generator)).repeat_interleave(STATE_BLOCK)[:n]
    grad, exp_avg, exp_avg_sq, master = (torch.randn(n, generator=generator) for _ in range(4))
    grad *= size * decades
    exp_avg *= size * decades
    exp_avg_sq = (exp_avg_sq * size * decades).square()
    position = int(torch.randint(n, (1,), generator=generator))
    if fill in ("nan", "inf"):
        grad[position] = math.nan if fill == "nan" else -math.inf
    if fill == "overflowing":
        exp_avg_sq.clamp_(max=1e38)
    grad[::5] = 0.0
    grad[1::50] = -0.0
    exp_avg_sq[: STATE_BLOCK // 2] = 0.0
    return [grad, exp_avg, exp_avg_sq, 0.02 * master]


def stored(value: Tensor, form: tuple[torch.dtype, int | None]) -> list[Tensor | None]:
    """`value` [n] in a storage form, on the CPU."""
    dtype, block = form
    if block is None:
        return [value.to(dtype), None]
    payload, scales = torch.empty(value.numel(), dtype=dtype), torch.empty(value.numel() // block)
    blockwise.quantize_blockwise_(value, payload, scales)
    return [payload, scales]


Form = tuple[torch.dtype, int | None]
_GRAD: Form = (E4M3, 128)
_INT8: Form = (INT8, 256)
_UINT8: Form = (UINT8, 256)
_FP16: Form = (FP16, 256)


@dataclass(frozen=True)
class CompandedCase:
    """Storage of AdamW with a companded moment."""

    name: str
    grad: Form = _GRAD
    exp_avg: Form = _INT8
    exp_avg_sq: Form = _UINT8
    master: Form = _FP16
    weight: torch.dtype | None = None
    chunk: int | None = 4096
    num_elements: int = 3 * 4096
    decoupled: bool = True
    betas: tuple[float, float] = (0.9, 0.95)

    def __str__(self) -> str:
        return self.name


CASES = (
    CompandedCase("both"),
    CompandedCase("both_l2", decoupled=False),
    CompandedCase("beta2_0.999", betas=(0.9, 0.999)),
    CompandedCase("no_momentum", betas=(0.0, 0.95)),
    CompandedCase("one_block", grad=(FP32, None), chunk=None, num_elements=256),
    CompandedCase("part_of_a_program", weight=BF16, chunk=None, num_elements=5 * 256 + 4096),
    CompandedCase("odd_chunks", chunk=512, num_elements=7 * 512),
    CompandedCase("fp32_master", grad=(BF16, None), master=(FP32, None), weight=BF16),
    CompandedCase("first_only", exp_avg_sq=_FP16),
    CompandedCase("second_only", exp_avg=(E4M3, 256)),
    CompandedCase("second_with_fp32", exp_avg=(FP32, None), master=(FP32, None), weight=FP16),
    CompandedCase("blocks_of_128", grad=(E4M3, 256), exp_avg=(INT8, 128), exp_avg_sq=(UINT8, 128), master=(FP16, 128)),
    CompandedCase("blocks_of_both", grad=(E4M3, 256), exp_avg=(INT8, 128), exp_avg_sq=_UINT8),
)


def hyper_of(decoupled: bool = True, betas: tuple[float, float] = (0.9, 0.95), lr: float = 1e-3) -> dict:
    return dict(lr=lr, beta1=betas[0], beta2=betas[1], eps=1e-8, weight_decay=0.1, decoupled=decoupled)


def given(places: str | None, n: int) -> list[ops.Places | None]:
    """On the CPU and on the GPU."""
    return [None if places is None else places_of(places, n, device) for device in ("cpu", DEVICE)]


def companded_step_is_right(
    case: CompandedCase, fill: str, step: float, factor: float, places: str | None = None
) -> None:
    n = case.num_elements
    on_cpu_places, on_gpu_places = given(places, n)
    forms = (case.grad, case.exp_avg, case.exp_avg_sq, case.master)
    operands = [tensor for value, form in zip(values(n, fill), forms, strict=True) for tensor in stored(value, form)]
    before = [None, *(blockwise.load_state(*operands[place : place + 2]).clone() for place in (2, 4, 6))]  # type: ignore[arg-type]
    operands.append(None if case.weight is None else torch.zeros(n, dtype=case.weight))
    operands.append(None if case.chunk is None else torch.zeros(n // case.chunk))
    guards = Guards()
    on_gpu = copies(operands, guards)
    scalars = [torch.tensor([factor]), torch.tensor([step])]
    hyper = hyper_of(case.decoupled, case.betas)
    adamw.adamw_step_(**adam(*operands, *scalars, places=on_cpu_places, **hyper))  # type: ignore[arg-type]
    moved = [scalar.to(DEVICE) for scalar in scalars]
    ops.adamw_step_(**adam(*on_gpu, *moved, places=on_gpu_places, **hyper))  # type: ignore[arg-type]
    assert_all_same(on_gpu[:2], operands[:2])
    # The square root of a v near FP32's largest number is inf to the kernel: its parameter stays.
    for place in (2, 4) if fill == "overflowing" else (2, 4, 6):
        assert_state_alike(*on_gpu[place : place + 2], *operands[place : place + 2], before=before[place // 2])
    stored_master = blockwise.load_state(*[None if x is None else x.cpu() for x in on_gpu[6:8]])  # type: ignore[arg-type]
    if case.weight is not None:
        assert_same(on_gpu[8], stored_master.to(case.weight))
    if case.chunk is not None and math.isfinite(factor):
        assert_same(on_gpu[9], stored_master.abs().view(-1, case.chunk).amax(dim=1))
    guards.check()


@pytest.mark.parametrize("step", [1.0, 1000.0])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_companded_adamw(case: CompandedCase, step: float) -> None:
    companded_step_is_right(case, "gaussian", step, 0.7)


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[7]], ids=str)
def test_companded_adamw_of_parts_of_parameters(case: CompandedCase, places: str) -> None:
    companded_step_is_right(case, "gaussian", 5.0, 0.7, places)


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[7]], ids=str)
def test_companded_adamw_of_awkward_values(case: CompandedCase, fill: str) -> None:
    companded_step_is_right(case, fill, 3.0, 0.7)


def test_companded_adamw_of_many() -> None:
    companded_step_is_right(CompandedCase("large", num_elements=LARGE), "gaussian", 17.0, 0.3)


@pytest.mark.parametrize("factor", [math.nan, math.inf, -math.inf])
def test_companded_adamw_is_skipped(factor: float) -> None:
    companded_step_is_right(CASES[0], "gaussian", 3.0, factor)


@pytest.mark.parametrize("beta", [0.9, 0.95, 0.99, 0.999, 0.9999])
def test_bias_corrections(beta: float) -> None:
    """Of every size of exponent: a step whose update is the correction itself, through unscaled storage beside it."""
    for step in (1.0, 2.0, 3.0, 7.0, 30.0, 200.0, 1000.0, 12345.0, 1e6, 1e7):
        case = CompandedCase("one_block", grad=(FP32, None), master=(FP32, None), num_elements=4096, betas=(beta, beta))
        companded_step_is_right(case, "gaussian", step, 1.0)


# AdamW over a split master.


@dataclass(frozen=True)
class SplitCase:
    """Storage of AdamW over a split master."""

    name: str
    grad: Form = _GRAD
    exp_avg: Form = _INT8
    exp_avg_sq: Form = _UINT8
    chunk: int = 4096
    num_chunks: int = 3
    decoupled: bool = True
    lr: float = 1e-3

    def __str__(self) -> str:
        return self.name


SPLIT_CASES = (
    SplitCase("stretch"),
    SplitCase("l2", decoupled=False),
    SplitCase("one_chunk", num_chunks=1),
    SplitCase("small_chunks", chunk=512, num_chunks=7),
    SplitCase("fp32_moments", grad=(FP32, None), exp_avg=(FP32, None), exp_avg_sq=(FP32, None)),
    SplitCase("O3_moments", exp_avg=(E4M3, 256), exp_avg_sq=_FP16),
    SplitCase("bf16_gradient", grad=(BF16, None)),
    SplitCase("saturates", lr=10.0),
)


def split_step_is_right(case: SplitCase, fill: str, step: float, factor: float, places: str | None = None) -> None:
    n = case.chunk * case.num_chunks
    on_cpu_places, on_gpu_places = given(places, n)
    grad, exp_avg, exp_avg_sq, master = values(n, fill)
    # Three tensors a few powers of two apart, with zeros of both signs, numbers below E4M3's normal range and a NaN.
    chunk_tensor = (torch.arange(case.num_chunks) % 3).int()
    weight_scales = torch.tensor([2.0**-12, 2.0**-10, 2.0**-20])
    new_weight_scales = torch.tensor([2.0**-12, 2.0**-11, 2.0**-19])
    master *= torch.tensor([1.0, 4.0, 2.0**-8])[chunk_tensor.long()].repeat_interleave(case.chunk)
    master[::17] *= 1e-4
    master[::19] = 0.0
    master[1::19] = -0.0
    master[n // 2] = math.nan
    scale = weight_scales[chunk_tensor.long()][:, None]
    weight, correction = (part.view(-1) for part in split_master.split_master(master.view(case.num_chunks, -1), scale))
    operands: list[Tensor | None] = [
        *(*stored(grad, case.grad), *stored(exp_avg, case.exp_avg), *stored(exp_avg_sq, case.exp_avg_sq)),
        *(weight, correction, weight_scales, new_weight_scales, chunk_tensor, torch.zeros(case.num_chunks)),
    ]
    before = [None, *(blockwise.load_state(*operands[place : place + 2]).clone() for place in (2, 4))]  # type: ignore[arg-type]
    guards = Guards()
    on_gpu = copies(operands, guards)
    scalars = [torch.tensor([factor]), torch.tensor([step])]
    hyper = hyper_of(case.decoupled, lr=case.lr)
    split_master.adamw_split_step_(**split_adam(*operands, *scalars, places=on_cpu_places, **hyper))  # type: ignore[arg-type]
    moved = [scalar.to(DEVICE) for scalar in scalars]
    ops.adamw_split_step_(**split_adam(*on_gpu, *moved, places=on_gpu_places, **hyper))  # type: ignore[arg-type]
    assert_all_same(on_gpu[:2], operands[:2])
    assert_all_same(on_gpu[8:11], operands[8:11])
    for place in (2, 4):
        assert_state_alike(*on_gpu[place : place + 2], *operands[place : place + 2], before=before[place // 2])
    if fill != "overflowing":
        scale = new_weight_scales[chunk_tensor.long()][:, None]
        assert_split_alike(on_gpu[6:8], operands[6:8], scale, case.lr)  # type: ignore[arg-type]
    guards.check()


@pytest.mark.parametrize("step", [1.0, 1000.0])
@pytest.mark.parametrize("case", SPLIT_CASES, ids=str)
def test_adamw_split(case: SplitCase, step: float) -> None:
    split_step_is_right(case, "gaussian", step, 0.7)


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("case", [SPLIT_CASES[0], SPLIT_CASES[5]], ids=str)
def test_adamw_split_of_parts_of_parameters(case: SplitCase, places: str) -> None:
    split_step_is_right(case, "gaussian", 5.0, 0.7, places)


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("case", [SPLIT_CASES[0], SPLIT_CASES[1], SPLIT_CASES[4]], ids=str)
def test_adamw_split_of_awkward_values(case: SplitCase, fill: str) -> None:
    split_step_is_right(case, fill, 3.0, 0.7)


def test_adamw_split_of_many() -> None:
    split_step_is_right(SplitCase("large", num_chunks=LARGE // 4096), "gaussian", 17.0, 0.3)


@pytest.mark.parametrize("factor", [math.nan, math.inf, -math.inf])
def test_adamw_split_is_skipped(factor: float) -> None:
    split_step_is_right(SPLIT_CASES[0], "gaussian", 3.0, factor)


def test_adamw_split_adopts_the_scales_of_many_tensors() -> None:
    """More tensors than one program of the second launch copies."""
    num_tensors, chunk = 1500, 256
    n = num_tensors * chunk
    chunk_tensor = torch.arange(num_tensors).int()
    scales = torch.full((num_tensors,), 2.0**-12)
    weight, correction = split_master.split_master(0.02 * torch.randn(n), scales[:1])
    moments = [torch.zeros(n), None, torch.zeros(n), None]
    rest = [weight, correction, scales, torch.ldexp(scales, torch.randint(-1, 2, (num_tensors,))), chunk_tensor]
    operands = [torch.randn(n), None, *moments, *rest, torch.empty(num_tensors), torch.ones(1), torch.ones(1)]
    guards = Guards()
    on_gpu = copies(operands, guards)
    split_master.adamw_split_step_(**split_adam(*operands, **hyper_of()))  # type: ignore[arg-type]
    ops.adamw_split_step_(**split_adam(*on_gpu, **hyper_of()))  # type: ignore[arg-type]
    assert_all_same(on_gpu[8:10], operands[8:10])
    assert torch.equal(operands[8], operands[9])  # type: ignore[arg-type]
    assert_split_alike(on_gpu[6:8], operands[6:8], operands[8][:, None])  # type: ignore[arg-type, index]
    guards.check()
