"""ScaledTensor as megatron-core and torch.nn treat it."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from fp8_megatron.dtypes import E4M3, STATE_BLOCK
from fp8_megatron.formats.tensorwise import Tensorwise
from fp8_megatron.kernels import ops
from fp8_megatron.quantization.scaled_tensor import Home, ScaledTensor
from fp8_megatron.quantization.stats import snr_db


def random_matrix(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fp16_blockwise(value: Tensor) -> ScaledTensor:
    """As levels O1 and O2 store a weight: FP16 with a power-of-two scale for each 256 elements."""
    payload = torch.empty(value.numel(), dtype=torch.float16)
    scales = torch.empty(value.numel() // STATE_BLOCK)
    ops.quantize_blockwise_(value.reshape(-1), payload, scales)
    return ScaledTensor(payload.view(value.shape), scales)


def bf16_unscaled(value: Tensor) -> ScaledTensor:
    """As a weight is stored under --params-dtype bf16 beside a wider master."""
    return ScaledTensor(value.bfloat16(), torch.ones(1))


def bits(scaled: ScaledTensor) -> tuple[bytes, bytes]:
    return scaled.payload.view(torch.uint8).numpy().tobytes(), scaled.scale.numpy().tobytes()


def linear_with(weight: ScaledTensor) -> torch.nn.Linear:
    """A module around the weight, tagged as megatron-core tags its parameters."""
    module = torch.nn.Linear(weight.shape[1], weight.shape[0])
    module.weight = torch.nn.Parameter(weight)
    module.weight.tensor_model_parallel = True
    module.weight.partition_dim = 0
    module.weight.main_grad = object()
    return module


STORAGES = pytest.mark.parametrize(
    "make", [ScaledTensor.quantize, fp16_blockwise, bf16_unscaled], ids=["fp8", "fp16", "bf16"]
)
Maker = Callable[[Tensor], ScaledTensor]


@STORAGES
def test_is_a_parameter_that_advertises_bf16(make: Maker) -> None:
    param = torch.nn.Parameter(make(random_matrix(64, 32)))
    assert isinstance(param, torch.nn.Parameter) and isinstance(param, ScaledTensor)
    assert param.requires_grad and param.is_leaf
    assert param.dtype == torch.bfloat16 and param.shape == (64, 32)
    assert "advertises=torch.bfloat16" in repr(param)


CASTS: dict[str, Callable[[torch.nn.Module], object]] = {
    "bfloat16": lambda module: module.bfloat16(),  # what Float16Module does
    "half": lambda module: module.half(),
    "float": lambda module: module.float(),
    "to_dtype": lambda module: module.to(torch.float64),
    "cpu": lambda module: module.cpu(),
    "eval": lambda module: module.eval(),
}


@STORAGES
@pytest.mark.parametrize("cast", list(CASTS))
def test_casting_a_module_leaves_payload_and_attributes_alone(make: Maker, cast: str) -> None:
    module = linear_with(make(random_matrix(64, 32)))
    weight, before, main_grad = module.weight, bits(module.weight), module.weight.main_grad
    payload = weight.payload
    CASTS[cast](module)
    assert module.weight is weight and weight.payload is payload
    assert bits(weight) == before and weight.dtype == torch.bfloat16
    assert weight.tensor_model_parallel and weight.partition_dim == 0 and weight.main_grad is main_grad


@STORAGES
def test_detach_shares_and_clone_is_plain(make: Maker) -> None:
    param = torch.nn.Parameter(make(random_matrix(64, 32)))
    detached, cloned, before = param.detach(), param.detach().clone(), bits(param)
    assert detached.payload is param.payload and not detached.requires_grad
    assert type(cloned) is Tensor and torch.equal(cloned, param.dequantize(torch.bfloat16))
    assert bits(copy.deepcopy(param)) == before
    cloned.add_(1.0)
    assert bits(param) == before


@pytest.mark.parametrize("ranks", [1, 4])
def test_an_fp8_weight_takes_values_of_another_as_they_are(ranks: int) -> None:
    """By BF16 too, and by parts, as a checkpoint of a frozen weight is loaded on other ranks."""
    weight, other = (ScaledTensor.quantize(factor * random_matrix(64, 32)) for factor in (0.3, 7.0))
    values = weight.dequantize()
    assert torch.equal(values, weight.dequantize(torch.bfloat16).float())
    with torch.no_grad():
        for own, given in zip(other.new_zeros(other.shape).split(64 // ranks), values.split(64 // ranks), strict=True):
            part = own.new_zeros(own.shape)[:]  # memory of its own, as under fully_shard
            part.copy_(given.bfloat16())
            assert torch.equal(part.dequantize(), given)
        other.copy_(values.bfloat16())
    assert bits(other) == bits(weight)


def test_what_errors_of_views_advise_works() -> None:
    weight = fp16_blockwise(random_matrix(64, 32))
    with pytest.raises(NotImplementedError, match=r"view those of p.detach\(\).clone\(\)"):
        weight.view(torch.int16)
    assert torch.equal(weight.clone().view(torch.int16), weight.dequantize(weight.dtype).view(torch.int16))
    with pytest.raises(NotImplementedError, match=r"take them of p.detach\(\).clone\(\)"):
        weight.split(3)
    assert torch.equal(weight.clone().split(3)[1], weight.dequantize(weight.dtype)[3:6])


def test_dequantize_of_one_scale_and_of_blocks() -> None:
    value = random_matrix(64, 32)
    fp8 = ScaledTensor.quantize(value)
    exact = fp8.payload.double() * fp8.scale.double()
    # payload · scale is one FP32 rounding.
    torch.testing.assert_close(fp8.dequantize().double(), exact, rtol=2**-24, atol=0)
    assert snr_db(fp8.dequantize(), value) > 30.5  # E4M3 of a gaussian: 31.5 dB, less 1 dB for the sample
    fp16 = fp16_blockwise(value)
    exact = (fp16.payload.double().view(-1, STATE_BLOCK) * fp16.scale.double()[:, None]).view(64, 32)
    assert torch.equal(fp16.dequantize().double(), exact)  # power-of-two scales: exact
    assert fp16.dequantize(torch.bfloat16).dtype == torch.bfloat16
    assert snr_db(fp16.dequantize(), value) > 72.0  # seven more mantissa bits: 31.5 + 42.1 dB


def test_gemm_operand_is_the_weight_itself_or_quantised_now() -> None:
    value = random_matrix(64, 32)
    fp8 = ScaledTensor.quantize(value)
    operand = fp8.gemm_operand(Tensorwise(E4M3))
    assert operand.payload is fp8.payload and operand.scale is fp8.scale
    fp16 = fp16_blockwise(value)
    operand = fp16.gemm_operand(Tensorwise(E4M3))
    payload, _, scale = ops.quantize_current(fp16.dequantize(), E4M3)
    assert operand.payload.dtype == E4M3
    assert bits(ScaledTensor(operand.payload, operand.scale)) == bits(ScaledTensor(payload, scale))


@STORAGES
def test_copy_requantises_in_place(make: Maker) -> None:
    param = torch.nn.Parameter(make(random_matrix(64, 32)))
    payload, scale = param.payload, param.scale
    new = 10.0 * random_matrix(64, 32, seed=1)
    with torch.no_grad():
        param.copy_(new)
    assert param.payload is payload and param.scale is scale
    assert bits(param) == bits(make(new))
    other = make(random_matrix(64, 32, seed=2))
    with torch.no_grad():
        param.copy_(other)
    assert bits(param) == bits(other)  # bit for bit, not through a second rounding
    plain = torch.empty(64, 32)
    plain.copy_(other)
    assert torch.equal(plain, other.dequantize())


@STORAGES
def test_what_is_assigned_to_data_is_written(make: Maker) -> None:
    param = torch.nn.Parameter(make(random_matrix(64, 32)))
    payload, before, new = param.payload, bits(param), 10.0 * random_matrix(64, 32, seed=1)
    param.data = param.data
    assert bits(param) == before
    param.data = new
    assert param.payload is payload and bits(param) == bits(make(new))
    other = make(random_matrix(64, 32, seed=2))
    param.data = other
    assert bits(param) == bits(other) and isinstance(param, torch.nn.Parameter) and param.requires_grad
    for wrong in (new.t(), new.to("meta")):
        with pytest.raises(ValueError, match="cannot become"):
            param.data = wrong


@STORAGES
def test_state_dict_round_trip(make: Maker) -> None:
    module, other = linear_with(make(random_matrix(64, 32))), linear_with(make(random_matrix(64, 32, seed=1)))
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    storage = other.weight.payload
    other.load_state_dict(torch.load(file, weights_only=False))
    assert bits(other.weight) == bits(module.weight) and other.weight.payload is storage
    # From a high-precision checkpoint it requantises.
    value = random_matrix(64, 32, seed=2)
    other.load_state_dict({"weight": value, "bias": torch.zeros(64)})
    assert bits(other.weight) == bits(make(value))


READ_AS_MATRIX: dict[str, Callable[[Tensor], object]] = {
    "linear": lambda w: torch.nn.functional.linear(torch.ones(2, w.shape[1], dtype=w.dtype), w),
    "matmul": lambda w: w.detach() @ torch.ones(w.shape[1], 2, dtype=w.dtype),
    "embedding": lambda w: torch.nn.functional.embedding(torch.tensor([1]), w.detach()),
    "rows": lambda w: w[:2] @ torch.ones(w.shape[1], 2, dtype=w.dtype),
}

WRITES: dict[str, Callable[[Tensor], object]] = {
    "one": lambda w: w.mul_(2.0),
    "chained": lambda w: w.mul_(0.75).add_(torch.ones(w.shape, dtype=w.dtype), alpha=0.25),
    "rows": lambda w: w[16:32].clamp_(-0.5, 0.5),
    "list": lambda w: torch._foreach_mul_([torch.ones(2), w], 2.0),
    "two lists": lambda w: torch._foreach_lerp_([w], [torch.ones(w.shape, dtype=w.dtype)], 0.25),
    "out": lambda w: torch.add(w, 1.0, out=w),
    "out of others": lambda w: torch.mul(torch.ones(w.shape, dtype=w.dtype), 3.0, out=w),
}

READ: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda w: w + 1.0,
    "reflected": lambda w: torch.ones(w.shape) * w,
    "norm": lambda w: w.norm(),
    "abs, mean": lambda w: w.abs().mean(),
    "std": lambda w: w.std(dim=1),
    "list": lambda w: torch.cat([w, w]),
    "foreach": lambda w: torch._foreach_norm([w, w])[1],
    "ones_like": torch.ones_like,
    "larger": lambda w: w > 0.1,
    "histogram": lambda w: torch.histc(w.reshape(-1), 8),
    "masked": lambda w: w[~torch.isnan(w)],
    "lerp": lambda w: torch.zeros(w.shape, dtype=w.dtype).lerp_(w, 0.25),
    "foreach in place": lambda w: _after(torch._foreach_add_, torch.ones(w.shape), w),
    "item": lambda w: w.max().item(),
}


def _after(function: Callable[..., Any], written: Tensor, w: Tensor) -> Tensor:
    function([written], [w], alpha=0.5)
    return written


@pytest.mark.parametrize("operation", list(READ_AS_MATRIX))
def test_products_are_refused_under_autograd_alone(operation: str) -> None:
    """There every forward would decode the weight."""
    value = random_matrix(64, 32)
    param: Any = torch.nn.Parameter(ScaledTensor.quantize(value))
    before, read = bits(param), READ_AS_MATRIX[operation]
    with pytest.raises(NotImplementedError, match=r"shape .*no_grad.*filter=….*plain_model\(model\)"):
        read(param)
    plain = param.dequantize().bfloat16()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(read(param) + 0, read(plain) + 0)
    assert bits(param) == before


def test_the_error_names_the_layer() -> None:
    param: Any = torch.nn.Parameter(ScaledTensor.quantize(random_matrix(64, 32)))
    param.home = Home("blocks.0.proj")
    with pytest.raises(NotImplementedError, match=r"\(layer blocks\.0\.proj\)"):
        torch.mm(torch.ones(2, 64), param)


@STORAGES
def test_arrays_and_numbers_are_decoded(make: Maker) -> None:
    param = torch.nn.Parameter(make(random_matrix(64, 32)))
    for base, plain in ((param, param.dequantize()), (param.detach().t(), param.dequantize().t())):
        assert base.tolist() == plain.bfloat16().tolist()
        with pytest.raises(TypeError, match="BFloat16"):  # as of a plain tensor
            base.detach().numpy()
    fp32 = torch.nn.Parameter(ScaledTensor.quantize(random_matrix(64, 32), dtype=torch.float32))
    expected = fp32.dequantize().numpy()
    for array in (
        fp32.detach().numpy(),
        numpy.asarray(fp32.detach()),
        fp32.numpy(force=True),
        fp32.detach().T.numpy().T,
    ):
        numpy.testing.assert_array_equal(array, expected)
    numpy.testing.assert_array_equal(numpy.from_dlpack(fp32.detach()), expected)
    with pytest.raises(RuntimeError, match=r"detach\(\)\.numpy"):
        fp32.numpy()
    with pytest.raises(ValueError, match="read-only"):  # nobody would see what is written
        fp32.detach().numpy()[0] = 1.0


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "row": lambda w: w[3],
    "column": lambda w: w[:, 3],
    "element": lambda w: w[3, 4],
    "some rows": lambda w: w[1:4],
    "transposed": lambda w: w.t(),
    "of a view": lambda w: w.T[2:5].unsqueeze(0),
    "unbound": lambda w: w.unbind()[5],
}


@pytest.mark.parametrize("write", ["assigned", "multiplied"])
@pytest.mark.parametrize("view", list(VIEWS))
@pytest.mark.parametrize("make", [ScaledTensor.quantize, fp16_blockwise], ids=["fp8", "fp16"])
def test_what_is_written_into_a_view_goes_to_the_owner(make: Maker, view: str, write: str) -> None:
    value = random_matrix(64, 32).bfloat16()
    param: Any = torch.nn.Parameter(make(value))
    param.owner = owner = _Owner(value.float())
    expected = value.clone()
    for tensor in (param.detach(), expected):
        part = VIEWS[view](tensor)
        part.mul_(0.5) if write == "multiplied" else part.copy_(torch.arange(part.numel()).view(part.shape))
    assert torch.equal(owner.written, expected.float())


def test_elements_that_are_assigned_go_to_the_owner() -> None:
    value = random_matrix(64, 32).bfloat16()
    param: Any = torch.nn.Parameter(ScaledTensor.quantize(value))
    param.owner = owner = _Owner(value.float())
    expected = value.clone()
    for tensor in (param.data, expected):
        tensor[0] = torch.arange(32)
        tensor[torch.tensor([2, 5])] = 0.25
    assert torch.equal(owner.written, expected.float())
    frozen = torch.nn.Parameter(ScaledTensor.quantize(value), requires_grad=False)
    with pytest.raises(NotImplementedError, match=r"without a master.*plain_model"):
        frozen.data[0] = 0.0


@pytest.mark.parametrize("operation", [*WRITES, "erfinv"])
def test_writes_raise_and_teach_where_nothing_holds_more_than_the_payload(operation: str) -> None:
    """Small changes would be rounded away. Functions that are no arithmetic are refused of an owned weight, too."""
    write = WRITES.get(operation, torch.Tensor.erfinv_)
    fix = r"would write into it: .*p\.copy_.*filter=…" if operation == "erfinv" else r"without a master.*\(filter=…\)"
    param: Any = torch.nn.Parameter(ScaledTensor.quantize(random_matrix(64, 32)))
    before = bits(param)
    for owner in (None, _Owner(param.dequantize())) if operation == "erfinv" else (None,):
        param.owner = owner
        for mode in (torch.no_grad, torch.inference_mode):
            with mode(), pytest.raises(NotImplementedError, match=fix):
                write(param.detach())
    assert bits(param) == before


@pytest.mark.parametrize("operation", list(WRITES))
def test_arithmetic_in_place_goes_to_the_owner(operation: str) -> None:
    """With the result of a plain tensor of the dtype that the weight advertises."""
    for dtype in (torch.float32, torch.bfloat16):
        value = random_matrix(64, 32).to(dtype)
        for mode in (torch.no_grad, torch.inference_mode):
            param: Any = torch.nn.Parameter(ScaledTensor.quantize(value, dtype=dtype))
            param.owner = owner = _Owner(value.float())
            expected = value.clone()
            with mode():
                result = WRITES[operation](param.detach())
                WRITES[operation](expected)
            assert torch.equal(owner.written, expected.float())
            leaves = result if isinstance(result, tuple | list) else [result]
            assert result is None or isinstance(leaves[-1], ScaledTensor)


@pytest.mark.parametrize("operation", list(READ))
def test_code_that_only_reads_gets_the_owners_values(operation: str) -> None:
    """As of a plain tensor of the dtype that it advertises."""
    for dtype in (torch.float32, torch.bfloat16):
        value = random_matrix(64, 32).to(dtype)
        param: Any = torch.nn.Parameter(ScaledTensor.quantize(value, dtype=dtype))
        stored = param.dequantize().to(dtype)
        for expected in (stored, value):
            with torch.no_grad():
                result, wanted = READ[operation](param), READ[operation](expected)
            assert type(result) is type(wanted)
            torch.testing.assert_close(result, wanted, rtol=0, atol=0)
            with torch.inference_mode():
                torch.testing.assert_close(READ[operation](param.detach()), wanted, rtol=0, atol=0)
            param.owner = _Owner(value.float())


@pytest.mark.parametrize("operation", [*READ, "row", "transposed", "element"])
def test_autograd_records_reads_as_of_any_parameter(operation: str) -> None:
    """A norm for a log needs no `torch.no_grad`, and a penalty in the loss has its gradient."""
    read = READ.get(operation) or VIEWS[operation]
    param: Any = torch.nn.Parameter(ScaledTensor.quantize(random_matrix(64, 32), dtype=torch.float32))
    plain = torch.nn.Parameter(param.dequantize())
    got, expected = read(param), read(plain)
    if not isinstance(expected, Tensor):
        assert got == expected
        return
    torch.testing.assert_close(got.detach() + 0, expected.detach() + 0, rtol=0, atol=0)
    assert got.requires_grad == expected.requires_grad
    if expected.requires_grad and operation != "histogram":  # which torch does not differentiate
        cotangent = torch.randn(expected.shape)
        got.backward(cotangent)
        expected.backward(cotangent)
        assert type(param.grad) is Tensor and torch.equal(param.grad, plain.grad)


def test_holds_no_high_precision_copy() -> None:
    param = torch.nn.Parameter(ScaledTensor.quantize(random_matrix(64, 32)))
    held = [value for value in vars(param).values() if isinstance(value, Tensor)]
    assert sum(tensor.untyped_storage().nbytes() for tensor in held) == 64 * 32 + 4  # one byte each and one scale
    blockwise = torch.nn.Parameter(fp16_blockwise(random_matrix(64, 32)))
    held = [value for value in vars(blockwise).values() if isinstance(value, Tensor)]
    assert sum(tensor.untyped_storage().nbytes() for tensor in held) == 2 * 64 * 32 + 4 * 64 * 32 // STATE_BLOCK


@pytest.mark.parametrize(("make", "itemsize"), [(ScaledTensor.quantize, 1), (fp16_blockwise, 2)], ids=["fp8", "fp16"])
def test_bytes_are_those_that_are_stored(make: Maker, itemsize: int) -> None:
    """Not those of the dtype that it advertises, nor where it is saved: that is a plain tensor."""
    param = torch.nn.Parameter(make(random_matrix(64, 32)))
    assert param.element_size() == param.itemsize == itemsize
    assert param.nbytes == 64 * 32 * itemsize + 4 * param.scale.numel()  # type: ignore[attr-defined]
    plain = param.detach().clone()
    assert plain.element_size() == 2 and plain.nbytes == 2 * 64 * 32


def test_set_storage_points_at_a_flat_buffer() -> None:
    param = torch.nn.Parameter(ScaledTensor.quantize(random_matrix(64, 32)))
    flat, scales = torch.zeros(4096, dtype=E4M3), torch.ones(2)
    param.set_storage(flat[2048:].view(64, 32), scales[1:])
    value = random_matrix(64, 32, seed=1)
    with torch.no_grad():
        param.copy_(value)
    expected = ScaledTensor.quantize(value)
    assert torch.equal(flat[2048:].view(torch.uint8), expected.payload.view(-1).view(torch.uint8))
    assert scales[0] == 1.0 and torch.equal(scales[1:], expected.scale)
    with pytest.raises(AssertionError):
        param.set_storage(flat[:2048].view(32, 64), scales[:1])


class _Owner:
    """Keeps the last value written, as an optimizer's master does."""

    def __init__(self, value: Tensor) -> None:
        self.written = value

    def write(self, value: Tensor) -> None:
        self.written = value.clone()

    def value(self) -> Tensor:
        return self.written

    value_here = value


