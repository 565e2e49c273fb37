"""p.grad of FP8 weights and plain parameters: accumulation, torch's own clipping, what users write and drop."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fp8_megatron.any_model.build import build_optimizer
from fp8_megatron.any_model.clip_grads import clip_grad_norm_
from fp8_megatron.any_model.grad_tensor import GradTensor
from fp8_megatron.any_model.initialize import initialize
from fp8_megatron.any_model.linears import replace_linears
from fp8_megatron.dtypes import LEVELS
from fp8_megatron.errors import UserError
from fp8_megatron.formats.recipes import RecipeName
from fp8_megatron.quantization.stats import snr_db


class Model(torch.nn.Module):
    """An FP8 layer that is used `uses` times, a norm, and a layer that stays as it is."""

    def __init__(self, uses: int = 1) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(48, 48)
        self.norm = torch.nn.LayerNorm(48)
        self.head = torch.nn.Linear(48, 5)
        self.uses = uses

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.uses):
            x = self.linear(x)
        y: Tensor = self.head(self.norm(x))
        return y


def build(level: str = "O2", *, uses: int = 1, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = Model(uses).to(dtype)
    user = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, build_optimizer(model, user, replace_linears(model, weight=LEVELS[level].weight), level, **settings)


def backward(model: Any, seed: int = 0, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(32, 48, generator=generator).to(model.norm.weight.dtype)
    (model(x) * torch.randn(32, 5, generator=generator) * scale).sum().backward()


def dense(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad.clone().float()


def sum_of_single_gradients(dtype: torch.dtype, seeds: range, uses: int = 1) -> dict[str, Tensor]:
    """Each backward's gradient as FP8Linear computes it, in its 16-bit output dtype, added in FP32."""
    total: dict[str, Tensor] = {}
    torch.manual_seed(0)
    model = Model(uses).to(dtype)
    replace_linears(model, weight=LEVELS["O2"].weight)
    for seed in seeds:
        model.zero_grad()
        backward(model, seed)
        for name, param in model.named_parameters():
            total[name] = total.get(name, torch.zeros(param.shape)) + dense(param.grad)
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_gradient_is_kept_in_fp8(dtype: torch.dtype) -> None:
    """Normal numbers in E4M3: uniform errors of at most 2⁻⁴ of the value keep 10·log₁₀(3 · 4⁴ · 1.5) = 30.6 dB."""
    model, optimizer = build(dtype=dtype)
    backward(model)
    grad = model.linear.weight.grad
    assert isinstance(grad, GradTensor)
    assert grad.dtype == dtype and grad.shape == (48, 48)
    assert optimizer.storage_bytes["main_grad"] == 4096 + dtype.itemsize * (5 * 48 + 16 + 256 + 128 + 128)
    expected = sum_of_single_gradients(dtype, range(1))
    assert snr_db(dense(grad), expected["linear.weight"]) > 29.0
    for name in ("linear.bias", "norm.weight", "head.weight"):
        own = model.get_parameter(name).grad
        assert type(own) is Tensor and own.dtype == dtype
        assert torch.allclose(own.float(), expected[name], rtol=2.0**-7, atol=1e-5), name


@pytest.mark.parametrize(("num_micro_batches", "itemsize"), [(2, 2), (32, 2), (33, 4)])
def test_more_gradients_widen_the_storage(num_micro_batches: int, itemsize: int) -> None:
    """The first step rounds its first gradient to FP8; later steps add all of them in the wider dtype. BF16 sums of n
    random gradients round n times by 2⁻⁹/√3 of the sum: 10·log₁₀(3 · 4⁹ / n) = 43 dB at 32."""
    model, optimizer = build()
    for step in range(2):
        optimizer.zero_grad()
        seeds = range(100 * step, 100 * step + num_micro_batches)
        for seed in seeds:
            backward(model, seed)
        snr = snr_db(dense(model.linear.weight.grad), sum_of_single_gradients(torch.float32, seeds)["linear.weight"])
        assert snr > (29.0 if step == 0 else 41.0)
    per_weight = optimizer._spaces[0].buffer.dtype.torch_dtype.itemsize
    assert per_weight == itemsize
    assert optimizer._spaces[0].buffer.most_gradients == num_micro_batches


