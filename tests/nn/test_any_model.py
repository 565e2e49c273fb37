"""FP8Linear in what other people's models do: shapes, dtypes, autocast, frozen weights, checkpointing, copies."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fp8_megatron.errors import UserError
from fp8_megatron.formats.recipes import RecipeName
from fp8_megatron.nn.module import FP8Linear
from fp8_megatron.quantization.amax_history import AmaxHistory
from fp8_megatron.quantization.recipe import Recipe
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from fp8_megatron.quantization.stats import snr_db

#: Noise of an E4M3 operand times another, and of E5M2 times E4M3 (test_linear.py), less 1 dB for the sample.
E4M3_E4M3_DB, E5M2_E4M3_DB = 27.5, 23.5
RECIPES: tuple[RecipeName, ...] = ("tensorwise", "delayed", "blockwise", "mxfp8")
IN, OUT = 256, 128


def build_layer(recipe_name: RecipeName = "tensorwise", dtype: torch.dtype = torch.float32) -> FP8Linear:
    torch.manual_seed(0)
    history = AmaxHistory(4, "max", power_of_two=False) if recipe_name == "delayed" else None
    layer = FP8Linear(IN, OUT, recipe=Recipe(recipe_name, False, history), dtype=dtype)
    if history is not None:
        history.allocate(torch.device("cpu"))
    return layer


def run(call: Callable[[Tensor], Tensor], layer: FP8Linear, x: Tensor, cotangent: Tensor) -> list[Tensor]:
    """Output and gradients of input, weight and bias."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = call(x)
    y.backward(cotangent)
    assert x.grad is not None and layer.weight.grad is not None and layer.bias.grad is not None
    return [y.detach(), x.grad, layer.weight.grad, layer.bias.grad]


@pytest.mark.parametrize("recipe_name", RECIPES)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 2, 64), (0,), (4, 0)], ids=str)
def test_any_leading_shape_is_rows_with_zeros_below(shape: tuple[int, ...], recipe_name: RecipeName) -> None:
    layer = build_layer(recipe_name)
    x, cotangent = torch.randn(*shape, IN), torch.randn(*shape, OUT)
    y, grad_x, grad_weight, grad_bias = run(layer, layer, x, cotangent)
    assert y.shape == (*shape, OUT) and grad_x.shape == x.shape
    rows = x.numel() // IN
    padded = torch.zeros(256, IN)
    padded[:rows] = x.view(rows, IN)
    cotangents = torch.zeros(256, OUT)
    cotangents[:rows] = cotangent.view(rows, OUT)
    expected = run(layer, layer, padded, cotangents)
    assert torch.equal(y.view(rows, OUT), expected[0][:rows])
    assert torch.equal(grad_x.view(rows, IN), expected[1][:rows])
    assert torch.equal(grad_weight, expected[2]) and torch.equal(grad_bias, expected[3])


@pytest.mark.parametrize("recipe_name", RECIPES)
def test_matrices_of_any_strides(recipe_name: RecipeName) -> None:
    """The input is a transposed matrix, and so is its output's gradient."""
    layer = build_layer(recipe_name)
    x, cotangent = torch.randn(IN, 48).t(), torch.randn(OUT, 48).t()
    expected = run(layer, layer, x.contiguous(), cotangent.contiguous())
    got = run(lambda leaf: layer(leaf.t().contiguous().t()), layer, x, cotangent)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_output_and_gradients_have_the_inputs_dtype(dtype: torch.dtype, bias_dtype: torch.dtype) -> None:
    layer = build_layer(dtype=bias_dtype)
    weight, bias = layer.weight.dequantize().double(), layer.bias.detach().double()
    x, cotangent = torch.randn(48, IN).to(dtype), torch.randn(48, OUT).to(dtype)
    y, grad_x, grad_weight, grad_bias = run(layer, layer, x, cotangent)
    assert y.dtype is grad_x.dtype is dtype and grad_bias.dtype is bias_dtype
    wide_x, g = x.double(), cotangent.double()
    assert snr_db(y.double() - bias, wide_x @ weight.t()) > E4M3_E4M3_DB
    assert snr_db(grad_x, g @ weight) > E5M2_E4M3_DB and snr_db(grad_weight, g.t() @ wide_x) > E5M2_E4M3_DB
    # One rounding to BF16 keeps 55.5 dB (test_linear.py); those of the output's gradient and of the sum keep 52.5.
    assert snr_db(grad_bias, g.sum(dim=0)) > 52.5 - 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_chooses_the_outputs_dtype(dtype: torch.dtype) -> None:
    layer = build_layer()
    x, cotangent = torch.randn(32, IN).to(dtype), torch.randn(32, OUT).to(dtype)

    def under_autocast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            y = layer(x.float())
        assert y.dtype is dtype
        return y

    for ours, expected in zip(run(under_autocast, layer, x, cotangent), run(layer, layer, x, cotangent), strict=True):
        assert torch.equal(ours, expected)


