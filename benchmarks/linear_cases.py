"""Forward and backward of one linear layer: this project's FP8 with all quantisation, BF16, and Transformer Engine.

Each call is y = x·Wᵀ + b and the gradients of x, W and b from one output gradient. The time includes:

- FP8: casts of x and of the output gradient in both layouts, W from its FP8 storage and transposed on demand, the
  weight gradient quantised into FP8 storage (or, with a delayed scale too, written so by its GEMM), the bias's
  gradient; under delayed scaling the amax history's update. A training step makes that update once for all layers; here
  one layer pays for it.
- BF16: `torch.nn.functional.linear`.
- Transformer Engine: `te.Linear` in `fp8_autocast` with its delayed recipe, including its amax update. W is in BF16:
  cast at each forward, as in a step of one micro-batch, or cast once and kept (`is_first_microbatch=False`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from kernel_timing import reason, seconds_per_call

from fp8_megatron.dtypes import E4M3, E5M2, StorageDtype
from fp8_megatron.formats.recipes import RecipeName
from fp8_megatron.kernels import ops
from fp8_megatron.nn.gemms import LinearParams
from fp8_megatron.nn.linear import fp8_linear
from fp8_megatron.quantization.amax_history import AmaxHistory
from fp8_megatron.quantization.recipe import Recipe
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from fp8_megatron.sharding.partition import partition
from fp8_megatron.sharding.whole_grads import WholeGradBuffer

HISTORY_LENGTH = 16
BF16, TE, TE_CACHED = "BF16", "Transformer Engine, delayed", "Transformer Engine, delayed, W cast once"
FP8_DELAYED, FP8_CURRENT = "FP8, delayed", "FP8, current"
FP8_FAST = "FP8, delayed, weight gradient too"
FP8_BLOCKS, TE_BLOCKS = "FP8, blockwise", "Transformer Engine, blockwise"
FP8_BF16_WGRAD = "FP8, delayed, W's gradient computed in BF16"
FP8_ROWS = "FP8, current, a scale for each row of y's gradient"
ALL_SHAPES = "all"
#: Targets of FP8 (delayed): speed relative to BF16, and to Transformer Engine.
TARGETS = {BF16: 1.65, TE: 1.0}

Step = Callable[[int], object]


@dataclass
class LinearRow:
    """One layer and shape; ratios are speeds over the peer's of the same shape (above 1: faster)."""

    shape: str
    name: str
    milliseconds: float | None = None
    tflop_per_s: float | None = None
    over_bf16: float | None = None
    over_te: float | None = None
    timing: str | None = None
    """graph, or events if the calls cannot be captured (the time may then include host time)."""
    error: str | None = None


@dataclass(frozen=True)
class Shape:
    """tokens × (K → N)."""

    tokens: int
    out_features: int
    in_features: int

    @property
    def num_flops(self) -> int:
        """Of the three GEMMs."""
        return 6 * self.tokens * self.out_features * self.in_features

    def __str__(self) -> str:
        return f"M={self.tokens} N={self.out_features} K={self.in_features}"


def fp8_step(
    shape: Shape,
    device: torch.device,
    recipe_name: RecipeName,
    *,
    delays_weight_grads: bool = False,
    scales_grad_rows: bool = False,
) -> Step:
    """This project's layer. With `scales_grad_rows` it is a language model's head (`nn.row_scaled`)."""
    history = AmaxHistory(HISTORY_LENGTH, "max", power_of_two=False) if recipe_name == "delayed" else None
    recipe = Recipe(recipe_name, False, history, delays_weight_grads)
    quantizers = recipe.linear_quantizers()
    if history is not None:
        history.allocate(device)
    value = 0.02 * torch.randn(shape.out_features, shape.in_features, device=device)
    weight = torch.nn.Parameter(ScaledTensor.quantize(value))
    (space,) = partition([("weight", weight)])
    storage = WholeGradBuffer(space, StorageDtype.FP8)
    storage.become_main_grad()
    assert isinstance(weight, ScaledTensor)
    x, bias, grad = _operands(shape, device)

    def step(_: int) -> None:
        storage.reset()
        y = fp8_linear(x, LinearParams(weight, bias, quantizers, scales_grad_rows=scales_grad_rows))
        torch.autograd.grad(y, [x, bias], grad)
        if history is not None:
            history.update(None)

    return step


