"""FP8Optimizer over 2 and 4 gloo ranks: one rank's weights, sharded state, clipping by the mean, state dicts."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fp8_megatron
from fp8_megatron.any_model import data_parallel, plain_model
from fp8_megatron.any_model.build import build_optimizer
from fp8_megatron.any_model.clip_grads import clip_grad_norm_
from fp8_megatron.any_model.initialize import initialize
from fp8_megatron.any_model.linears import replace_linears
from fp8_megatron.any_model.optimizer import FP8Optimizer
from fp8_megatron.any_model.torch_optimizers import OptimizerError
from fp8_megatron.device.group import Group
from fp8_megatron.dtypes import LEVELS
from fp8_megatron.errors import UserError
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from fp8_megatron.quantization.stats import snr_db
from tests.harness import fp8_models
from tests.harness.fp8_models import masters
from tests.harness.ranks import RankError, RankPool, on_default_group

NUM_STEPS = 4


class Model(torch.nn.Module):
    """Linear layers of several sizes, an embedding, norms, and a weight that is used in every second step."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 64)
        self.first = torch.nn.Linear(64, 144)
        self.norm = torch.nn.LayerNorm(144)
        self.second = torch.nn.Linear(144, 64, bias=False)
        self.extra = torch.nn.Linear(64, 64)
        self.head = torch.nn.Linear(64, 7)

    def forward(self, tokens: Tensor, uses_extra: bool = True) -> Tensor:
        x = self.second(self.norm(self.first(self.embedding(tokens))).relu())
        y: Tensor = self.head(self.extra(x).relu() if uses_extra else x)
        return y


def build(
    level: str, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Model, FP8Optimizer]:
    torch.manual_seed(seed)
    model = Model().to(device, dtype)
    groups = [
        {"params": [param for param in model.parameters() if (param.ndim > 1) is is_matrix]}
        for is_matrix in (True, False)
    ]
    groups[1]["weight_decay"] = 0.0  # type: ignore[assignment]
    user = torch.optim.AdamW(groups, lr=5e-3)
    return model, build_optimizer(model, user, replace_linears(model, weight=LEVELS[level].weight), level)


class Outcome(NamedTuple):
    """What one rank has after its last step."""

    norms: list[float]
    values: dict[str, Tensor]
    weights: dict[str, Tensor]
    state: dict[str, Any]
    bytes: dict[str, int]


def with_equal_gradients(group: Group, level: str, dtype: torch.dtype, device: str = "cpu") -> Outcome:
    """Every rank is given the same gradients, so their mean is exact, in E4M3 blocks and in BF16."""
    model, optimizer = build(level, seed=group.rank(), dtype=dtype, device=device)
    norms = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        for name, param in model.named_parameters():
            grad = torch.randn(param.shape, generator=generator).bfloat16().to(param.device, param.dtype)
            if step % 2 and "extra" in name:
                continue
            param.grad = grad
        optimizer.all_reduce_grads(model)
        norms.append(clip_grad_norm_(model, 1e9).item())
        optimizer.step()
    dequantized = {
        name: (param.dequantize() if isinstance(param, ScaledTensor) else param.detach()).to("cpu", copy=True)
        for name, param in model.named_parameters()
    }
    state = {
        index: {key: (str(tensor.dtype), tensor.float().cpu()) for key, tensor in entry.items()}
        for index, entry in optimizer.state_dict()["state"].items()
    }
    return Outcome(norms, masters(model), dequantized, state, optimizer.storage_bytes)


def assert_equal(outcome: Outcome, single: Outcome, last_bit: float = 0.0) -> None:
    """Bit for bit, or FP32 state but for `last_bit`, relative to an entry's largest value.

    A GPU's kernels for gradients of other dtypes (BF16 on one rank, FP32 on several) fuse other products with sums.
    """
    # The squares are added in another order. One rank has rounded the gradients to the same E4M3 blocks.
    assert outcome.norms == pytest.approx(single.norms, rel=1e-6)
    for kind in ("values", "weights"):
        for name, expected in getattr(single, kind).items():
            assert torch.equal(getattr(outcome, kind)[name], expected), f"{kind} of {name}"
    for index, entry in single.state.items():
        for key, (dtype_name, expected) in entry.items():
            assert outcome.state[index][key][0] == dtype_name
            measured = outcome.state[index][key][1]
            bound = last_bit * expected.abs().max() if dtype_name == "torch.float32" else 0.0
            assert ((measured - expected).abs() <= bound).all(), f"{key} of parameter {index}"