def test_a_known_number_of_gradients_is_wide_from_the_start() -> None:
    model, optimizer = build(gradient_accumulation_steps=4)
    for seed in range(4):
        backward(model, seed)
    expected = sum_of_single_gradients(torch.float32, range(4))["linear.weight"]
    assert snr_db(dense(model.linear.weight.grad), expected) > 41.0
    optimizer.step()


def test_a_weight_used_twice_gets_the_sum() -> None:
    model, _ = build(uses=2)
    backward(model)
    expected = sum_of_single_gradients(torch.float32, range(1), uses=2)["linear.weight"]
    assert snr_db(dense(model.linear.weight.grad), expected) > 29.0


@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_torchs_clipping_clips(foreach: bool | None, num_micro_batches: int) -> None:
    model, _ = build()
    for seed in range(num_micro_batches):
        backward(model, seed)
    before = {name: dense(param.grad) for name, param in model.named_parameters()}
    norm = math.sqrt(sum(grad.square().sum().item() for grad in before.values()))
    assert torch.nn.utils.get_total_norm([param.grad for param in model.parameters()]).item() == pytest.approx(norm)
    returned = torch.nn.utils.clip_grad_norm_(model.parameters(), norm / 8, foreach=foreach)
    # FP32 sums of some thousand squares.
    assert returned.item() == pytest.approx(norm, rel=1e-5)
    # A BF16 accumulator rounds the products by 2⁻⁹.
    tolerance = 1e-5 if num_micro_batches == 1 else 2.0**-8
    for name, param in model.named_parameters():
        assert torch.allclose(dense(param.grad), before[name] / 8, rtol=tolerance, atol=1e-7), name


def test_our_clipping_is_torchs() -> None:
    outcomes = []
    for clip in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        model, _ = build()
        backward(model)
        norm = clip(model.parameters(), 0.5)
        outcomes.append([norm.reshape(1), *(dense(param.grad) for param in model.parameters())])
    for ours, theirs in zip(*outcomes, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=0)
    model, _ = build()
    backward(model)
    before = dense(model.norm.weight.grad)
    norm = clip_grad_norm_([model.norm.weight, model.linear.weight], 0.5)
    assert torch.allclose(dense(model.norm.weight.grad), before * (0.5 / (norm + 1e-6)), rtol=1e-6, atol=0)
    assert clip_grad_norm_(model.head.weight, 1e9).item() == pytest.approx(dense(model.head.weight.grad).norm().item())


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_one_bad_gradient_skips_one_step(level: str, num_micro_batches: int) -> None:
    """Clipping makes gradients NaN. Their padding, and slots without a gradient, do not stay NaN."""
    model, optimizer = build(level)
    for step in range(6):
        optimizer.zero_grad()
        for seed in range(num_micro_batches):
            backward(model, 10 * step + seed)
        if step in (1, 3):
            model.norm.weight.grad.fill_(math.nan)
        if step in (3, 4):
            model.linear.weight.grad = model.head.weight.grad = model.head.bias.grad = None
        if step == 5:  # of some parameters
            model.head.bias.grad.fill_(math.inf)
            model.linear.weight.grad.mul_(math.nan)
            clip_grad_norm_([model.head.bias, model.head.weight], 1.0)
        else:
            clip_grad_norm_(model, 1.0)
        optimizer.step()
        assert optimizer.num_skipped_steps == {1: 1, 2: 1, 3: 2, 4: 2, 5: 3}.get(step, 0), step
    optimizer.zero_grad()
    backward(model, 60)
    optimizer.step()
    assert optimizer.num_skipped_steps == 3
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


