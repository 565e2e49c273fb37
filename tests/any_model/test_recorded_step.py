"""`record_step` where a recording is played by Python: on the CPU, with the memory and the notes of a real one."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

import fp8_megatron
from fp8_megatron.any_model.recorded_step import RecordingError, record_step
from fp8_megatron.errors import UserError
from tests.harness.played_recordings import recorded

LEVELS = [None, "O1", "O2", "O3"]
WIDTH = 32


def build(level: str | None, recipe: str = "tensorwise", dtype: torch.dtype = torch.float32) -> Any:
    """A model with matrices, vectors, an embedding that is used at times and a norm with running statistics."""
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 2 * WIDTH),
        torch.nn.BatchNorm1d(2 * WIDTH),
        torch.nn.GELU(),
        torch.nn.Linear(2 * WIDTH, WIDTH, bias=False),
        torch.nn.LayerNorm(WIDTH),
        torch.nn.Linear(WIDTH, 10),
    ).to(dtype)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if level is not None:
        model, optimizer = fp8_megatron.initialize(model, optimizer, opt_level=level, recipe=recipe)  # type: ignore[arg-type]
    return model, optimizer


def loss_of(model: torch.nn.Module, dtype: torch.dtype = torch.float32) -> Callable[[dict[str, Tensor]], Tensor]:
    def compute(batch: dict[str, Tensor]) -> Tensor:
        loss = torch.nn.functional.cross_entropy(model(batch["x"].to(dtype)).float(), batch["y"])
        loss.backward()
        return loss

    return compute


def batch(seed: int, rows: int = 16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, WIDTH, generator=generator)
    return {"x": x, "y": x[:, :10].argmax(dim=1)}


def train(
    step: Callable[..., Any],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int = 7,
    micro_batches: int = 1,
    set_to_none: bool = True,
    clips: bool = False,
    reads: bool = False,
    batches: Callable[[int], dict[str, Tensor]] = batch,
) -> list[Tensor]:
    """Losses, what was read of gradients, and the parameters at the end."""
    found = []
    for index in range(steps):
        for part in range(micro_batches):
            found.append(step(batches(index * micro_batches + part)).detach())
            if reads:  # settles the gradients between micro-batches
                found.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
        if clips:
            found.append(fp8_megatron.clip_grad_norm_(model, 0.5))
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return [*found, *model.state_dict().values()]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(one, other), index


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@pytest.mark.parametrize(
    "loop",
    [
        {},
        {"micro_batches": 3},
        {"micro_batches": 3, "reads": True},
        {"set_to_none": False, "micro_batches": 2},
        {"clips": True},
    ],
    ids=["plain", "accumulation", "reading", "zeroed", "clipping"],
)
def test_a_recorded_loop_has_the_bits_of_the_loop(level: str | None, recipe: str, loop: dict[str, Any]) -> None:
    model, optimizer = build(level, recipe)
    expected = train(loss_of(model), model, optimizer, **loop)
    model, optimizer = build(level, recipe)
    step, recorder = recorded(loss_of(model), model)
    assert_same(train(step, model, optimizer, **loop), expected)
    # Zeros in torch's own gradients are added to.
    kinds = 1 if loop.get("micro_batches", 1) == 1 or (level is None and "set_to_none" in loop) else 2
    assert step.num_recordings == kinds and recorder.num_launches >= 3 * kinds


def test_storage_that_grows_later_is_recorded_anew() -> None:
    """One gradient a step is stored in FP8; then there are two, and 33 need FP32."""
    found = []
    for is_recorded in (False, True):
        model, optimizer = build("O3")
        step: Any = loss_of(model)
        if is_recorded:
            step, recorder = recorded(step, model)
        figures = train(step, model, optimizer, steps=4)
        figures += train(step, model, optimizer, steps=4, micro_batches=2)
        figures += train(step, model, optimizer, steps=3, micro_batches=35)
        found.append(figures)
        rooms = {space.buffer.most_gradients for space in optimizer._spaces}
        assert max(rooms) == 35
    assert_same(found[1], found[0])
    assert recorder.num_launches > 60 and recorder.num_releases == 2


def test_unused_and_frozen_parameters() -> None:
    """Each has its own state: the second head gets a gradient in some micro-batches alone."""

    class Heads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Linear(WIDTH, WIDTH)
            self.heads = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 16) for _ in range(2))
            self.frozen = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)

        def forward(self, x: Tensor, head: int) -> Tensor:
            return self.heads[head](self.frozen(self.body(x)))

    for level in LEVELS:
        found = []
        for is_recorded in (False, True):
            torch.manual_seed(0)
            model: Any = Heads()
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
            if level is not None:
                model, optimizer = fp8_megatron.initialize(model, optimizer, level)
            names = {name: p for name, p in model.named_parameters()}

            def compute(x: Tensor, head: int, model: Any = model) -> Tensor:
                loss = model(x, head).float().square().mean()
                loss.backward()
                return loss

            step: Any = compute
            if is_recorded:
                step, recorder = recorded(compute, model, warmup_steps=1)
            figures = []
            for index in range(12):
                for head in ((0,), (1,), (0, 1))[index % 3]:
                    figures.append(step(batch(index)["x"], head).detach())
                unused = [name for name, p in names.items() if p.grad is None]
                assert ("heads.1.bias" in unused) == (index % 3 == 0) and "frozen.bias" in unused
                optimizer.step()
                optimizer.zero_grad()
            found.append([*figures, *model.state_dict().values()])
        assert_same(found[1], found[0])
        assert recorder.num_launches >= 6


def test_a_gradient_put_in_the_place_of_another() -> None:
    """The recording adds to the values of whatever tensor p.grad is."""
    found = []
    for is_recorded in (False, True):
        model, optimizer = build(None)
        step: Any = loss_of(model)
        if is_recorded:
            step, recorder = recorded(step, model)
        for index in range(8):
            for part in range(2):
                step(batch(2 * index + part))
                for param in model.parameters():
                    param.grad = param.grad * 0.5
            optimizer.step()
            optimizer.zero_grad()
        found.append([*model.state_dict().values()])
    assert_same(found[1], found[0])
    assert recorder.num_launches > 8


def test_a_state_loaded_between_launches() -> None:
    for level in LEVELS:
        model, optimizer = build(level, "delayed")
        step, recorder = recorded(loss_of(model), model)
        train(step, model, optimizer, steps=5)
        places = [history.scale_of(0).data_ptr() for history in step._histories]
        assert len(places) == (level is not None)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        expected = train(step, model, optimizer, steps=4)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        launches = recorder.num_launches
        assert_same(train(step, model, optimizer, steps=4), expected)
        assert recorder.num_launches == launches + 4 and recorder.num_releases == 0
        assert [history.scale_of(0).data_ptr() for history in step._histories] == places


def test_dropout_draws_on() -> None:
    found = []
    for is_recorded in (False, True):
        model, optimizer = build("O2")
        model.append(torch.nn.Dropout(0.3))
        step: Any = loss_of(model)
        if is_recorded:
            step, _ = recorded(step, model)
        torch.manual_seed(7)
        found.append(train(step, model, optimizer))
    assert_same(found[1], found[0])


def test_grad_scaler_and_schedule() -> None:
    found = []
    for is_recorded in (False, True):
        model, optimizer = build("O2")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=8)

        def compute(batch: dict[str, Tensor], model: Any = model, scaler: Any = scaler) -> Tensor:
            loss = torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])
            scaler.scale(loss).backward()
            return loss

        step: Any = compute
        if is_recorded:
            step, recorder = recorded(step, model)
        figures = []
        for index in range(8):
            figures.append(step(batch(index)).detach())
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            optimizer.zero_grad()
        found.append([*figures, *model.state_dict().values(), torch.tensor(scaler.get_scale())])
    assert_same(found[1], found[0])
    assert found[0][-1] == 2.0**12 and recorder.num_launches == 6


def test_shapes_modes_and_autocast_have_recordings_of_their_own() -> None:
    model, _ = build("O3")
    dtypes = []

    def compute(batch: dict[str, Tensor]) -> Tensor:
        y = model(batch["x"])
        dtypes.append(y.dtype)
        return y

    step, recorder = recorded(compute, model, warmup_steps=1)
    for _ in range(3):
        assert step(batch(0))[0, 0].dtype is torch.float32
        with torch.no_grad():
            recorder.with_grad = False
            step(batch(0))
            recorder.with_grad = True
        with torch.autocast("cpu", torch.bfloat16):
            step(batch(0))
        step(batch(0, rows=8))
    assert step.num_recordings == 4
    launches = recorder.num_launches
    trained = step(batch(1))
    assert recorder.num_launches == launches + 1
    model[1].eval()
    assert not torch.equal(step(batch(1)), trained)
    assert recorder.num_launches == launches + 1 and step.num_recordings == 4  # it runs unrecorded first


def test_kinds_beyond_the_bound_run_unrecorded(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = build("O3")
    step, recorder = recorded(loss_of(model), model, max_recordings=2, warmup_steps=1)
    with caplog.at_level(logging.WARNING):
        for rows in (16, 8, 24, 16, 8, 24, 32):
            step(batch(0, rows))
            optimizer.step()
            optimizer.zero_grad()
    assert step.num_recordings == 2 and recorder.num_launches == 2
    assert [record.message for record in caplog.records if "max_recordings(2)" in record.message] != []
    assert len([record for record in caplog.records if "max_recordings" in record.message]) == 1


Pair = namedtuple("Pair", ["x", "y"])


@dataclass(frozen=True)
class Sample:
    x: Tensor
    scale: float
    names: tuple[str, ...] = ("a",)


def test_batches_are_any_nest_of_tensors_and_constants() -> None:
    model, _ = build(None)
    seen: list[Any] = []

    def compute(pair: Pair, *, sample: Sample, more: UserDict[str, Any]) -> dict[str, Any]:
        seen.append((type(pair), type(sample), type(more)))
        y = (pair.x + sample.x * sample.scale + more["z"]["deep"][0]).sum() * more["times"]
        return {"y": y, "parts": Pair(pair.y * 2, None), "list": [sample.x.sum()]}

    step, recorder = recorded(compute, model, warmup_steps=1)

    def call(seed: float, scale: float = 2.0) -> dict[str, Any]:
        x = torch.full((3,), seed)
        more = UserDict({"z": {"deep": [x * 100]}, "times": 1, "nothing": None})
        return step(Pair(x, x + 1), sample=Sample(x * 10, scale), more=more)  # type: ignore[no-any-return]

    for seed in (1.0, 2.0, 3.0):
        found = call(seed)
        assert float(found["y"]) == 3 * seed * 121 and float(found["list"][0]) == 30 * seed
        assert isinstance(found["parts"], Pair) and torch.equal(found["parts"].x, torch.full((3,), 2 * seed + 2))
    assert recorder.num_launches == 2 and set(seen) == {(Pair, Sample, UserDict)}
    assert float(call(1.0, scale=3.0)["y"]) == 3 * 131 and recorder.num_launches == 2


@pytest.mark.parametrize("on_cpu", [False, True], ids=["recorded", "unrecorded"])
def test_what_cannot_be_recorded_is_named(on_cpu: bool) -> None:
    model, _ = build(None)
    x = torch.randn(4, WIDTH)

    def call(argument: Any, result: Any = None) -> None:
        def compute(argument: Any) -> Any:
            return result

        step = record_step(compute, model) if on_cpu else recorded(compute, model)[0]
        step(argument)

    with pytest.raises(UserError, match=r"the batch\[0\]\[0\]\['more'\]\[1\] is a object"):
        call({"more": [x, object()]})
    with pytest.raises(UserError, match="requires a gradient: detach"):
        call(torch.randn(2, requires_grad=True))
    with pytest.raises(UserError, match=r"SparseTensor|layout torch.sparse_coo"):
        call(torch.eye(3).to_sparse())
    with pytest.raises(UserError, match=r"what the step returns\['loss'\] is a float"):
        call(x, {"loss": 1.0})


def test_arguments_are_checked() -> None:
    model, _ = build(None)
    for settings, words in (
        ({"compute": 3}, "compute is a int"),
        ({"model": print}, "model is a builtin_function_or_method"),
        ({"model": torch.nn.ReLU()}, "no parameters"),
        ({"warmup_steps": 1}, r"warmup_steps\(1\) is less than 2"),
        ({"max_recordings": 0}, r"max_recordings\(0\)"),
        ({"on_error": "ignore"}, r"on_error\('ignore'\)"),
    ):
        with pytest.raises(UserError, match=words):
            record_step(**{"compute": print, "model": model, **settings})  # type: ignore[arg-type]
    model.append(torch.nn.Linear(2, 2, device="meta"))
    with pytest.raises(UserError, match="cpu, meta"):
        record_step(print, model)


def test_models_that_ranks_share_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = build(None)
    with pytest.raises(UserError, match="0 is a DataParallel"):
        record_step(print, torch.nn.Sequential(torch.nn.DataParallel(torch.nn.Linear(4, 4))))
    model[0].weight.main_grad = object()
    with pytest.raises(UserError, match=r"something else than initialize stores the gradient of 0.weight"):
        record_step(print, model)
    del model[0].weight.main_grad
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    with pytest.raises(UserError, match="has 4 ranks"):
        record_step(print, model)


def test_a_cpu_runs_the_loop() -> None:
    model, optimizer = build("O2")
    expected = train(loss_of(model), model, optimizer, micro_batches=2)
    model, optimizer = build("O2")
    step = fp8_megatron.record_step(loss_of(model), model)
    assert_same(train(step, model, optimizer, micro_batches=2), expected)
    assert step.num_recordings == step.kept_bytes == 0
    step.release()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore"),
            r"capturing\. The .*item\(\)",
        ),
        (torch.OutOfMemoryError("CUDA out of memory"), "keeps the memory of its activations"),
    ],
)
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("level", [None, "O3"])
def test_a_recording_that_fails(
    level: str | None, micro_batches: int, error: Exception, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = build(level)
    expected = train(loss_of(model), model, optimizer, micro_batches=micro_batches)
    model, optimizer = build(level)
    step, recorder = recorded(loss_of(model), model, on_error="warn")
    recorder.fails = error
    with caplog.at_level(logging.WARNING):
        assert_same(train(step, model, optimizer, micro_batches=micro_batches), expected)
    assert len(caplog.records) == 1 and recorder.num_launches == 0
    model, optimizer = build(level)
    step, recorder = recorded(loss_of(model), model)
    recorder.fails = error
    with pytest.raises(RecordingError, match=words) as caught:
        train(step, model, optimizer, micro_batches=micro_batches)
    assert caught.value.__cause__ is error and "\n" not in str(caught.value)
    assert all(param.grad is None for param in model.parameters())  # as before the first micro-batch of the step
    recorder.fails = None
    train(step, model, optimizer, micro_batches=micro_batches)
    assert recorder.num_launches > 0


@pytest.mark.parametrize("level", [None, "O3"])
def test_a_step_that_waits_is_found_before_it_is_recorded(level: str | None, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = build(level)
    expected = train(loss_of(model), model, optimizer, micro_batches=2)
    model, optimizer = build(level)
    step, recorder = recorded(loss_of(model), model, on_error="warn")
    recorder.waits_at = "loop.py:12"
    with caplog.at_level(logging.WARNING):
        assert_same(train(step, model, optimizer, micro_batches=2), expected)
    assert ["waits for the GPU at loop.py:12" in record.message for record in caplog.records] == [True]
    model, optimizer = build(level)
    step, recorder = recorded(loss_of(model), model)
    recorder.waits_at = "loop.py:12"
    step(batch(0))
    with pytest.raises(RecordingError, match=r"loop.py:12 \(.item\(\)"):
        train(step, model, optimizer)
    assert recorder.kept_bytes == 0


def test_checkpoints_that_save_random_numbers_are_refused() -> None:
    """Where CUDA runs, `torch.utils.checkpoint` calls this function in both of its forms."""
    model, _ = build(None)

    def compute(x: Tensor) -> Tensor:
        torch.utils.checkpoint.get_device_states(x)
        return x

    before = torch.utils.checkpoint.get_device_states
    step, _ = recorded(compute, model)
    step(torch.ones(2))
    step(torch.ones(2))
    with pytest.raises(RecordingError, match="preserve_rng_state=False"):
        step(torch.ones(2))
    assert torch.utils.checkpoint.get_device_states is before


def test_a_buffer_that_is_replaced_is_an_error() -> None:
    class Counts(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.count = self.count + 1
            return super().forward(x)

    model = Counts(WIDTH, 10)
    model.register_buffer("count", torch.zeros(()))
    step, _ = recorded(loss_of(model), model, warmup_steps=1)
    step(batch(0))
    model.zero_grad()
    with pytest.raises(RecordingError, match="replaces the buffer count"):
        step(batch(1))


def test_weights_that_move_are_recorded_anew() -> None:
    model, optimizer = build(None)
    step, recorder = recorded(loss_of(model), model)
    train(step, model, optimizer, steps=4)
    model[0].weight.data = model[0].weight.data.clone()
    train(step, model, optimizer, steps=2)
    assert recorder.num_releases == 1 and recorder.num_launches == 2
    train(step, model, optimizer, steps=1)
    assert recorder.num_launches == 3


def test_release_and_what_is_left() -> None:
    model, optimizer = build("O3")
    step, recorder = recorded(loss_of(model), model)
    train(step, model, optimizer, steps=4)
    assert step.kept_bytes == 1000 and step.num_recordings == 1
    step.release()
    assert step.kept_bytes == 0 == step.num_recordings
    train(step, model, optimizer, steps=3)
    assert step.num_recordings == 1
    gone = weakref.ref(step)
    recorder.step = None
    del step
    gc.collect()
    assert gone() is None