@pytest.mark.parametrize(("level", "num_ranks"), [("O1", 2), ("O2", 2), ("O3", 2), ("O3", 4)])
def test_ranks_equal_one_rank(ranks: RankPool, level: str, num_ranks: int) -> None:
    """Bit for bit, from the first rank's initial values, with parameters that are unused in every second step."""
    dtype = torch.bfloat16 if num_ranks == 4 else torch.float32
    (single,) = ranks.run(on_default_group, with_equal_gradients, level, dtype, num_ranks=1)
    for outcome in ranks.run(on_default_group, with_equal_gradients, level, dtype, num_ranks=num_ranks):
        assert_equal(outcome, single)
        # Even shares, padded to whole chunks and blocks of every rank, in each of at most four spaces.
        for kind in ("exp_avg", "exp_avg_sq"):
            assert outcome.bytes[kind] <= single.bytes[kind] / num_ranks + 4 * 4096 * 4


def _on_data(
    group: Group, level: str, num_micro_batches: int, clips: str, wraps: bool = False
) -> tuple[list[float], dict[str, Tensor], Any]:
    """Fit a random function of the tokens; each rank sees its part of every batch."""
    model, optimizer = build(level)
    rank, size = group.rank(), group.size()
    called = torch.nn.parallel.DistributedDataParallel(model) if wraps else model
    teacher = torch.randn(50, 7, generator=torch.Generator().manual_seed(9))
    losses, norms = [], []
    for step in range(12):
        tokens = torch.randint(0, 50, (128,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        mine = tokens.view(num_micro_batches, size, -1)[:, rank]
        total = 0.0
        for micro_batch in mine:
            loss = torch.nn.functional.mse_loss(called(micro_batch), teacher[micro_batch]) / num_micro_batches
            loss.backward()
            total += loss.item()
        if clips:
            clip = clip_grad_norm_ if clips == "ours" else torch.nn.utils.clip_grad_norm_
            norms.append(clip(model.parameters(), 0.1).item())
        optimizer.step()
        mean = torch.tensor([total])
        torch.distributed.all_reduce(mean, group=group)
        losses.append(mean.item() / size)
    return losses, masters(model), norms


@pytest.mark.parametrize(("num_micro_batches", "clips"), [(1, "torch"), (2, "ours")])
def test_data_is_split_over_ranks(ranks: RankPool, num_micro_batches: int, clips: str) -> None:
    """The loss of 12 steps is one rank's within 5%; FP8 casts of parts of a batch have other scales."""
    (single,) = ranks.run(on_default_group, _on_data, "O3", num_micro_batches, clips, num_ranks=1)
    outcomes = ranks.run(on_default_group, _on_data, "O3", num_micro_batches, clips, num_ranks=2)
    for losses, weights, norms in outcomes:
        assert losses == pytest.approx(single[0], rel=0.05)
        assert losses[-1] < 0.9 * losses[0]
        # Gradients in E4M3 keep 30 dB a rank: norms of sums of thousands are within 1%.
        assert norms == pytest.approx(single[2], rel=0.05)
        assert norms == outcomes[0][2]
        for name, value in weights.items():
            assert torch.equal(value, outcomes[0][1][name]), f"replicas differ in {name}"


@pytest.mark.parametrize("clips", ["torch", "ours"])
def test_torchs_ddp_may_wrap_the_model(ranks: RankPool, clips: str) -> None:
    """DDP keeps one vector, whose FP32 mean it takes; the mean of two equal means is the same. So every bit is."""
    plain = ranks.run(on_default_group, _on_data, "O3", 1, clips, num_ranks=2)
    for losses, weights, norms in ranks.run(on_default_group, _on_data, "O3", 1, clips, True, num_ranks=2):
        assert losses == plain[0][0]
        assert norms == plain[0][2]
        for name, value in weights.items():
            assert torch.equal(value, plain[0][1][name]), name


def _linears_alone(group: Group, wraps: bool, biases: tuple[bool, bool]) -> tuple[list[float], dict[str, Tensor]]:
    """Fit a function with FP8 layers alone; each rank has its own batches."""
    torch.manual_seed(group.rank())
    layers = [torch.nn.Linear(32, 64, bias=biases[0]), torch.nn.GELU(), torch.nn.Linear(64, 32, bias=biases[1])]
    model = torch.nn.Sequential(*layers)
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), "O3")
    called = torch.nn.parallel.DistributedDataParallel(model) if wraps else model
    losses = []
    for step in range(6):
        for part in range(2):
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(4 * step + 2 * part + group.rank()))
            loss = torch.nn.functional.mse_loss(called(x), x.sin())
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    copied = copy.deepcopy(model)  # it has no replicas
    copied(x).sum().backward()
    return losses, masters(model)


