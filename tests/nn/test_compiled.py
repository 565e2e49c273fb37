"""FP8Linear under torch.compile: one graph, the bits of eager mode, and gradients that go where they go without it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import aot_eager

from fp8_megatron import initialize
from fp8_megatron.any_model import replace_linears
from fp8_megatron.formats.recipes import RecipeName
from fp8_megatron.nn.module import FP8Linear
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from fp8_megatron.quantization.stats import snr_db
from tests.harness.main_grad import KeptGrads

RECIPES: tuple[RecipeName, ...] = ("tensorwise", "delayed", "blockwise", "mxfp8")


class Counting:
    """A compiler backend that counts graphs; it runs what was traced of forward and backward."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.num_graphs += 1
        return aot_eager(graph, inputs)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def build_model(recipe: RecipeName = "tensorwise") -> torch.nn.Sequential:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(128, 256), torch.nn.GELU(), torch.nn.Linear(256, 128, bias=False), torch.nn.LayerNorm(128)
    )
    replace_linears(model, recipe=recipe)
    return model


def run(model: torch.nn.Module, call: Any, rows: tuple[int, ...], dtype: torch.dtype, *, x_needs_grad: bool) -> Any:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*rows, 128, generator=generator).to(dtype).requires_grad_(x_needs_grad)
    cotangent = torch.randn(*rows, 128, generator=generator)
    for parameter in model.parameters():
        parameter.grad = None
    y = call(x)
    y.backward(cotangent.to(y.dtype))
    return [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize(
    ("recipe", "rows", "x_needs_grad"),
    [
        ("tensorwise", (3, 5), True),
        ("tensorwise", (2, 64), False),
        ("delayed", (2, 64), True),
        ("blockwise", (3, 5), False),
        ("blockwise", (2, 64), True),
        ("mxfp8", (2, 64), True),
    ],
    ids=str,
)
def test_bits_of_eager_mode_in_one_graph(recipe: RecipeName, rows: tuple[int, ...], x_needs_grad: bool) -> None:
    model = build_model(recipe)
    history = model[0].quantizers.input.history
    if history is not None:  # warm: forward and backward read delayed scales
        run(model, model, rows, torch.float32, x_needs_grad=True)
        history.update(None)
    expected = run(model, model, rows, torch.float32, x_needs_grad=x_needs_grad)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for ours, theirs in zip(
        run(model, compiled, rows, torch.float32, x_needs_grad=x_needs_grad), expected, strict=True
    ):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)


def test_no_graph_breaks() -> None:
    explained = torch._dynamo.explain(build_model())(torch.randn(7, 128))
    assert explained.graph_break_count == 0, explained.break_reasons


def test_under_autocast() -> None:
    model = build_model()

    def call(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    expected = run(model, call, (32,), torch.float32, x_needs_grad=True)
    for ours, theirs in zip(run(model, compiled, (32,), torch.float32, x_needs_grad=True), expected, strict=True):
        # Without a compiler, autocast rounds LayerNorm's inputs at other places.
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-7)


def test_gradients_reach_main_grad_and_add_up() -> None:
    model = build_model()
    expected = run(model, model, (32,), torch.float32, x_needs_grad=False)
    grads = {layer: KeptGrads() for layer in model if isinstance(layer, FP8Linear)}
    for layer, keeps in grads.items():
        layer.weight.main_grad = keeps
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        run(model, compiled, (32,), torch.float32, x_needs_grad=False)
    first, second = grads
    assert [len(keeps.grads) for keeps in grads.values()] == [2, 2]
    assert torch.equal(grads[first].grads[1], expected[2]) and torch.equal(grads[second].grads[0], expected[4])
    assert first.weight.grad is None