def test_a_written_value_goes_to_the_owner() -> None:
    weight = torch.nn.Parameter(ScaledTensor.quantize(random_matrix(32, 16)))
    weight.owner = owner = _Owner(weight.dequantize())  # type: ignore[attr-defined]
    before, value = bits(weight), random_matrix(32, 16, seed=1)  # type: ignore[arg-type]
    with torch.no_grad():
        weight.copy_(value)
    assert torch.equal(owner.written, value)
    weight.data.copy_(2 * value)
    assert torch.equal(owner.written, 2 * value)
    weight.data = 3 * value
    assert torch.equal(owner.written, 3 * value)
    weight.data.copy_(2 * value)
    assert bits(weight) == before, "the owner derives the payload, nobody else"  # type: ignore[arg-type]
    assert torch.equal(weight.master_value(), 2 * value)  # type: ignore[attr-defined]
    copies: list[Any] = [weight.detach().clone(), copy.deepcopy(weight), weight.detach().to(torch.float64)]
    for copied in copies:
        assert not isinstance(copied, ScaledTensor) and torch.equal(
            copied.double(), (2 * value).to(copied.dtype).double()
        )
        copied.detach().copy_(value)
    assert isinstance(copies[1], torch.nn.Parameter) and copies[1].requires_grad
    assert torch.equal(owner.written, 2 * value), "a copy has no owner"


def test_each_has_an_address_of_its_own() -> None:
    """Accelerate tells the parameters of a model for FSDP2 apart by it."""
    first, second = (ScaledTensor.quantize(torch.randn(16, 16)) for _ in range(2))
    assert first.data_ptr() == first.payload.data_ptr() != second.data_ptr()