@pytest.mark.parametrize("biases", [(True, True), (False, True)], ids=["biases", "one bias"])
def test_torchs_ddp_may_wrap_fp8_layers_alone(ranks: RankPool, biases: tuple[bool, bool]) -> None:
    """DDP refuses a model without a gradient of its own. It gets a bias's, whose FP32 means differ in a last bit."""
    plain = ranks.run(on_default_group, _linears_alone, False, biases, num_ranks=2)
    wrapped = ranks.run(on_default_group, _linears_alone, True, biases, num_ranks=2)
    for rank, (losses, weights) in enumerate(wrapped):
        assert losses == pytest.approx(plain[rank][0], rel=1e-4)
        for name, value in weights.items():
            assert torch.equal(value, wrapped[0][1][name]), f"replicas differ in {name}"
            assert snr_db(value, plain[0][1][name]) > 50, name


def _has_nothing_for_ddp(group: Group) -> str:
    with pytest.raises(data_parallel.ReplicaError) as caught:
        _linears_alone(group, True, (False, False))
    return str(caught.value)


def test_ddp_over_layers_without_a_bias_is_an_error(ranks: RankPool) -> None:
    for message in ranks.run(on_default_group, _has_nothing_for_ddp, num_ranks=2):
        assert "call the model itself" in message


