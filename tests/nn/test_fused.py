"""The fused MLP and the QKV projection with its norm inside, against float64: values and every gradient.

Noise adds up along the path: fprop has two E4M3 operands a GEMM (28.5 dB each), dgrad and wgrad an E5M2 and an E4M3
one (24.5 dB). Bounds are those powers added over the GEMMs on the way, less 1 dB for the sample.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fp8_megatron.activation_functions import Activation
from fp8_megatron.formats.recipes import RecipeName
from fp8_megatron.kernels import ops
from fp8_megatron.nn.chunked_mlp import fp8_norm_mlp_in_chunks
from fp8_megatron.nn.gemms import LinearParams
from fp8_megatron.nn.mlp import fp8_norm_mlp
from fp8_megatron.nn.normed import NormParams
from fp8_megatron.nn.qkv import fp8_norm_qkv
from fp8_megatron.nn.rope import cos_sin_table, rope_frequencies
from fp8_megatron.quantization.recipe import LinearQuantizers, Recipe
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from fp8_megatron.quantization.stats import snr_db
from tests.harness.main_grad import KeptGrads

SEQ, BATCH, HIDDEN, WIDE = 32, 4, 128, 256
RECIPES = pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])


def normal(*shape: int, seed: int, size: float) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * size


def fp8_weight(rows: int, columns: int, seed: int) -> tuple[ScaledTensor, Tensor]:
    value = normal(rows, columns, seed=seed, size=0.05)
    weight = ScaledTensor.quantize(value)
    weight.requires_grad_()
    weight.main_grad = KeptGrads()  # type: ignore[attr-defined]
    return weight, value.double().requires_grad_()


def leaf(value: Tensor) -> tuple[Tensor, Tensor]:
    """A BF16 leaf and the same in float64."""
    value = value.bfloat16()
    return value.clone().requires_grad_(), value.double().requires_grad_()


def exact_norm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return torch.nn.functional.rms_norm(x, (HIDDEN,), weight, 1e-5)
    return torch.nn.functional.layer_norm(x, (HIDDEN,), weight, bias, 1e-5)


def quantizers(recipe: RecipeName = "tensorwise") -> LinearQuantizers:
    return Recipe(recipe, power_of_two=False).linear_quantizers()


GROUPS, WIDTHS = 2, (96, 16, 16)


def exactly_rotated(y: Tensor, rotation: ops.Rotation) -> Tensor:
    """The projection's output [s, b, N] in float64 with query and key rotated, by the textbook's rotation matrix."""
    cos_sin, width, _ = rotation
    heads = y.view(SEQ, BATCH, GROUPS, -1, width)
    cos, sin = cos_sin[:, None, None, None].double().expand(-1, BATCH, GROUPS, 1, -1, -1).unbind(-2)
    first, second = heads[..., :-1, :].chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turned, heads[..., -1:, :]], dim=3).view(y.shape)


@RECIPES
@pytest.mark.parametrize("has_bias", [True, False], ids=["layernorm_bias", "rmsnorm"])
@pytest.mark.parametrize("rotates", [False, True], ids=["", "rope"])
def test_norm_qkv(has_bias: bool, recipe: RecipeName, rotates: bool) -> None:
    rotation = ops.Rotation(cos_sin_table(rope_frequencies(16, 100), SEQ), 16, False) if rotates else None
    x, x64 = leaf(normal(SEQ, BATCH, HIDDEN, seed=1, size=2.0) + 0.3)
    norm_weight, norm_weight64 = leaf(1 + normal(HIDDEN, seed=2, size=0.2))
    norm_bias, norm_bias64 = leaf(normal(HIDDEN, seed=3, size=0.2)) if has_bias else (None, None)
    bias, bias64 = leaf(normal(WIDE, seed=4, size=0.2)) if has_bias else (None, None)
    weight, weight64 = fp8_weight(WIDE, HIDDEN, seed=5)
    norm, linear = (
        NormParams(norm_weight, norm_bias, 1e-5, not has_bias),
        LinearParams(weight, bias, quantizers(recipe)),
    )
    *parts, residual = fp8_norm_qkv(x, norm, linear, WIDTHS, rotation)
    assert [part.shape for part in parts] == [(SEQ, BATCH, GROUPS, width) for width in WIDTHS]
    y = torch.cat(parts, dim=3).view(SEQ, BATCH, WIDE)
    product = exact_norm(x64, norm_weight64, norm_bias64) @ weight64.t()
    expected = product if bias64 is None else product + bias64
    shift = torch.zeros_like(product) if bias64 is None else bias64.detach().expand_as(product)
    if rotation is not None:
        expected, product, shift = (exactly_rotated(value, rotation) for value in (expected, product, shift))
    g, r = (normal(*shape, seed=6, size=1e-3).bfloat16() for shape in (y.shape, x.shape))
    torch.autograd.backward([y, residual], [g, r])
    torch.autograd.backward([expected, x64], [g.double(), r.double()])
    assert torch.equal(residual, x)
    assert snr_db(y.double() - shift, product.detach()) > 27.5
    assert snr_db(x.grad.double() - r.double(), x64.grad - r.double()) > 23.0  # type: ignore[union-attr]
    assert snr_db(norm_weight.grad, norm_weight64.grad) > 23.0
    assert snr_db(weight.main_grad.grads[0], weight64.grad) > 23.5  # type: ignore[attr-defined]
    if has_bias:
        assert norm_bias is not None and norm_bias64 is not None and bias is not None and bias64 is not None
        assert snr_db(norm_bias.grad, norm_bias64.grad) > 23.0
        assert snr_db(bias.grad, bias64.grad) > 53.0


@RECIPES
def test_norms_of_query_and_key(recipe: RecipeName) -> None:
    """The projection's own casts cost what they do in `test_norm_qkv`. Norms amplify their noise by 0.5 dB at most."""
    x, x64 = leaf(normal(SEQ, BATCH, HIDDEN, seed=1, size=2.0) + 0.3)
    norm_weight, norm_weight64 = leaf(1 + normal(HIDDEN, seed=2, size=0.2))
    weight, weight64 = fp8_weight(WIDE, HIDDEN, seed=5)
    query, query64 = leaf(1 + normal(16, seed=7, size=0.2))
    key, key64 = leaf(1 + normal(16, seed=8, size=0.2))
    rotation = ops.Rotation(cos_sin_table(rope_frequencies(16, 100), SEQ), 16, False)
    norm, linear = NormParams(norm_weight, None, 1e-5, True), LinearParams(weight, None, quantizers(recipe))
    qk_norm = ops.QKNorm(query, key, None, None, 1e-5, True)
    *parts, residual = fp8_norm_qkv(x, norm, linear, WIDTHS, rotation, qk_norm)
    assert [part.shape for part in parts] == [(SEQ, BATCH, GROUPS, width) for width in WIDTHS]
    y = torch.cat(parts, dim=3).view(SEQ, BATCH, WIDE)
    product = exact_norm(x64, norm_weight64, None) @ weight64.t()
    heads = product.view(SEQ, BATCH, GROUPS, -1, 16)
    normed = [
        torch.nn.functional.rms_norm(part, (16,), own, 1e-5)
        for part, own in ((heads[..., :-2, :], query64), (heads[..., -2:-1, :], key64))
    ]
    expected = exactly_rotated(torch.cat([*normed, heads[..., -1:, :]], dim=3).view(y.shape), rotation)
    g, r = (normal(*shape, seed=6, size=1e-3).bfloat16() for shape in (y.shape, x.shape))
    torch.autograd.backward([y, residual], [g, r])
    torch.autograd.backward([expected, x64], [g.double(), r.double()])
    assert snr_db(y.double(), expected.detach()) > 27.0
    assert snr_db(x.grad.double() - r.double(), x64.grad - r.double()) > 22.5  # type: ignore[union-attr]
    assert snr_db(weight.main_grad.grads[0], weight64.grad) > 23.0  # type: ignore[attr-defined]
    for param, exactly in ((query, query64), (key, key64)):
        assert snr_db(param.grad, exactly.grad) > 24.0