def test_gradients_are_none_before_backward_and_after_zero_grad() -> None:
    model, optimizer = build()
    for drop in (lambda: None, optimizer.zero_grad, model.zero_grad, lambda: optimizer.zero_grad(set_to_none=True)):
        drop()
        assert all(param.grad is None for param in model.parameters())
        backward(model)
        assert all(param.grad is not None for param in model.parameters())
    expected = sum_of_single_gradients(torch.float32, range(1))["linear.weight"]
    # None of the four was added to another one.
    assert snr_db(dense(model.linear.weight.grad), expected) > 29.0


def test_what_users_write_is_what_the_step_sees() -> None:
    model, _ = build()
    backward(model)
    weight = model.linear.weight
    before = dense(weight.grad)
    weight.grad.clamp_(-0.01, 0.01)
    assert torch.allclose(dense(weight.grad), before.clamp(-0.01, 0.01), rtol=2.0**-4, atol=1e-6)
    weight.grad.mul_(4.0).div_(2.0)
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.005)
    assert dense(weight.grad).abs().max() <= 0.005 * (1 + 2.0**-4)
    weight.grad.add_(torch.ones(48, 48))
    weight.grad.copy_(before)
    assert snr_db(dense(weight.grad), before) > 40.0
    weight.grad = torch.full((48, 48), 0.25)
    backward(model)
    assert isinstance(weight.grad, GradTensor)
    assert snr_db(dense(weight.grad), before + 0.25) > 29.0


@pytest.mark.parametrize("level", ["O1", "O3"])
def test_a_gradient_that_is_exchanged_through_data_is_what_the_step_sees(level: str) -> None:
    """``p.grad.data = …``: a first step with zeros moves nothing, and a second one what its gradient says."""
    model, optimizer = build(level, gradient_accumulation_steps=1)
    names = ["linear.weight", "norm.weight", "head.weight"]
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    before = {name: model.get_parameter(name).detach().clone().float() for name in names}
    backward(model)
    clip_grad_norm_(model.parameters(), 1e9)  # moves gradients of vectors to their storage
    for param in model.parameters():
        param.grad.data = torch.zeros(param.shape)
        assert not param.grad.any()
    optimizer.step()
    for name in names:
        assert torch.equal(model.get_parameter(name).detach().float(), before[name]), name
    for param in model.parameters():
        param.grad.data = torch.ones(param.shape)
    assert clip_grad_norm_(model.parameters(), 1e9).square() == pytest.approx(
        sum(p.numel() for p in model.parameters())
    )
    optimizer.step()
    for name in names:
        moved = before[name] - model.get_parameter(name).detach().float()
        assert moved.min() > 0.0, name
    optimizer.zero_grad()
    backward(model)
    model.head.weight.grad.data = torch.ones(5, 48)
    model.head.weight.grad = None  # and so it is in no norm
    others = sum(dense(param.grad).square().sum() for param in model.parameters() if param.grad is not None)
    assert clip_grad_norm_(model, 1e9).square() == pytest.approx(others.item(), rel=1e-3)


def test_a_gradient_of_another_shape_is_refused() -> None:
    model, _ = build()
    backward(model)
    with pytest.raises(ValueError, match=r"a gradient \(48, 48\) cannot become \(3,\) through .data"):
        model.linear.weight.grad.data = torch.zeros(3)


def test_reading_a_gradient() -> None:
    model, _ = build()
    backward(model)
    grad = model.linear.weight.grad
    plain = grad.clone()
    assert type(plain) is Tensor
    assert torch.equal(grad.float(), plain) and torch.equal(grad.to(torch.bfloat16), plain.bfloat16())
    assert torch.isfinite(grad).all() and torch.equal(grad.abs(), plain.abs()) and torch.equal(grad * 2, plain * 2)
    assert grad.norm().item() == pytest.approx(plain.norm().item())
    assert grad.norm(math.inf) == plain.norm(math.inf)
    assert torch.equal(torch.stack([grad, plain])[0], plain)
    assert isinstance(grad.detach(), GradTensor)
    assert torch.equal(grad.view(-1) + 0, plain.view(-1)) and torch.equal(grad[0] + 0, plain[0])
    assert grad.tolist() == plain.tolist() and (grad.numpy() == plain.numpy()).all()
    grad[0].mul_(0.0)
    assert not grad[0].any() and snr_db(dense(grad)[1:], plain[1:]) > 29.0