@pytest.mark.parametrize("has_main_grad", [False, True])
def test_a_backward_that_asks_for_some_gradients_leaves_the_others(has_main_grad: bool) -> None:
    model = build_model()
    if has_main_grad:
        for layer in (model[0], model[2]):
            layer.weight.main_grad = KeptGrads()  # type: ignore[union-attr]
    compiled = torch.compile(model, backend=aot_eager, fullgraph=True)
    x = torch.randn(32, 128, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = compiled(x).square().sum()
    (asked,) = torch.autograd.grad(y, x, retain_graph=True)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not has_main_grad or model[0].weight.main_grad.grads == []  # type: ignore[union-attr]
    y.backward()
    assert torch.equal(x.grad, asked)  # type: ignore[arg-type]
    for layer in (model[0], model[2]):
        has_grad = len(layer.weight.main_grad.grads) == 1 if has_main_grad else layer.weight.grad is not None  # type: ignore[union-attr]
        assert has_grad


def test_micro_batches_add_up_in_grad() -> None:
    model = build_model()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    once = run(model, compiled, (32,), torch.float32, x_needs_grad=False)[2].clone()
    x = torch.randn(32, 128, generator=torch.Generator().manual_seed(1))
    compiled(x).backward(torch.randn(32, 128, generator=torch.Generator().manual_seed(2)))
    assert not torch.equal(model[0].weight.grad, once)


class Twice(torch.nn.Module):
    """A sum of two equal calls: their gradients are equal, too."""

    def __init__(self, model: torch.nn.Sequential) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.model[0](x) + self.model[0](x)
        return y


def test_equal_calls_give_a_gradient_each() -> None:
    """A compiler runs calls with equal inputs once, which would leave one of the gradients out."""
    model = build_model()
    x = torch.randn(32, 128, generator=torch.Generator().manual_seed(1))
    cotangent = torch.randn(32, 256, generator=torch.Generator().manual_seed(2))
    gradients = []
    for call in (Twice(model), torch.compile(Twice(model), backend="aot_eager", fullgraph=True)):
        call(x).backward(cotangent)
        gradients.append([parameter.grad for parameter in model[0].parameters()])
        model.zero_grad()
    for ours, theirs in zip(*gradients, strict=True):
        assert ours is not None and theirs is not None and torch.equal(ours, theirs)


@pytest.mark.parametrize("frozen", ["weights", "all"])
def test_frozen_weights(frozen: str) -> None:
    model = build_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen == "weights" and not name.endswith("weight"))
    expected = run(model, model, (32,), torch.float32, x_needs_grad=True)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for ours, theirs in zip(run(model, compiled, (32,), torch.float32, x_needs_grad=True), expected, strict=True):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)


class Projections(torch.nn.Module):
    """Three layers with the same input, as query, key and value are."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (torch.nn.Linear(128, 128) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.silu(x)
        y: Tensor = self.query(x) * self.key(x) + self.value(x)
        return y


@pytest.mark.parametrize(("recipe", "num_casts"), [("tensorwise", 1), ("blockwise", 1), ("delayed", 3)])
def test_layers_with_the_same_input_share_its_cast(recipe: RecipeName, num_casts: int) -> None:
    """Under delayed scaling each has scales of its own."""
    torch.manual_seed(0)
    model = Projections()
    replace_linears(model, recipe=recipe)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    expected = run(model, model, (32,), torch.float32, x_needs_grad=True)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for ours, theirs in zip(run(model, compiled, (32,), torch.float32, x_needs_grad=True), expected, strict=True):
        torch.testing.assert_close(ours, theirs)  # derivatives of SiLU are computed in another order
    nodes = [node for graph in graphs for node in graph.graph.nodes]
    targets = [str(node.target) for node in nodes]
    assert targets.count("fp8_megatron.cast_input.default") == num_casts
    assert targets.count("fp8_megatron.linear_backward.default") == 3
    kept = [node.meta["val"] for node in graphs[0].graph.output_node().args[0]]
    assert sum(value.dtype is torch.float8_e4m3fn for value in kept) == num_casts


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def test_equal_blocks_share_their_graphs() -> None:
    """Compiled one by one, as large models are: more blocks than dynamo would compile anew."""
    blocks = torch.nn.Sequential(*(Block() for _ in range(12)))
    replace_linears(blocks)
    x = torch.randn(16, 32)
    expected = blocks(x)
    backend = Counting()
    for block in blocks:
        block.compile(backend=backend, fullgraph=True)
    assert torch.equal(blocks(x), expected)
    assert backend.num_graphs == 2  # the first block's input needs no gradient, the others' does
    with torch.no_grad():
        assert torch.equal(blocks(x), expected)


def test_any_number_of_rows_in_one_graph() -> None:
    model = build_model()
    backend = Counting()
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    compiled(torch.randn(16, 128))
    num_graphs = backend.num_graphs
    for rows in (32, 48, 160):
        x = torch.randn(rows, 128)
        assert torch.equal(compiled(x), model(x))
    assert backend.num_graphs == num_graphs


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_inductor(recipe: RecipeName) -> None:
    model = build_model(recipe)
    expected = run(model, model, (2, 64), torch.float32, x_needs_grad=True)
    compiled = torch.compile(model, fullgraph=True)
    for ours, theirs in zip(run(model, compiled, (2, 64), torch.float32, x_needs_grad=True), expected, strict=True):
        # GELU and LayerNorm are fused and sum in another order. Then some FP8 roundings go the other way: 28 dB if all
        # were drawn anew.
        assert snr_db(ours, theirs) > 45.0


def test_a_copy_is_compiled_as_itself() -> None:
    model = build_model()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(16, 128)
    compiled(x)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight.zero_()
        assert torch.equal(torch.compile(other, backend="aot_eager", fullgraph=True)(x), other(x))
        assert not torch.equal(other(x), compiled(x))


def exchanged(model: torch.nn.Module, *, plain: bool, seed: int) -> dict[str, Tensor]:
    """Other values for all parameters of `model`: as it stores them, or plain."""
    generator = torch.Generator().manual_seed(seed)
    values = {name: torch.randn(p.shape, generator=generator) / 8 for name, p in model.named_parameters()}
    own = dict(model.named_parameters())
    return {
        name: ScaledTensor.quantize(value, dtype=value.dtype)
        if isinstance(own[name], ScaledTensor) and not plain
        else value
        for name, value in values.items()
    }


@pytest.mark.parametrize("plain", [False, True], ids=["fp8", "plain"])
def test_functional_call_inside_and_around_a_graph(plain: bool) -> None:
    """A graph takes exchanged weights, and the layers' own again. Nothing but the weights is in FP8 then."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 32))
    replace_linears(model)
    functional_call = torch.func.functional_call
    around = torch.compile(model, backend="aot_eager", fullgraph=True)
    inside = torch.compile(lambda params, x: functional_call(model, params, (x,)), backend="aot_eager", fullgraph=True)
    x, own = torch.randn(32, 64), {name: param.detach() for name, param in model.named_parameters()}
    for params in (own, exchanged(model, plain=plain, seed=1), exchanged(model, plain=plain, seed=2), own):
        values = [p.dequantize() if isinstance(p, ScaledTensor) else p for p in params.values()]
        exact = (x @ values[0].t() + values[1]) @ values[2].t() + values[3]
        named = {f"_orig_mod.{name}": param for name, param in params.items()}
        for y in (functional_call(model, params, (x,)), inside(params, x), functional_call(around, named, (x,))):
            assert snr_db(y, exact) > 24.0  # the casts of two inputs, 31.5 dB each, and the GEMMs' BF16
    assert torch.equal(around(x), model(x))