@RECIPES
@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("gelu", None),
        ("gelu_erf", None),
        ("squared_relu", None),
        ("swiglu", None),
        ("quick_geglu", None),
        ("gelu", 32),
        ("swiglu", 32),
    ],
)
def test_norm_mlp(kind: str, rows: int | None, recipe: RecipeName) -> None:
    """With `rows`, in chunks of 32, 32 and 16 positions."""
    seq = SEQ if rows is None else 80
    has_bias = kind in ("gelu", "gelu_erf", "squared_relu")
    columns = WIDE * (1 if has_bias else 2)
    x, x64 = leaf(normal(seq, BATCH, HIDDEN, seed=1, size=2.0) + 0.3)
    norm_weight, norm_weight64 = leaf(1 + normal(HIDDEN, seed=2, size=0.2))
    norm_bias, norm_bias64 = leaf(normal(HIDDEN, seed=3, size=0.2)) if has_bias else (None, None)
    bias1, bias1_64 = leaf(normal(columns, seed=4, size=0.2)) if has_bias else (None, None)
    bias2, bias2_64 = leaf(normal(HIDDEN, seed=7, size=0.2)) if has_bias else (None, None)
    weight1, weight1_64 = fp8_weight(columns, HIDDEN, seed=5)
    weight2, weight2_64 = fp8_weight(HIDDEN, WIDE, seed=8)
    mlp = fp8_norm_mlp if rows is None else partial(fp8_norm_mlp_in_chunks, rows=rows)
    y, residual = mlp(
        x,
        NormParams(norm_weight, norm_bias, 1e-5, not has_bias),
        LinearParams(weight1, bias1, quantizers(recipe)),
        LinearParams(weight2, bias2, quantizers(recipe)),
        Activation(kind),
    )
    z = exact_norm(x64, norm_weight64, norm_bias64) @ weight1_64.t()
    z = z if bias1_64 is None else z + bias1_64
    if kind == "gelu":
        activated = torch.nn.functional.gelu(z, approximate="tanh")
    elif kind == "gelu_erf":
        activated = torch.nn.functional.gelu(z)
    elif kind == "squared_relu":
        activated = torch.relu(z).square()
    else:
        gate, up = z.chunk(2, dim=-1)
        gate = gate * torch.sigmoid((1.0 if kind == "swiglu" else 1.702) * gate)
        activated = gate * up
    expected = activated @ weight2_64.t()
    expected = expected if bias2_64 is None else expected + bias2_64
    g, r = (normal(*shape, seed=6, size=1e-3).bfloat16() for shape in (y.shape, x.shape))
    torch.autograd.backward([y, residual], [g, r])
    torch.autograd.backward([expected, x64], [g.double(), r.double()])
    # A gated activation multiplies two of fc1's outputs: their noise adds. Under a square the
    # error of z > 0 is 2z·e: over E z⁴ = 3σ⁴, 4/3 of z's noise.
    assert snr_db(y, expected.detach()) > {"gelu": 24.0, "gelu_erf": 24.0, "squared_relu": 23.8}.get(kind, 22.7)
    assert snr_db(x.grad.double() - r.double(), x64.grad - r.double()) > 19.5  # type: ignore[union-attr]
    assert snr_db(weight2.main_grad.grads[0], weight2_64.grad) > 21.5  # type: ignore[attr-defined]
    assert snr_db(weight1.main_grad.grads[0], weight1_64.grad) > 20.5  # type: ignore[attr-defined]
    assert snr_db(norm_weight.grad, norm_weight64.grad) > 19.5
    if has_bias:
        assert bias1 is not None and bias1_64 is not None and bias2 is not None and bias2_64 is not None
        assert snr_db(bias1.grad, bias1_64.grad) > 21.5
        assert snr_db(bias2.grad, bias2_64.grad) > 53.0