def _initializes_inside(group: Group) -> str:
    """The error of a forward if DDP wrapped a model before its part was initialised, as in Lightning's
    configure_optimizers."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.LayerNorm(32))
    wrapped = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(model))
    fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(UserError) as refused:
        wrapped(torch.randn(32, 32))
    model(torch.randn(32, 32))  # without DDP it works
    return str(refused.value)


def test_a_model_inside_of_ddp(ranks: RankPool) -> None:
    for error in ranks.run(on_default_group, _initializes_inside, num_ranks=2):
        assert "DDP wrapped the model before initialize" in error and "configure_model" in error


def _joins_uneven_inputs(group: Group, ends_at_first: bool) -> tuple[int, str]:
    """Steps and the error of a rank in ``join()``; rank 1 has two more batches."""
    model, optimizer = build("O2")
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    steps = 0
    try:
        with ddp.join(throw_on_early_termination=ends_at_first):
            for _ in range(1 + 2 * group.rank()):
                ddp(torch.arange(16)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
    except (RuntimeError, data_parallel.ReplicaError) as error:
        return steps, str(error)
    return steps, ""


def test_ranks_that_run_out_of_data_are_an_error(ranks: RankPool) -> None:
    """DDP's join() answers for DDP alone, so ranks with data would wait for the others' gradients until a timeout."""
    for steps, message in ranks.run(on_default_group, _joins_uneven_inputs, False, num_ranks=2):
        assert steps == 0 and "equally many batches" in message
    for steps, message in ranks.run(on_default_group, _joins_uneven_inputs, True, num_ranks=2):
        assert steps == 1 and "exhausted" in message


def _gradients_are_means(group: Group) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """By parameter: this rank's gradient, what p.grad shows, and what it shows after torch's tools halved it."""
    model, optimizer = build("O3")
    shown = {}
    for index, (name, param) in enumerate(model.named_parameters()):
        own = torch.randn(param.shape, generator=torch.Generator().manual_seed(100 * group.rank() + index))
        param.grad = own.to(param.dtype)
        shown[name] = own
    optimizer.all_reduce_grads()
    total = torch.nn.utils.get_total_norm([param.grad for param in model.parameters()])
    squares = [param.grad.clone().double().square().sum() for param in model.parameters()]
    assert total.item() == pytest.approx(torch.stack(squares).sum().sqrt().item(), rel=1e-5)
    result = {}
    for name, param in model.named_parameters():
        assert param.grad is not None
        mean = param.grad.clone()
        assert param.grad.norm().item() == pytest.approx(mean.norm().item(), rel=1e-5)
        assert param.grad.norm(math.inf) == mean.abs().max()
        param.grad.mul_(0.5)
        result[name] = (shown[name], mean, param.grad.clone())
        param.grad.zero_()
        assert not param.grad.clone().any()
        param.grad = None
    optimizer.zero_grad()
    return result


def test_gradients_are_means_over_ranks(ranks: RankPool) -> None:
    """Of E4M3 values for linear weights (30 dB), BF16 for matrices (2⁻⁹), FP32 for vectors."""
    outcomes = ranks.run(on_default_group, _gradients_are_means, num_ranks=2)
    for name, (_, shown, halved) in outcomes[0].items():
        mean = torch.stack([outcome[name][0] for outcome in outcomes]).mean(dim=0)
        assert snr_db(shown, mean) > (29.0 if "weight" in name and mean.ndim > 1 else 120.0), name
        assert torch.equal(halved, shown / 2), name
        for outcome in outcomes:
            assert torch.equal(outcome[name][1], shown), name


def _resumed(group: Group, level: str, file: bytes | None) -> tuple[bytes, dict[str, Tensor]]:
    """Three steps from a fresh model, whose state is returned as a file; or three more from such a file."""
    model, optimizer = build(level, seed=0 if file is None else 5)
    first = 0
    if file is not None:
        saved = torch.load(io.BytesIO(file), weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = 3
    for step in range(first, first + 3):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator).bfloat16().to(param.dtype)
        optimizer.step()
    saving = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saving)
    return saving.getvalue(), masters(model)


@pytest.mark.parametrize("level", ["O1", "O3"])
def test_another_number_of_ranks_resumes_the_run(ranks: RankPool, level: str) -> None:
    saved, _ = ranks.run(on_default_group, _resumed, level, None, num_ranks=2)[0]
    outcomes = [ranks.run(on_default_group, _resumed, level, saved, num_ranks=number)[0] for number in (1, 2, 4)]
    for _, weights in outcomes[1:]:
        for name, value in weights.items():
            assert torch.equal(value, outcomes[0][1][name]), name


def _unequal_use(group: Group) -> None:
    model, optimizer = build("O2")
    model(torch.arange(32), uses_extra=group.rank() == 0).sum().backward()
    optimizer.step()


def _unequal_backwards(group: Group) -> None:
    model, optimizer = build("O2")
    for _ in range(1 + group.rank()):
        model(torch.arange(32)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("unequal", [_unequal_use, _unequal_backwards])
def test_unequal_use_is_an_error(ranks: RankPool, unequal: Callable[[Group], None]) -> None:
    error = r"ReplicaError: .* rank \d has \d+, \d+ times: let every rank use the same parameters"
    with pytest.raises(RankError, match=error):
        ranks.run(on_default_group, unequal, num_ranks=2)


def _saved_by_one(group: Group, consolidates: bool, is_plain: bool = False) -> tuple[list[bool], str]:
    """What rank 0 alone reads, beside what all ranks read together; or the error."""
    data_parallel._PATIENCE = timedelta(seconds=2)
    model, optimizer = build("O3")
    model(torch.arange(32)).square().sum().backward()
    optimizer.step()
    together = model.state_dict(), optimizer.state_dict()["state"]
    if consolidates:
        optimizer.consolidate_state_dict()
    if group.rank() != 0:
        return [], ""
    try:
        alone = (plain_model(model) if is_plain else model).state_dict()
        state = optimizer.state_dict()["state"]
    except data_parallel.ReplicaError as error:
        return [], str(error)
    equal = [torch.equal(alone[name], value) for name, value in together[0].items()]
    for index, entry in together[1].items():
        equal += [torch.equal(state[index][key].float(), value.float()) for key, value in entry.items()]
    return equal, ""


@pytest.mark.parametrize("is_plain", [False, True])
def test_one_rank_saves_what_was_consolidated(ranks: RankPool, is_plain: bool) -> None:
    equal, error = ranks.run(on_default_group, _saved_by_one, True, is_plain, num_ranks=2)[0]
    assert error == ""
    assert len(equal) > 20 and all(equal)


def _written_after(group: Group, name: str) -> bool:
    """Whether the state of all ranks has a value that was written behind `consolidate_state_dict`."""
    model, optimizer = build("O3", dtype=torch.bfloat16)
    optimizer.consolidate_state_dict()
    with torch.no_grad():
        model.get_parameter(name).fill_(0.5)
    states = model.state_dict(), optimizer.state_dict()
    optimizer.load_state_dict(states[1])
    return bool((states[0][name] == 0.5).all() and (model.state_dict()[name] == 0.5).all())


@pytest.mark.parametrize("name", ["first.weight", "first.bias"])
def test_what_was_consolidated_is_dropped_when_values_are_written(ranks: RankPool, name: str) -> None:
    assert all(ranks.run(on_default_group, _written_after, name, num_ranks=2))


def _copied_by_one(group: Group, level: str) -> tuple[dict[str, Tensor], ...]:
    """Values of rank 0's copy, after three steps of its average, beside the masters and the stored weights."""
    data_parallel._PATIENCE = timedelta(seconds=2)
    model, optimizer = build(level)
    model(torch.arange(32)).square().sum().backward()
    optimizer.step()
    masters = dict(model.state_dict())
    stored = {
        name: param.dequantize() if isinstance(param, ScaledTensor) else param.detach()
        for name, param in model.named_parameters()
    }
    if group.rank() != 0:
        return ()
    copied = copy.deepcopy(model)
    average = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(3):
        average.update_parameters(model)
    return dict(copied.state_dict()), dict(average.module.state_dict()), masters, stored


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_one_rank_alone_may_copy_and_average(ranks: RankPool, level: str) -> None:
    """Nobody waits for another rank. Where the master is sharded, the copy has the FP8 weights' values."""
    copied, average, masters, stored = ranks.run(on_default_group, _copied_by_one, level, num_ranks=2)[0]
    for name, value in copied.items():
        assert torch.equal(value, stored[name]), name
        torch.testing.assert_close(average[name], value, rtol=4 * 2**-24, atol=0)
    assert torch.equal(copied["first.weight"], masters["first.weight"]) is (level == "O2")