def test_exchanged_weights_and_their_gradients() -> None:
    """Plain weights have one. FP8 weights have one without a graph; in a graph they are refused."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 32))
    replace_linears(model)
    x, cotangent = torch.randn(32, 64), torch.randn(32, 32)
    call = torch.compile(
        lambda params, x: torch.func.functional_call(model, params, (x,)), backend="aot_eager", fullgraph=True
    )
    plain = {name: value.requires_grad_() for name, value in exchanged(model, plain=True, seed=1).items()}
    call(plain, x).backward(cotangent)
    torch.testing.assert_close(plain["0.weight"].grad, cotangent.t() @ x)
    given = {name: torch.nn.Parameter(value) for name, value in exchanged(model, plain=False, seed=1).items()}
    with pytest.raises(Exception, match="gives no gradient to an FP8 weight that functional_call put here"):
        call(given, x)
    torch.func.functional_call(model, given, (x,)).backward(cotangent)
    assert given["0.weight"].grad is not None and model[0].weight.grad is None


@pytest.mark.parametrize("name", ["cast_input", "linear", "linear_backward"])
def test_operators_stay_out_of_cuda_graphs_and_have_no_autograd(name: str) -> None:
    operator = getattr(torch.ops.fp8_megatron, name).default
    assert torch.Tag.cudagraph_unsafe in operator.tags
    # An autograd function in Python would cost the host 15 µs a call.
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "Autograd")


def test_a_backward_reads_its_graphs_inputs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read takes as long as there are inputs, and there are as many as weights: a read a layer is quadratic."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64) for _ in range(4)]
    model: Any = torch.nn.Sequential(*layers)
    model, _ = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    call = torch.compile(model, backend=aot_eager)
    call(torch.randn(16, 64)).sum().backward()

    class Node:
        """A node that counts the reads of its inputs."""

        reads = 0

        def __init__(self, node: Any) -> None:
            self.__dict__["node"] = node

        def __getattr__(self, name: str) -> Any:
            Node.reads += name == "next_functions"
            return getattr(self.node, name)

        def __setattr__(self, name: str, value: Any) -> None:
            setattr(self.node, name, value)

    current = torch._C._current_autograd_node
    monkeypatch.setattr(torch._C, "_current_autograd_node", lambda: Node(current()))
    call(torch.randn(16, 64)).sum().backward()
    assert Node.reads == 1