def test_the_residual_branch_is_added_inside() -> None:
    """One rounding instead of two, and the same gradients bit for bit: the branch's is the output's."""

    def mlp(adds_input: bool) -> dict[str, Tensor]:
        x, _ = leaf(normal(SEQ, BATCH, HIDDEN, seed=1, size=2.0) + 0.3)
        norm_weight, _ = leaf(1 + normal(HIDDEN, seed=2, size=0.2))
        bias1, bias2 = (leaf(normal(size, seed=4, size=0.2))[0] for size in (WIDE, HIDDEN))
        (weight1, _), (weight2, _) = fp8_weight(WIDE, HIDDEN, seed=5), fp8_weight(HIDDEN, WIDE, seed=8)
        y, residual = fp8_norm_mlp(
            x,
            NormParams(norm_weight, None, 1e-5, True),
            LinearParams(weight1, bias1, quantizers()),
            LinearParams(weight2, bias2, quantizers()),
            Activation("gelu"),
            adds_input=adds_input,
        )
        assert (residual is None) == adds_input
        total = y if residual is None else y + residual
        total.backward(normal(*y.shape, seed=6, size=1e-3).bfloat16())
        grads = {"x": x.grad, "norm": norm_weight.grad, "bias1": bias1.grad, "bias2": bias2.grad}
        grads |= {f"weight{i}": w.main_grad.grads[0] for i, w in enumerate((weight1, weight2))}  # type: ignore[attr-defined]
        return {"y": total.detach(), **grads}  # type: ignore[dict-item]

    apart, inside = mlp(False), mlp(True)
    y, expected = inside.pop("y"), apart.pop("y")
    assert not torch.equal(y, expected) and ((y - expected).abs() <= 2**-7 * expected.abs() + 2**-8).all()
    assert all(torch.equal(grad, apart[name]) for name, grad in inside.items())