@pytest.mark.parametrize("is_plain", [False, True])
def test_one_rank_alone_cannot_save(ranks: RankPool, is_plain: bool) -> None:
    _, error = ranks.run(on_default_group, _saved_by_one, False, is_plain, num_ranks=2)[0]
    what = "plain_model(model)" if is_plain else "model.state_dict()"
    assert f"{what} gathers what the replicas hold" in error and "consolidate_state_dict()" in error


def _saved_beside_a_step(group: Group, with_ddp: bool) -> list[str]:
    """The errors of both ranks where rank 0 saves and rank 1 takes a step."""
    model, optimizer = build("O2")
    caller = torch.nn.parallel.DistributedDataParallel(model) if with_ddp else model
    errors = []

    def attempt(call: Callable[[], object]) -> None:
        try:
            call()
        except data_parallel.ReplicaError as error:
            errors.append(str(error))

    def backward() -> None:
        caller(torch.arange(32)).square().sum().backward()

    for _ in range(2):  # DDP exchanges something of its own in its first forwards
        backward()
        optimizer.step()
    if group.rank() == 0:
        attempt(optimizer.state_dict)
        backward()  # which rank 1 waits for
    else:
        backward()
        attempt(optimizer.step)
        attempt(optimizer.state_dict)
    return errors


@pytest.mark.parametrize("with_ddp", [False, True])
def test_a_rank_that_saves_alone_ends_when_another_takes_a_step(ranks: RankPool, with_ddp: bool) -> None:
    """At once: in the step's first exchange of a gradient, and not after minutes."""
    saving, stepping = ranks.run(on_default_group, _saved_beside_a_step, with_ddp, num_ranks=2, timeout_seconds=60)
    for errors in (saving, stepping):
        assert "1 of 2 called it while the others took a step" in errors[0] and "consolidate_state_dict()" in errors[0]