@pytest.mark.parametrize("level", ["O1", "O3"])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_backward_that_asks_for_some_gradients_leaves_the_others(level: str, checkpoints: bool) -> None:
    """As an adversary's or a saliency map's does. In plain torch no other ``p.grad`` changes."""
    model, _ = build(level)

    def run(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(model, x, use_reentrant=False) if checkpoints else model(x)
        return y.square().sum()

    x = torch.randn(32, 48, generator=torch.Generator().manual_seed(1)).requires_grad_()
    run(x).backward()
    expected, x.grad = x.grad, None
    before = {name: dense(param.grad) for name, param in model.named_parameters()}
    (of_input,) = torch.autograd.grad(run(x), x)
    run(x).backward(inputs=[x])
    assert torch.equal(of_input, expected) and torch.equal(x.grad, expected)
    for name, param in model.named_parameters():
        assert torch.equal(dense(param.grad), before[name]), name
    model.zero_grad()
    torch.autograd.grad(run(x), x)
    assert all(param.grad is None for param in model.parameters())
    run(x).backward(inputs=[model.linear.weight])
    assert torch.equal(dense(model.linear.weight.grad), before["linear.weight"])
    assert [name for name, param in model.named_parameters() if param.grad is not None] == ["linear.weight"]


def test_the_gradient_of_a_layer_cannot_be_returned() -> None:
    model, _ = build()
    with pytest.raises(UserError, match=r"gradient of linear\.weight, .*backward\(inputs="):
        torch.autograd.grad(model(torch.randn(32, 48)).sum(), list(model.parameters()), allow_unused=True)
    assert model.linear.weight.grad is None


def test_sparse_gradients_are_refused() -> None:
    model = torch.nn.Embedding(16, 16, sparse=True)
    build_optimizer(model, torch.optim.AdamW(model.parameters()), {}, "O2")
    with pytest.raises(ValueError, match=r"weight is torch\.sparse_coo: use dense gradients"):
        model(torch.tensor([1])).sum().backward()


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_model_that_is_converted_afterwards_is_named(level: str) -> None:
    model, optimizer = build(level)
    model.bfloat16()
    with pytest.raises(UserError, match=r"was torch.float32 on cpu .* is torch.bfloat16 on cpu: convert or move the"):
        backward(model)
        optimizer.step()


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("head.weight", (9, 48)),
        ("head.weight", (3, 48)),
        ("head.bias", (9,)),
        ("norm.weight", (1,)),
        ("linear.bias", (1,)),
    ],
)
@pytest.mark.parametrize("reads", ["backward", "state_dict", "step"])
def test_a_parameter_that_is_resized_afterwards_is_named(name: str, shape: tuple[int, ...], reads: str) -> None:
    """As by transformers' ``resize_token_embeddings``. The flat storage has no place for it: it would write into its
    neighbours."""
    model, optimizer = build()
    param = model.get_parameter(name)
    own = tuple(param.shape)
    if reads == "step":
        backward(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    param.data = torch.full(shape, 7.0)
    with pytest.raises(UserError, match=re.escape(f"{name} had the shape {own} when the optimizer was built and has")):
        if reads == "backward":
            param.square().sum().backward()
            optimizer.step()
        elif reads == "state_dict":
            optimizer.state_dict()
        else:
            optimizer.step()
    after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items() if key != name)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_hooks_see_the_gradients_of_fp8_layers(level: str, num_micro_batches: int) -> None:
    """`register_hook` gets every gradient before it is stored, as torch's loggers want it. Training keeps its bits,
    but for sums: a hook gets 16 bits, and without one the GEMM adds before it rounds.
    """

    def train(hooked: bool) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
        model, optimizer = build(level)
        seen: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
        sums: dict[str, Tensor] = {}
        if hooked:
            for name, param in model.named_parameters():
                param.register_hook(seen[name].append)
        for seed in range(2 * num_micro_batches):
            backward(model, seed)
            if seed % num_micro_batches == num_micro_batches - 1:
                if not sums:
                    sums = {name: dense(param.grad) for name, param in model.named_parameters()}
                optimizer.step()
                optimizer.zero_grad()
        return sums if num_micro_batches > 1 else dict(model.state_dict()), seen

    (values, _), (hooked_values, seen) = train(False), train(True)
    for name, value in values.items():
        error = (hooked_values[name] - value).abs()
        sizes = torch.stack([grad.float().abs() for grad in seen[name][:num_micro_batches]]).sum(dim=0)
        bound = 0.0 if num_micro_batches == 1 else 2.0**-7 * sizes.view_as(value)
        assert (error <= bound).all(), name
        assert len(seen[name]) == 2 * num_micro_batches
    expected = sum_of_single_gradients(torch.float32, range(1))
    for name in ("linear.weight", "linear.bias"):
        assert type(seen[name][0]) is Tensor and torch.equal(seen[name][0], expected[name]), name