def test_vectors_give_their_gradients_to_main_grad_in_fp32() -> None:
    """Norms and biases of both functions: what autograd would have rounded to BF16, nothing left in ``.grad``."""

    def vectors(with_main_grad: bool) -> dict[str, Tensor]:
        x, _ = leaf(normal(SEQ, BATCH, HIDDEN, seed=1, size=2.0))
        names = {
            "norm1": HIDDEN,
            "norm2": HIDDEN,
            "shift1": HIDDEN,
            "shift2": HIDDEN,
            "qkv": WIDE,
            "fc1": WIDE,
            "fc2": HIDDEN,
        }
        params = {name: leaf(normal(size, seed=3, size=0.2) + 1)[0] for name, size in names.items()}
        for param in params.values():
            if with_main_grad:
                param.main_grad = KeptGrads()  # type: ignore[attr-defined]
        (qkv, _), (fc1, _), (fc2, _) = (
            fp8_weight(*shape, seed=5) for shape in ((WIDE, HIDDEN), (WIDE, HIDDEN), (HIDDEN, WIDE))
        )
        norm1, norm2 = (NormParams(params[f"norm{i}"], params[f"shift{i}"], 1e-5, False) for i in (1, 2))
        *parts, residual = fp8_norm_qkv(x, norm1, LinearParams(qkv, params["qkv"], quantizers()), WIDTHS)
        y, again = fp8_norm_mlp(
            residual + parts[0].reshape(SEQ, BATCH, -1)[..., :HIDDEN],
            norm2,
            LinearParams(fc1, params["fc1"], quantizers()),
            LinearParams(fc2, params["fc2"], quantizers()),
            Activation("gelu"),
        )
        outputs = [y, again, *parts[1:]]
        torch.autograd.backward(outputs, [normal(*o.shape, seed=6, size=1e-3).bfloat16() for o in outputs])
        if not with_main_grad:
            return {name: param.grad for name, param in params.items()}  # type: ignore[misc]
        assert all(param.grad is None for param in params.values())
        return {name: param.main_grad.grads[0] for name, param in params.items()}  # type: ignore[attr-defined]

    rounded, whole = vectors(False), vectors(True)
    for name, grad in whole.items():
        assert grad.dtype == torch.float32 and not torch.equal(grad, grad.bfloat16().float()), name
        assert torch.equal(grad.bfloat16(), rounded[name]), name


def test_backward_keeps_the_input_and_z_only() -> None:
    """In 16 bits: x and z; the rest is statistics and scales."""
    x, _ = leaf(normal(SEQ, BATCH, HIDDEN, seed=1, size=2.0))
    norm_weight, _ = leaf(torch.ones(HIDDEN))
    (weight1, _), (weight2, _) = fp8_weight(WIDE, HIDDEN, seed=5), fp8_weight(HIDDEN, WIDE, seed=8)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fp8_norm_mlp(
            x,
            NormParams(norm_weight, None, 1e-5, True),
            LinearParams(weight1, None, quantizers()),
            LinearParams(weight2, None, quantizers()),
            Activation("gelu"),
        )
    tokens = SEQ * BATCH
    assert sum(tensor.nbytes for tensor in kept) == 2 * tokens * (HIDDEN + WIDE) + 4 * tokens + 8


class TorchsKernels(TorchDispatchMode):
    """Calls of torch's own operators that write something larger than a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        is_large = isinstance(result, Tensor) and result.numel() >= SEQ * BATCH * HIDDEN
        if func.namespace == "aten" and is_large and not is_view and "empty" not in func._schema.name:
            self.names[func._schema.name] += 1
        return result


@RECIPES
def test_nothing_is_written_between_a_computation_and_its_cast(recipe: RecipeName) -> None:
    """Norms, activation and rotation, forward and backward, are no kernels of torch beside those of the casts."""
    x = leaf(normal(SEQ, BATCH, HIDDEN, seed=1, size=2.0))[0]
    norm = NormParams(leaf(normal(HIDDEN, seed=2, size=1.0))[0], None, 1e-5, True)
    qkv, fc1, fc2 = (
        LinearParams(fp8_weight(rows, columns, seed=rows)[0], None, quantizers(recipe))
        for rows, columns in ((GROUPS * sum(WIDTHS), HIDDEN), (2 * WIDE, HIDDEN), (HIDDEN, WIDE))
    )
    rotation = ops.Rotation(cos_sin_table(rope_frequencies(16, 10000), SEQ), 16, False)
    shapes = (*((SEQ, BATCH, GROUPS, width) for width in WIDTHS), (SEQ, BATCH, HIDDEN))
    cotangents = [normal(*shape, seed=9, size=1.0).bfloat16() for shape in shapes]
    with TorchsKernels() as found:
        *parts, residual = fp8_norm_qkv(x, norm, qkv, WIDTHS, rotation)
        y, _ = fp8_norm_mlp(residual, norm, fc1, fc2, Activation("swiglu"), adds_input=True)
        torch.autograd.backward([*parts, y], cotangents)
    assert set(found.names) == {"aten::clone"}, "more than the copies of `KeptGrads`"