def _scaled(group: Group, unscales: bool) -> tuple[list[float], int, dict[str, Tensor]]:
    """Scales after two steps, the second of which overflows on one rank, and the weights."""
    model, optimizer = build("O2")
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scales = []
    for step in range(2):
        optimizer.zero_grad()
        loss = model(torch.arange(32) + step).square().mean()
        scaler.scale(loss * (math.inf if step == 1 and group.rank() == 0 else 1.0)).backward()
        if unscales:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, optimizer.num_skipped_steps, masters(model)


@pytest.mark.parametrize("unscales", [False, True])
def test_grad_scaler_skips_on_all_ranks(ranks: RankPool, unscales: bool) -> None:
    """A power-of-two scale changes no bit, and both ranks have one rank's batch."""
    outcomes = ranks.run(on_default_group, _scaled, unscales, num_ranks=2)
    for scales, num_skipped, weights in outcomes:
        assert scales == [256.0, 128.0]
        assert num_skipped == 1
        for name, value in weights.items():
            assert torch.equal(value, outcomes[0][2][name]), name


def _joins_late() -> str:
    model, optimizer = build("O2")
    torch.distributed.init_process_group("gloo")
    try:
        model(torch.arange(16)).sum().backward()
        try:
            optimizer.step()
        except OptimizerError as error:
            return str(error)
        return ""
    finally:
        torch.distributed.destroy_process_group()


def test_ranks_that_join_after_initialize_are_an_error(ranks: RankPool) -> None:
    """Each would train on its own data alone."""
    assert ranks.run(_joins_late, num_ranks=1) == [""]
    for message in ranks.run(_joins_late, num_ranks=2):
        assert "2 ranks now" in message and "before initialize" in message


def _unfreezes(group: Group) -> tuple[float, dict[str, Tensor]]:
    """Layers are unfrozen between two steps; each rank has its part of the batch. Returns the norm of the first
    gradients since then, and the weights."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 64))
    model[:2].requires_grad_(False)
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=5e-3), "O1")
    norms = []
    for step in range(4):
        if step == 2:
            model.requires_grad_(True)
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        x = x.chunk(group.size())[group.rank()]
        (model(x) - 1).square().mean().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms[2], masters(model)


def test_layers_are_unfrozen_between_steps(ranks: RankPool) -> None:
    """Clipping sees the mean of their first gradients, so all ranks clip alike and weights stay equal."""
    ((norm, single),) = ranks.run(on_default_group, _unfreezes, num_ranks=1)
    (first, weights), (second, others) = ranks.run(on_default_group, _unfreezes, num_ranks=2)
    assert first == second and abs(first - norm) < 0.1 * norm
    for name, value in weights.items():
        assert torch.equal(value, others[name])
        assert snr_db(value, single[name]) > 25
    torch.manual_seed(0)
    assert not torch.allclose(weights["0.weight"], torch.nn.Linear(64, 64).weight, rtol=0, atol=5e-3)


def _has_two_optimizers(group: Group) -> dict[str, Tensor]:
    """The embedding, a norm and the bias of an FP8 layer are another optimizer's; ranks have different batches."""
    torch.manual_seed(0)
    model = Model()
    others = [model.embedding.weight, *model.norm.parameters(), model.first.bias]
    own = [param for param in model.parameters() if all(param is not other for other in others)]
    user = torch.optim.AdamW(own, lr=5e-3)
    optimizer = build_optimizer(model, user, replace_linears(model, weight=LEVELS["O3"].weight), "O3")
    other = torch.optim.SGD(others, lr=1e-2)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    for step in range(2):
        tokens = torch.randint(0, 50, (32,), generator=torch.Generator().manual_seed(2 * step + group.rank()))
        (wrapped(tokens) - 1).square().mean().backward()
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    with pytest.raises(OptimizerError, match=r"DDP reduces the gradient of norm\.weight already.*before DDP wraps"):
        optimizer.add_param_group({"params": [model.norm.weight]})
    return masters(model)