def test_a_hook_changes_the_gradient_until_it_is_removed() -> None:
    (model, _), (other, _) = build("O1"), build("O1")
    params = [model.linear.weight, model.linear.bias]
    handles = [param.register_hook(lambda grad: grad * 0.5) for param in params]
    for _ in range(2):
        backward(model)
        backward(other)
        factor = 0.5 if handles else 1.0
        for param, unhooked in zip(params, (other.linear.weight, other.linear.bias), strict=True):
            assert torch.equal(dense(param.grad), dense(unhooked.grad) * factor)
        for handle in handles:
            handle.remove()
        handles.clear()
        model.zero_grad()
        other.zero_grad()


def test_a_hook_on_a_compiled_layers_weight_is_an_error() -> None:
    """A compiled graph has no gradient of the weight, so the hook would be left out in silence."""
    model, _ = build()
    compiled = torch.compile(model, backend="aot_eager")
    backward(compiled)
    handle = model.linear.weight.register_hook(lambda grad: grad * 0.5)
    with pytest.raises(UserError, match=r"weight of shape \(48, 48\) has hooks"):
        backward(compiled)
    handle.remove()
    backward(compiled)


class Gated(torch.nn.Module):
    """Layers that share an input, an activation that can be computed again, and an activation checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(128)
        self.gate, self.up = torch.nn.Linear(128, 128), torch.nn.Linear(128, 128)
        self.down = torch.nn.Linear(128, 128)

    def _mlp(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))
        return y

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._mlp(self.norm(x))
        y: Tensor = checkpoint(self._mlp, x, use_reentrant=False)
        return y


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_second_backward_over_a_retained_graph(level: str, recomputes: bool, recipe: RecipeName) -> None:
    """Gradients have the bits of two forwards, also where the parts of the sum cancel."""

    def train(retains: bool, second: float) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = Gated()
        settings = {"recipe": recipe, "recompute_activations": recomputes}
        _, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), opt_level=level, **settings)
        x, first, other = torch.randn(3, 128, 128)
        for _ in range(2):
            optimizer.zero_grad()
            y = model(x)
            y.backward(first, retain_graph=retains)
            if not retains:
                y = model(x)
            y.backward(second * first + other)
            grads = {name: dense(param.grad) for name, param in model.named_parameters()}
            optimizer.step()
        return grads

    for second in (1.0, -1.0):
        expected = train(False, second)
        for name, grad in train(True, second).items():
            assert torch.equal(grad, expected[name]), name