def bf16_step(shape: Shape, device: torch.device) -> Step:
    """PyTorch's layer."""
    weight = 0.02 * torch.randn(shape.out_features, shape.in_features, device=device)
    weight = weight.bfloat16().requires_grad_()
    x, bias, grad = _operands(shape, device)
    return lambda _: torch.autograd.grad(torch.nn.functional.linear(x, weight, bias), [x, weight, bias], grad)


def fp8_step_with_bf16_wgrad(shape: Shape, device: torch.device) -> Step:
    """fprop and dgrad in FP8 with known scales, the weight's gradient from x and y's gradient in BF16: no operand is
    transposed but the weight."""
    value = 0.02 * torch.randn(shape.out_features, shape.in_features, device=device)
    weight, weight_scale = ops.quantize_current(value.bfloat16(), E4M3)[::2]
    (x, bias, grad), record = _operands(shape, device), torch.zeros(1, device=device)
    x = x.detach()
    x_scale = ops.scale_from_amax(ops.amax(x), E4M3, power_of_two=False)
    grad_scale = ops.scale_from_amax(ops.amax(grad), E5M2, power_of_two=False)

    def step(_: int) -> object:
        rows = ops.quantize_with_scale(x, x_scale, E4M3, amax_out=record)[0]
        y = ops.scaled_mm(rows, weight, x_scale, weight_scale, bias=bias.detach(), use_fast_accum=True)
        g, _, grad_bias, _ = ops.quantize_grad_output(grad, E5M2, scale=grad_scale, amax_out=record, transposed=False)
        grad_x = ops.scaled_mm(g, ops.transpose(weight), grad_scale, weight_scale)
        return y, grad_x, grad.t() @ x, grad_bias

    return step


def te_step(shape: Shape, device: torch.device, *, cast_once: bool, blockwise: bool = False) -> Step:
    """Transformer Engine's layer."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Format

    layer = te.Linear(shape.in_features, shape.out_features, bias=True, params_dtype=torch.bfloat16, device=str(device))
    delayed = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=HISTORY_LENGTH, amax_compute_algo="max")
    recipe = Float8BlockScaling() if blockwise else delayed
    x, _, grad = _operands(shape, device)
    is_first = True

    def step(_: int) -> None:
        nonlocal is_first
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            y = layer(x, is_first_microbatch=is_first if cast_once else None)
        is_first = False
        torch.autograd.grad(y, [x, layer.weight, layer.bias], grad)

    return step


def _operands(shape: Shape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, bias, gradient of y."""
    x = torch.randn(shape.tokens, shape.in_features, device=device).bfloat16().requires_grad_()
    bias = torch.zeros(shape.out_features, device=device, dtype=torch.bfloat16, requires_grad=True)
    return x, bias, 1e-3 * torch.randn(shape.tokens, shape.out_features, device=device).bfloat16()


#: In the order of timing: layers that another library may break come last.
STEPS: dict[str, Callable[[Shape, torch.device], Step]] = {
    BF16: bf16_step,
    FP8_DELAYED: partial(fp8_step, recipe_name="delayed"),
    FP8_FAST: partial(fp8_step, recipe_name="delayed", delays_weight_grads=True),
    FP8_CURRENT: partial(fp8_step, recipe_name="tensorwise"),
    FP8_BLOCKS: partial(fp8_step, recipe_name="blockwise"),
    TE: partial(te_step, cast_once=False),
    TE_CACHED: partial(te_step, cast_once=True),
    TE_BLOCKS: partial(te_step, cast_once=False, blockwise=True),
}
#: Whether a weight's gradient is worth its operands' transposed casts.
WGRAD_STEPS: dict[str, Callable[[Shape, torch.device], Step]] = {
    BF16: bf16_step,
    FP8_BF16_WGRAD: fp8_step_with_bf16_wgrad,
    FP8_DELAYED: partial(fp8_step, recipe_name="delayed"),
    FP8_FAST: partial(fp8_step, recipe_name="delayed", delays_weight_grads=True),
}
#: Of a language model's head, which `initialize` gives a scale for each row.
HEAD_STEPS: dict[str, Callable[[Shape, torch.device], Step]] = {
    BF16: bf16_step,
    FP8_CURRENT: partial(fp8_step, recipe_name="tensorwise"),
    FP8_ROWS: partial(fp8_step, recipe_name="tensorwise", scales_grad_rows=True),
    TE: partial(te_step, cast_once=False),
}