def test_backward_inside_autocast_is_the_same() -> None:
    layer = build_layer()
    x, cotangent = torch.randn(32, IN).bfloat16(), torch.randn(32, OUT).bfloat16()
    expected = run(layer, layer, x, cotangent)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, run(layer, layer, x, cotangent), expected))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation(mode: Callable[[], torch.no_grad]) -> None:
    layer = build_layer()
    x = torch.randn(3, 5, IN)
    expected = layer(x)
    with mode():
        y = layer(x)
        assert torch.equal(y, expected) and not y.requires_grad


@pytest.mark.parametrize("recipe_name", RECIPES)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_keeps_the_bits(use_reentrant: bool, recipe_name: RecipeName) -> None:
    layer = build_layer(recipe_name)
    x, cotangent = torch.randn(128, IN), torch.randn(128, OUT)
    for _ in range(2):  # the second step has delayed scales
        expected = run(layer, layer, x, cotangent)
        recomputed = run(lambda x: checkpoint(layer, x, use_reentrant=use_reentrant), layer, x, cotangent)
        assert all(map(torch.equal, recomputed, expected))
        if layer.quantizers.input.history is not None:
            layer.quantizers.input.history.update(None)


def test_functional_call_takes_the_given_weight() -> None:
    layer, other = build_layer(), build_layer()
    with torch.no_grad():
        other.weight.copy_(2.0 * layer.weight.dequantize())
    x = torch.randn(32, IN)
    y = torch.func.functional_call(layer, {"weight": other.weight, "bias": other.bias}, x)
    assert torch.equal(y, other(x)) and not torch.equal(y, layer(x))


@pytest.mark.parametrize("recipe_name", RECIPES)
@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))],
    ids=["deepcopy", "pickle"],
)
def test_a_copy_is_a_layer_of_its_own(duplicate: Callable[[FP8Linear], FP8Linear], recipe_name: RecipeName) -> None:
    layer = build_layer(recipe_name)
    layer.weight.has_no_decay = True  # type: ignore[attr-defined]
    layer.weight.main_grad = object.__new__(Unpicklable)  # type: ignore[attr-defined]
    x = torch.randn(128, IN)
    expected = layer(x)
    copied = duplicate(layer)
    assert isinstance(copied.weight, torch.nn.Parameter) and isinstance(copied.weight, ScaledTensor)
    assert copied.weight.requires_grad and copied.weight.has_no_decay and not hasattr(copied.weight, "main_grad")
    assert torch.equal(copied(x), expected) and copied.token.item() != layer.token.item()
    with torch.no_grad():
        layer.weight.zero_()
    assert torch.equal(copied(x), expected)


class Unpicklable:
    """A gradient buffer, which no copy may take along."""

    def note_forward(self) -> None:
        pass

    def __reduce__(self) -> str:
        raise AssertionError("copied")


def test_state_dict_is_plain_and_loads_both_ways() -> None:
    layer, plain = build_layer(), torch.nn.Linear(IN, OUT)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert {type(value) for value in state.values()} == {Tensor}
    plain.load_state_dict(state)
    assert torch.equal(plain.weight, layer.weight.dequantize())
    for assign in (False, True):
        other = FP8Linear(IN, OUT, dtype=torch.float32)
        other.load_state_dict(plain.state_dict(), assign=assign)
        assert isinstance(other.weight, ScaledTensor) and torch.equal(other.weight.dequantize(), plain.weight)


