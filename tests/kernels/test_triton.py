"""Every CUDA variant against the reference: quantisation bitwise, sums, GEMM and AdamW by their error.

The reference runs on the CPU: on CUDA torch turns a division by a constant into a product with its reciprocal, and the
scale is specified as a division.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fp8_megatron.dtypes import E4M3, E5M2, MAX_FINITE
from fp8_megatron.kernels import ops, reference, shapes
from fp8_megatron.kernels.adamw import reference as adamw
from fp8_megatron.kernels.quantize import blockwise
from fp8_megatron.kernels.quantize import reference as quantize
from tests.kernels.cases import (
    ADAM_CASES,
    BLOCK_PAYLOADS,
    BLOCKS,
    FLATS,
    FP8,
    MATRICES,
    PLACES,
    AdamCase,
    Case,
    adam,
    places_of,
)

pytestmark = pytest.mark.gpu

_GUARD = 256


class Guards:
    """Surrounds tensors with bytes that nothing may write, and fills them with bytes that everything must."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []

    def empty(self, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """`torch.empty`, guarded."""
        num_bytes = math.prod(shape) * dtype.itemsize
        buffer = torch.full((_GUARD + num_bytes + _GUARD,), 0xA5, dtype=torch.uint8, device=device)
        self.buffers.append(buffer)
        return buffer[_GUARD : _GUARD + num_bytes].view(dtype).view(shape)

    def copy(self, value: Tensor) -> Tensor:
        """`value` on the GPU, guarded."""
        return self.empty(value.shape, dtype=value.dtype, device="cuda").copy_(value)

    def check(self) -> None:
        for buffer in self.buffers:
            assert bool((buffer[:_GUARD] == 0xA5).all()), "wrote before a tensor"
            assert bool((buffer[-_GUARD:] == 0xA5).all()), "wrote after a tensor"


@pytest.fixture
def guards(monkeypatch: pytest.MonkeyPatch) -> Iterator[Guards]:
    """Guards around everything the kernels allocate (with `torch.empty`), checked at the end of the test."""
    guarded, plain = Guards(), torch.empty

    def empty(*shape, **kwargs) -> Tensor:  # type: ignore[no-untyped-def]
        if torch.device(kwargs.get("device", "cpu")).type != "cuda":
            return plain(*shape, **kwargs)
        shape = shape[0] if len(shape) == 1 else shape
        return guarded.empty((shape,) if isinstance(shape, int) else tuple(shape), **kwargs)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(shapes, "_on_current_gpu", None)
    yield guarded
    monkeypatch.undo()
    guarded.check()


def assert_same(value: Tensor, expected: Tensor) -> None:
    """The same bytes (a NaN is a NaN), or an error that names the first element that differs."""
    value = value.cpu()
    assert value.dtype == expected.dtype and value.shape == expected.shape, (value.shape, expected.shape)
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[value.element_size()]
    same = (value.view(width) == expected.view(width)) | (value.float().isnan() & expected.float().isnan())
    if not bool(same.all()):
        where = tuple(int(i) for i in (~same).nonzero()[0])
        got, want = value.view(width)[where], expected.view(width)[where]
        raise AssertionError(
            f"{int((~same).sum())} of {same.numel()} differ, first at {where}: "
            f"{value[where].float()} (0x{int(got):x}) for {expected[where].float()} (0x{int(want):x})"
        )


def snr_db(value: Tensor, truth: Tensor) -> float:
    """Signal-to-noise ratio in dB, in float64; inf where equal."""
    value, truth = value.cpu().double(), truth.cpu().double()
    noise = (value - truth).square().sum()
    return float("inf") if noise == 0 else float(10 * torch.log10(truth.square().sum() / noise))


@pytest.mark.parametrize("case", [*MATRICES, *FLATS, Case((3, 5, 7))], ids=str)
def test_amax(case: Case, guards: Guards) -> None:
    x = case.make("cuda")
    out = ops.amax(x)
    assert out.shape == (1,) and out.dtype == torch.float32
    # Not bitwise: the amax of zeros is 0 with either sign.
    torch.testing.assert_close(out.cpu(), reference.amax(x.cpu()), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("power_of_two", [False, True], ids=["exact", "power_of_two"])
@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("case", MATRICES, ids=str)
def test_quantize_current(case: Case, dtype: torch.dtype, power_of_two: bool, guards: Guards) -> None:
    x = case.make("cuda")
    kept = x.clone()
    expected = quantize.quantize_current(x.cpu(), dtype, power_of_two=power_of_two, rowwise=True, transposed=True)
    for rowwise, transposed in ((True, True), (True, False), (False, True)):
        payload, payload_t, scale = ops.quantize_current(
            x, dtype, power_of_two=power_of_two, rowwise=rowwise, transposed=transposed
        )
        assert_same(scale, expected[2])
        assert_same(payload, expected[0]) if rowwise else _assert_empty(payload, dtype)
        assert_same(payload_t, expected[1]) if transposed else _assert_empty(payload_t, dtype)
    assert_same(x, kept.cpu())


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("case", MATRICES, ids=str)
def test_quantize_with_scale(case: Case, dtype: torch.dtype, guards: Guards) -> None:
    x = case.make("cuda")
    scale = torch.tensor([0.5 / MAX_FINITE[dtype]], device="cuda")  # saturates what is beyond half a standard deviation
    expected = quantize.quantize_with_scale(x.cpu(), scale.cpu(), dtype, rowwise=True, transposed=True, amax_out=None)
    for rowwise, transposed in ((True, True), (True, False), (False, True)):
        for start in (None, 0.0, 1e5):
            recorded = None if start is None else guards.copy(torch.tensor([start]))
            payload, payload_t = ops.quantize_with_scale(
                x, scale, dtype, rowwise=rowwise, transposed=transposed, amax_out=recorded
            )
            assert_same(payload, expected[0]) if rowwise else _assert_empty(payload, dtype)
            assert_same(payload_t, expected[1]) if transposed else _assert_empty(payload_t, dtype)
            if recorded is not None:
                raised = torch.maximum(torch.tensor([start]), reference.amax(x.cpu()))
                torch.testing.assert_close(recorded.cpu(), raised, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("scale", [0.0, float("inf"), float("nan"), 2.0**-126, 1e38])
def test_quantize_with_extreme_scales(scale: float, guards: Guards) -> None:
    x, one = Case((64, 96)).make("cuda"), torch.tensor([scale])
    expected = quantize.quantize_with_scale(x.cpu(), one, E4M3, rowwise=True, transposed=True, amax_out=None)
    for actual, wanted in zip(ops.quantize_with_scale(x, one.cuda(), E4M3, transposed=True), expected, strict=True):
        assert_same(actual, wanted)


def test_quantize_takes_a_strided_input(guards: Guards) -> None:
    x = Case((160, 512)).make("cuda")
    for view in (x[:, 64:320], x.t(), x[::2]):
        expected = quantize.quantize_current(view.cpu(), E4M3, power_of_two=False, rowwise=True, transposed=True)
        for actual, wanted in zip(ops.quantize_current(view, E4M3, transposed=True), expected, strict=True):
            assert_same(actual, wanted)


def test_quantize_refuses_what_it_cannot_write(guards: Guards) -> None:
    x = Case((30, 64)).make("cuda")
    with pytest.raises(ValueError, match="M=30"):
        ops.quantize_current(x, E4M3, transposed=True)
    with pytest.raises(ValueError, match="no layout"):
        ops.quantize_current(x, E4M3, rowwise=False)
    assert_same(ops.quantize_current(x, E4M3)[0], ops.quantize_current(x.cpu(), E4M3)[0])


def _assert_empty(tensor: Tensor, dtype: torch.dtype) -> None:
    assert tensor.numel() == 0 and tensor.dtype == dtype


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("shape", sorted({case.shape for case in MATRICES}), ids=str)
def test_transpose(shape: tuple[int, int], dtype: torch.dtype, guards: Guards) -> None:
    codes = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    out = ops.transpose(codes.view(dtype).cuda())
    assert torch.equal(out.cpu().view(torch.uint8), codes.t().contiguous())


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("payload_dtype", BLOCK_PAYLOADS, ids=str)
@pytest.mark.parametrize("case", FLATS, ids=str)
def test_blockwise(case: Case, payload_dtype: torch.dtype, block: int, guards: Guards) -> None:
    x = case.make("cuda")
    n = x.numel()
    expected, expected_scales = torch.empty(n, dtype=payload_dtype), torch.empty(n // block)
    blockwise.quantize_blockwise_(x.cpu(), expected, expected_scales)
    payload = torch.empty(n, dtype=payload_dtype, device="cuda")
    scales = torch.empty(n // block, dtype=torch.float32, device="cuda")
    ops.quantize_blockwise_(x, payload, scales)
    assert_same(scales, expected_scales)
    assert_same(payload, expected)
    assert_same(ops.dequantize_blockwise(payload, scales), blockwise.dequantize_blockwise(expected, expected_scales))


@pytest.mark.parametrize("block", [None, *BLOCKS])
@pytest.mark.parametrize(
    "case", [case for case in FLATS if case.fill in ("gaussian", "outlier", "nan", "inf")], ids=str
)
def test_squared_norm(case: Case, block: int | None, guards: Guards) -> None:
    x, scales = case.make("cuda"), None
    if block is not None:
        payload = torch.empty(x.numel(), dtype=E4M3, device="cuda")
        scales = torch.empty(x.numel() // block, dtype=torch.float32, device="cuda")
        ops.quantize_blockwise_(x, payload, scales)
        x = payload
    first, second = ops.squared_norm(x, scales), ops.squared_norm(x, scales)
    value = blockwise.load_state(x.cpu(), None if scales is None else scales.cpu()).double()
    # A thread adds at most n / 2¹⁸ + 16 squares in FP32 before a tree of additions: below 100 roundings of 2⁻²⁴.
    torch.testing.assert_close(first.cpu().double(), value.square().sum().view(1), rtol=1e-5, atol=0, equal_nan=True)
    assert_same(first, second.cpu())  # the order of the additions is fixed


@pytest.mark.parametrize("use_fast_accum", [False, True], ids=["split", "fast"])
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)], ids=str)
@pytest.mark.parametrize("shape", [(16, 16, 16), (272, 336, 208), (512, 1024, 4096)], ids=str)
def test_scaled_mm(shape: tuple[int, int, int], formats: tuple[torch.dtype, torch.dtype], use_fast_accum: bool) -> None:
    m, n, k = shape
    a, _, scale_a = ops.quantize_current(Case((m, k)).make("cuda", 1), formats[0])
    b, _, scale_b = ops.quantize_current(Case((n, k)).make("cuda", 2), formats[1])
    truth = (a.double() * scale_a.double()) @ (b.double() * scale_b.double()).t()
    for bias in (None, torch.randn(n, device="cuda").bfloat16()):
        out = ops.scaled_mm(a, b, scale_a, scale_b, bias=bias, use_fast_accum=use_fast_accum)
        expected = truth if bias is None else truth + bias.double()
        # BF16's rounding alone is 56.6 dB (test_reference). The tensor core keeps about 13 fraction bits of a sum:
        # √(K / 32) truncations of 2⁻¹³ of the running sum, for K = 4096 with the fast accumulator 11 · 2⁻¹⁴: 63 dB; a
        # truncation is biased, so allow its square, 40 dB.
        assert snr_db(out, expected) > 40


def _storage(value: Tensor, form: tuple[torch.dtype, int | None]) -> tuple[Tensor, Tensor | None]:
    """`value` [n] in a storage form, on the CPU."""
    dtype, block = form
    if block is None:
        return value.to(dtype), None
    payload, scales = torch.empty(value.numel(), dtype=dtype), torch.empty(value.numel() // block)
    blockwise.quantize_blockwise_(value, payload, scales)
    return payload, scales


def _step_of(dtype: torch.dtype, value: Tensor, scale: Tensor | float) -> Tensor:
    """The distance of neighbouring numbers of a storage dtype around `value`."""
    mantissa_bits, smallest = {
        E4M3: (3, 2.0**-9),
        torch.float16: (10, 2.0**-24),
        torch.bfloat16: (7, 2.0**-133),
        torch.float32: (23, 2.0**-149),
    }[dtype]
    return torch.maximum(value.abs() * 2.0**-mantissa_bits, torch.as_tensor(smallest * scale))


@pytest.mark.parametrize("case", ADAM_CASES, ids=str)
def test_adamw_step(case: AdamCase, guards: Guards) -> None:
    n = case.num_elements
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(n, generator=generator) * size for size in (1e-3, 1e-4, 1e-8, 0.02)]
    values[2] = values[2].abs() + 1e-10
    forms = (case.grad, case.exp_avg, case.exp_avg_sq, case.master)
    operands = [tensor for value, form in zip(values, forms, strict=True) for tensor in _storage(value, form)]
    operands.append(None if case.weight is None else torch.empty(n, dtype=case.weight))
    operands.append(None if case.chunk is None else torch.empty(n // case.chunk))
    scalars = [torch.tensor([0.7]), torch.tensor([3.0])]
    hyper = dict(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, decoupled=case.decoupled)
    on_gpu = [None if tensor is None else guards.copy(tensor) for tensor in operands]
    gradient = on_gpu[0].clone()
    ops.adamw_step_(**adam(*on_gpu, *[scalar.cuda() for scalar in scalars], **hyper))
    adamw.adamw_step_(**adam(*operands, *scalars, **hyper))
    assert_same(on_gpu[0], gradient.cpu())
    for index, form in ((2, case.exp_avg), (4, case.exp_avg_sq), (6, case.master)):
        payload, scales = on_gpu[index].cpu(), None if on_gpu[index + 1] is None else on_gpu[index + 1].cpu()
        actual = blockwise.load_state(payload, scales)
        expected = blockwise.load_state(operands[index], operands[index + 1])
        # Both compute in FP32 to a few ulp (no sum in the step cancels to below a thousandth), so what is stored
        # differs where a rounding boundary lies between: by one step, in a thousandth of FP16's numbers at most.
        scale = 1.0 if scales is None else torch.maximum(scales, operands[index + 1]).repeat_interleave(form[1])
        if form[0] == torch.float32:
            assert snr_db(actual, expected) > 60
            assert snr_db(actual, expected) > 100  # what FP32 arithmetic gives
        else:
            assert ((actual - expected).abs() <= _step_of(form[0], expected, scale)).all()
            assert (actual != expected).double().mean() < 0.02
    stored = blockwise.load_state(on_gpu[6].cpu(), None if on_gpu[7] is None else on_gpu[7].cpu())
    if case.weight is not None:
        assert_same(on_gpu[8], stored.to(case.weight))
    if case.chunk is not None:
        assert_same(on_gpu[9], stored.abs().view(-1, case.chunk).amax(dim=1))


ROUNDED = {
    "O3": ((E4M3, 256), (torch.float16, 256), (torch.float16, 256)),
    "bf16": ((torch.bfloat16, None),) * 3,
    "fp8": ((E4M3, 256),) * 3,
    "blocks_of_128": ((E4M3, 128), (torch.float16, 128), (torch.float16, 128)),
}


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("storage", ROUNDED)
def test_adamw_rounds_as_the_reference(storage: str, places: str, guards: Guards) -> None:
    """Bit for bit, where the arithmetic before the rounding is exact on every device: moments that decay without a
    gradient at a learning rate of 0, then masters that decay beside moments of 0."""
    n = 5 * 4096
    generator = torch.Generator().manual_seed(0)
    forms = ROUNDED[storage]
    for decays_master in (False, True):
        decades = 10.0 ** (-6 * torch.rand(n, generator=generator))
        m, p = (torch.randn(n, generator=generator) * decades for _ in range(2))
        moments = [torch.zeros(n)] * 2 if decays_master else [m, m.square()]
        operands = [torch.zeros(n), None]
        operands += [
            part for value, form in zip([*moments, 0.02 * p], forms, strict=True) for part in _storage(value, form)
        ]
        operands += [torch.empty(n, dtype=torch.bfloat16), torch.empty(5)]
        on_gpu = [None if tensor is None else guards.copy(tensor) for tensor in operands]
        hyper = dict(lr=1e-4 * decays_master, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, decoupled=True)
        for step in (1.0, 2.0, 1000.0):
            scalars = [torch.ones(1), torch.tensor([step])]
            adamw.adamw_step_(**adam(*operands, *scalars, places=places_of(places, n), **hyper))
            moved = [scalar.cuda() for scalar in scalars]
            ops.adamw_step_(**adam(*on_gpu, *moved, places=places_of(places, n, "cuda"), **hyper))
            for actual, expected in zip(on_gpu, operands, strict=True):
                if expected is not None:
                    assert_same(actual, expected)


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("case", ADAM_CASES[:5], ids=str)
def test_adamw_step_is_skipped(case: AdamCase, factor: float, guards: Guards) -> None:
    n = case.num_elements
    forms = (case.grad, case.exp_avg, case.exp_avg_sq, case.master)
    operands = [tensor for form in forms for tensor in _storage(torch.rand(n), form)]
    operands.append(None if case.weight is None else torch.zeros(n, dtype=case.weight))
    operands.append(None if case.chunk is None else torch.zeros(n // case.chunk))
    on_gpu = [None if tensor is None else guards.copy(tensor) for tensor in operands]
    hyper = dict(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, decoupled=case.decoupled)
    ops.adamw_step_(**adam(*on_gpu, torch.tensor([factor], device="cuda"), torch.ones(1, device="cuda"), **hyper))
    for before, after in zip(operands, on_gpu, strict=True):
        if before is not None:
            assert_same(after, before)


def test_adamw_step_passes_a_nan_on(guards: Guards) -> None:
    values = [torch.rand(8192) for _ in range(4)]
    values[0][5000] = torch.nan
    forms = ((E4M3, 128), (E4M3, 256), (torch.float16, 256), (torch.float16, 256))
    operands = [tensor for value, form in zip(values, forms, strict=True) for tensor in _storage(value, form)]
    on_gpu = [guards.copy(tensor) for tensor in [*operands, torch.empty(2)]]
    one = torch.ones(1, device="cuda")
    ops.adamw_step_(
        **adam(
            *on_gpu[:8],
            None,
            on_gpu[8],
            one,
            one,
            lr=1e-3,
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            weight_decay=0.1,
            decoupled=True,
        )
    )
    master = blockwise.load_state(on_gpu[6].cpu(), on_gpu[7].cpu())
    # The gradient's block of 128 is NaN, so the master's block of 256 is; no other is.
    assert master[4864:5120].isnan().all() and master.isnan().sum() == 256
    assert on_gpu[8].cpu().isnan().tolist() == [False, True]


@pytest.mark.parametrize("chunk", [512, 4096])
@pytest.mark.parametrize("form", [(torch.float16, 256), (torch.float32, None), (torch.bfloat16, None)], ids=str)
def test_derive_fp8_weights(form: tuple[torch.dtype, int | None], chunk: int, guards: Guards) -> None:
    num_chunks = 7
    master, scales = _storage(torch.randn(num_chunks * chunk), form)
    chunk_tensor = torch.tensor([0, 0, 1, 3, 3, 3, 2], dtype=torch.int32)
    weight_scales = torch.tensor([0.01, 0.004, 0.5, float("nan")])
    expected = torch.empty(master.numel(), dtype=E4M3)
    adamw.derive_fp8_weights_(master, scales, expected, weight_scales, chunk_tensor)
    payload = torch.empty(master.numel(), dtype=E4M3, device="cuda")
    ops.derive_fp8_weights_(
        master.cuda(), None if scales is None else scales.cuda(), payload, weight_scales.cuda(), chunk_tensor.cuda()
    )
    assert_same(payload, expected)