def time_step(step: Step) -> tuple[float, str]:
    """Seconds a call, and how they were taken."""
    for _ in range(3):
        step(0)  # lazy initialisation, Triton's compilation, the first scales
    try:
        return seconds_per_call(step), "graph"
    except Exception:
        torch.cuda.synchronize()
        return seconds_per_call(step, graph=False), "events"


def measure(
    shapes: Sequence[Shape],
    device: torch.device,
    timer: Callable[[Step], tuple[float, str]] = time_step,
    steps: Mapping[str, Callable[[Shape, torch.device], Step]] = STEPS,
) -> Iterator[LinearRow]:
    """One row per shape and layer, then sums over several shapes. A failed case becomes a row with its error."""
    rows = [_measure_one(name, steps[name], shape, device, timer) for name in steps for shape in shapes]
    for shape in shapes:
        yield from with_ratios([row for row in rows if row.shape == str(shape)])
    if len(shapes) == 1:
        return
    num_flops = sum(shape.num_flops for shape in shapes)
    totals = []
    for name in steps:
        times = [row.milliseconds for row in rows if row.name == name and row.milliseconds is not None]
        if len(times) == len(shapes):  # a layer that failed at one shape has no sum
            totals.append(LinearRow(ALL_SHAPES, name, sum(times), num_flops / sum(times) / 1e9))
    yield from with_ratios(totals)


def _measure_one(
    name: str,
    make: Callable[[Shape, torch.device], Step],
    shape: Shape,
    device: torch.device,
    timer: Callable[[Step], tuple[float, str]],
) -> LinearRow:
    row = LinearRow(str(shape), name)
    try:
        seconds, row.timing = timer(make(shape, device))
        row.milliseconds = seconds * 1e3
        row.tflop_per_s = shape.num_flops / seconds / 1e12
    except Exception as error:
        row.error = reason(error)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return row


def with_ratios(rows: Sequence[LinearRow]) -> Sequence[LinearRow]:
    """The rows of one shape with their speeds over the peers'."""
    times = {row.name: row.milliseconds for row in rows}
    for row in rows:
        if row.milliseconds is not None:
            bf16, te = times.get(BF16), times.get(TE)
            row.over_bf16 = bf16 / row.milliseconds if bf16 is not None else None
            row.over_te = te / row.milliseconds if te is not None else None
    return rows


def table(rows: Sequence[LinearRow]) -> str:
    """The rows as aligned text, the targets beside the layer that they are for."""
    lines = [
        "linear layer, forward + backward with all quantisation",
        f"{'':28} {'':42} {'ms':>8} {'TFLOP/s':>8} {'× BF16':>7} {'× TE':>6}  targets",
    ]
    for row in rows:
        if row.error is not None:
            lines.append(f"{row.shape:28} {row.name:42} {row.error}")
            continue
        assert row.milliseconds is not None and row.tflop_per_s is not None
        cells = f"{row.shape:28} {row.name:42} {row.milliseconds:8.3f} {row.tflop_per_s:8.0f}"
        cells += f" {_ratio(row.over_bf16):>7} {_ratio(row.over_te):>6}"
        if row.name in (FP8_DELAYED, FP8_FAST):
            cells += f"  ≥ {TARGETS[BF16]:.2f} × BF16 {_met(row.over_bf16, TARGETS[BF16])}"
            cells += f", ≥ {TARGETS[TE]:.2f} × TE {_met(row.over_te, TARGETS[TE])}"
        if row.timing == "events":
            cells += "  (timed without a graph)"
        lines.append(cells.rstrip())
    return "\n".join(lines)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _met(value: float | None, target: float) -> str:
    return "(not measured)" if value is None else "met" if value >= target else "missed"