def test_ddp_reduces_what_another_optimizer_updates(ranks: RankPool) -> None:
    first, second = ranks.run(on_default_group, _has_two_optimizers, num_ranks=2)
    for name, value in first.items():
        assert torch.equal(value, second[name]), f"replicas differ in {name}"


def _calls_collectives(group: Group) -> list[str]:
    """What torch's collectives say of a weight and of its gradient, and what a gather of them has."""
    model, _ = build("O3", seed=1)
    torch.nn.functional.mse_loss(model(torch.arange(16)), torch.zeros(16, 7)).backward()
    weight, grad = model.first.weight, model.first.weight.grad
    assert grad is not None
    for tensor in (weight.detach(), grad):
        gathered = [torch.empty(tensor.shape) for _ in range(2)]
        torch.distributed.all_gather(gathered, tensor)
        assert all(torch.equal(one, tensor.clone()) for one in gathered)
    messages = []
    for tensor in (weight.detach(), grad):
        for call in (torch.distributed.all_reduce, lambda tensor: torch.distributed.broadcast(tensor, 0)):
            with pytest.raises(NotImplementedError) as caught:
                call(tensor)
            messages.append(str(caught.value))
    return messages


def test_collectives_that_would_write_into_a_copy_are_an_error(ranks: RankPool) -> None:
    """They did nothing, in silence, because they were given plain copies."""
    for of_weight, also_of_weight, of_grad, also_of_grad in ranks.run(
        on_default_group, _calls_collectives, num_ranks=2
    ):
        assert all("copy it with p.copy_(…)" in message for message in (of_weight, also_of_weight))
        assert all("p.grad is their mean already" in message for message in (of_grad, also_of_grad))


class Trained(NamedTuple):
    """What a rank has after two steps."""

    losses: list[float]
    values: dict[str, Tensor]
    state: dict[int, dict[str, Tensor]]


def trained(group: Group, pair: int, with_ddp: bool) -> Trained:
    """Two steps of a model that the ranks of `group` share.

    Args:
        pair: chooses weights and data.
    """
    torch.manual_seed(10 * pair + group.rank())  # the group's first rank has the values
    model = Model()
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=5e-3), process_group=group)
    forward: torch.nn.Module = model
    if with_ddp:
        forward = torch.nn.parallel.DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
    losses = []
    for step in range(2):
        generator = torch.Generator().manual_seed(100 * pair + 10 * step + group.rank())
        tokens = torch.randint(50, (4, 8), generator=generator)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(forward(tokens).flatten(0, 1), tokens.flatten() % 7)
        loss.backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        losses.append(loss.item())
    state = optimizer.state_dict()["state"]
    floats = {index: {key: value.float() for key, value in entry.items()} for index, entry in state.items()}
    return Trained(losses, {name: value.float() for name, value in masters(model).items()}, floats)


def trained_in_pairs(group: Group, pairs: list[list[int]], with_ddp: bool) -> Trained:
    """`trained` by each pair of ranks; both pairs at once."""
    groups = [torch.distributed.new_group(members) for members in pairs]
    pair = next(index for index, members in enumerate(pairs) if group.rank() in members)
    return trained(groups[pair], pair, with_ddp)


@pytest.mark.parametrize(
    ("pairs", "with_ddp"),
    [
        ([[0, 1], [2, 3]], False),
        ([[0, 2], [1, 3]], True),
        pytest.param([[3, 0], [2, 1]], False, marks=pytest.mark.slow),
    ],
)
def test_each_group_of_ranks_has_a_model(ranks: RankPool, pairs: list[list[int]], with_ddp: bool) -> None:
    """Two pairs of four ranks train two models as two ranks alone train each, bit for bit."""
    everyones = ranks.run(on_default_group, trained_in_pairs, pairs, with_ddp, num_ranks=4)
    for pair, members in enumerate(pairs):
        alone = ranks.run(on_default_group, trained, pair, with_ddp, num_ranks=2)
        for rank, expected in zip(sorted(members), alone, strict=True):
            assert everyones[rank].losses == expected.losses
            fp8_models.assert_equal(everyones[rank].values, expected.values)
            for index, entry in expected.state.items():
                fp8_models.assert_equal(everyones[rank].state[index], entry)