def test_it_follows_its_model_to_another_device() -> None:
    layer = build_layer()
    weight = layer.weight
    layer.to("meta")
    assert layer.weight is weight and weight.device.type == weight.payload.device.type == "meta"
    layer = build_layer("delayed")
    with pytest.raises(RuntimeError, match="move the model to meta before its layers become FP8"):
        layer.to("meta")


@pytest.mark.parametrize("assigns", [True, False])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_layer_on_the_meta_device_takes_values(recipe: RecipeName, assigns: bool) -> None:
    """As in a model that is built without memory and loads a checkpoint, with ``assign`` or behind ``to_empty``."""
    state = build_layer().state_dict()
    history = AmaxHistory(4, "max", power_of_two=False) if recipe == "delayed" else None
    layer = FP8Linear(IN, OUT, recipe=Recipe(recipe, False, history), device="meta", dtype=torch.float32)
    weight = layer.weight
    if not assigns:
        layer.to_empty(device="cpu")
    layer.load_state_dict(state, assign=assigns)
    assert layer.weight is weight and isinstance(layer.weight, ScaledTensor)
    for name, value in layer.state_dict().items():
        assert value.device.type == "cpu" and torch.equal(value, state[name]), name
    if history is not None:
        history.allocate(torch.device("cpu"))
    assert layer(torch.ones(16, IN)).isfinite().all()


@pytest.mark.parametrize(
    "initialise",
    [
        lambda weight: torch.nn.init.normal_(weight, std=0.5),
        lambda weight: torch.nn.init.uniform_(weight, -0.5, 0.5),
        torch.nn.init.kaiming_uniform_,
        torch.nn.init.xavier_normal_,
    ],
)
def test_initial_values_drawn_afterwards(initialise: Callable[[Tensor], Tensor]) -> None:
    layer, plain = build_layer(), torch.nn.Linear(IN, OUT)
    for weight in (layer.weight, plain.weight):
        torch.manual_seed(1)
        initialise(weight)
    # One rounding to E4M3: 31.5 dB (test_linear.py) less 1 dB.
    assert snr_db(layer.weight.dequantize(), plain.weight.detach()) > 30.5


def test_reset_parameters() -> None:
    layer = build_layer()
    before = copy.deepcopy(layer.state_dict())
    layer.reset_parameters()
    after = layer.state_dict()
    assert not torch.equal(after["weight"], before["weight"]) and not torch.equal(after["bias"], before["bias"])
    assert after["weight"].abs().max() <= IN**-0.5 * 1.001  # kaiming_uniform_ with a = √5


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.zeros(16, IN, dtype=torch.int64), TypeError, r"FP8Linear: .* not torch\.int64; cast the input"),
        (torch.zeros(16, IN, dtype=torch.float64), TypeError, r"takes FP32, BF16 or FP16, not torch\.float64"),
        (
            torch.zeros(16, IN).to_sparse(),
            TypeError,
            r"takes a dense tensor, not torch\.sparse_coo; give it x\.to_dense",
        ),
        (torch.zeros(16, OUT), ValueError, rf"FP8Linear: the input's last size is not {IN}: \(16, {OUT}\)"),
        (torch.zeros(()), ValueError, r"last size is not 256: \(\)"),
    ],
)
def test_errors_name_the_layer_and_the_fix(x: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build_layer()(x)


@pytest.mark.parametrize(
    "transform",
    [
        lambda layer, x: torch.func.vmap(layer)(x),
        lambda layer, x: torch.func.jacrev(layer)(x),
        lambda layer, x: torch.func.grad(lambda value: layer(value).sum())(x),
        lambda layer, x: torch.func.jvp(layer, (x,), (x,)),
    ],
    ids=["vmap", "jacrev", "grad", "jvp"],
)
def test_transforms_of_torch_func_are_an_error(transform: Callable[[FP8Linear, Tensor], object]) -> None:
    with pytest.raises(UserError, match=r"FP8Linear: an FP8 layer takes no transform of torch\.func"):
        transform(build_layer(), torch.randn(16, IN))


def test_a_weight_read_as_a_matrix_says_what_to_do() -> None:
    layer = build_layer()
    with pytest.raises(NotImplementedError, match=r"keep the layer a torch\.nn\.Linear"):
        torch.nn.functional.embedding(torch.tensor([1]), layer.weight)
