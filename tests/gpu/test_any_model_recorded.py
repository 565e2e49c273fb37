"""`fp8_megatron.record_step` on a GPU: a recorded loop has the loop's bits, does not wait, and frees its memory."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fp8_megatron
from fp8_megatron.any_model.recorded_step import RecordedStep, RecordingError

pytestmark = pytest.mark.gpu

WIDTH = 256


class Block(torch.nn.Module):
    """Attention and an MLP, recomputed in backward if `recomputes`."""

    def __init__(self, dropout: float = 0.0, recomputes: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.norm, self.norm2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv, self.proj = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)
        self.dropout, self.recomputes = torch.nn.Dropout(dropout), recomputes

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputes is not None and torch.is_grad_enabled():
            return checkpoint(self._forward, x, **self.recomputes)  # type: ignore[no-any-return]
        return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        mixed = torch.softmax(q @ k.transpose(-1, -2) / 8, dim=-1) @ v
        x = x + self.dropout(self.proj(mixed.transpose(1, 2).flatten(2)))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))


class Net(torch.nn.Module):
    """A small language model."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(512, WIDTH)
        self.blocks = torch.nn.ModuleList(Block(**settings) for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, 512)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def build(level: str | None, recipe: str = "tensorwise", dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    torch.manual_seed(0)
    model: torch.nn.Module = Net(**settings).cuda().to(dtype)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if level is not None:
        model, optimizer = fp8_megatron.initialize(model, optimizer, opt_level=level, recipe=recipe)  # type: ignore[arg-type]
    return model, optimizer


def loss_of(forward: Callable[[Tensor], Tensor], scaler: Any = None, dtype: torch.dtype = torch.bfloat16) -> Any:
    def compute(tokens: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype):
            logits = forward(tokens)
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        (loss if scaler is None else scaler.scale(loss)).backward()
        return loss

    return compute


def batch(seed: int, rows: int = 4) -> Tensor:
    """Growing sequences of tokens, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    start, step = (
        torch.randint(512, (rows, 1), generator=generator),
        torch.randint(1, 4, (rows, 1), generator=generator),
    )
    return (start + step * torch.arange(64)) % 512


def train(
    step: Callable[[Tensor], Tensor],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int = 8,
    micro_batches: int = 1,
    set_to_none: bool = True,
    scaler: Any = None,
    rows: int = 4,
) -> list[Tensor]:
    found = []
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.3, total_iters=steps)
    for index in range(steps):
        for part in range(micro_batches):
            found.append(step(batch(index * micro_batches + part, rows).cuda()).detach())
        if scaler is None:
            found.append(fp8_megatron.clip_grad_norm_(model, 1.0))
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        schedule.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return [*found, *model.state_dict().values()]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(one, other), (index, one, other)


def compare(level: str | None, recipe: str = "tensorwise", compiles: bool = False, loop: Any = None, **settings: Any):  # type: ignore[no-untyped-def]
    """The loop, and the loop with recorded steps, from the same seeds."""
    found = []
    for is_recorded in (False, True):
        torch._dynamo.reset()
        model, optimizer = build(level, recipe, **settings)
        step = loss_of(torch.compile(model) if compiles else model)
        if is_recorded:
            step = fp8_megatron.record_step(step, model)
        torch.manual_seed(5)
        found.append(train(step, model, optimizer, **(loop or {})))
        if is_recorded:
            assert isinstance(step, RecordedStep) and step.num_recordings >= 1
    assert_same(found[1], found[0])
    return step


@pytest.fixture(autouse=True)
def deterministic() -> Any:
    """The embedding's gradient is a sum in any order otherwise."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.set_sync_debug_mode("default")


PLAIN, ADDED, ZEROED = {}, {"micro_batches": 2}, {"micro_batches": 2, "set_to_none": False}
CASES = [(level, recipe, ADDED) for level in ("O1", "O2", "O3") for recipe in ("tensorwise", "delayed")]
CASES += [("O1", "tensorwise", PLAIN), ("O2", "delayed", PLAIN), ("O3", "delayed", PLAIN), ("O3", "blockwise", PLAIN)]
CASES += [(None, "", PLAIN), (None, "", ADDED), (None, "", ZEROED), ("O3", "delayed", ZEROED)]


@pytest.mark.parametrize(("level", "recipe", "loop"), CASES, ids=str)
def test_a_recorded_loop_has_the_bits_of_the_loop(level: str | None, recipe: str, loop: dict[str, Any]) -> None:
    compare(level, recipe, loop=loop)


def test_16_bit_parameters() -> None:
    compare("O2", dtype=torch.bfloat16, loop=ADDED)


@pytest.mark.parametrize("level", [None, "O3"])
def test_dropout_draws_the_same_numbers(level: str | None) -> None:
    compare(level, dropout=0.2)


@pytest.mark.parametrize(("level", "reentrant"), [(None, False), ("O2", False), ("O3", True)])
def test_checkpoints(level: str | None, reentrant: bool) -> None:
    compare(level, "tensorwise", recomputes={"use_reentrant": reentrant, "preserve_rng_state": False})


def test_checkpoints_that_save_random_numbers_say_what_to_change() -> None:
    model, optimizer = build("O3", recomputes={"use_reentrant": False})
    step = fp8_megatron.record_step(loss_of(model), model)
    with pytest.raises(RecordingError, match="preserve_rng_state=False"):
        train(step, model, optimizer)


@pytest.mark.parametrize(("level", "recipe"), [(None, ""), ("O2", "tensorwise"), ("O3", "delayed")])
def test_compiled_models(level: str | None, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if hasattr(torch._inductor.config, "deterministic"):  # both compilations choose the same kernels
        monkeypatch.setattr(torch._inductor.config, "deterministic", True)
    compare(level, recipe, compiles=True, loop=ADDED)


def test_grad_scaler() -> None:
    found = []
    for is_recorded in (False, True):
        model, optimizer = build("O2")
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**12, growth_interval=3)
        step = loss_of(model, scaler, torch.float16)
        if is_recorded:
            step = fp8_megatron.record_step(step, model)
        found.append(train(step, model, optimizer, scaler=scaler))
        assert scaler.get_scale() == 2.0**14
    assert_same(found[1], found[0])


def test_autocast_around_the_step() -> None:
    """Its cache of cast weights must not become the recording's weights."""
    found = []
    for is_recorded in (False, True):
        model, optimizer = build(None)
        step = loss_of(model)
        if is_recorded:
            step = fp8_megatron.record_step(step, model)

        def outside(tokens: Tensor, step: Any = step) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                return step(tokens)  # type: ignore[no-any-return]

        found.append(train(outside, model, optimizer))
    assert_same(found[1], found[0])


@pytest.mark.parametrize("level", [None, "O3"])
def test_other_shapes_in_turn(level: str | None) -> None:
    found = []
    for is_recorded in (False, True):
        model, optimizer = build(level, "delayed")
        step = loss_of(model)
        if is_recorded:
            step = fp8_megatron.record_step(step, model)
        losses = []
        for index in range(36):
            losses.append(step(batch(index, rows=(4, 8, 2)[index % 3]).cuda()).detach())
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()
        found.append([*losses, *model.state_dict().values()])
    assert isinstance(step, RecordedStep) and step.num_recordings == 6
    assert_same(found[1], found[0])


def test_a_state_loaded_between_launches() -> None:
    model, optimizer = build("O2", "delayed")
    step = fp8_megatron.record_step(loss_of(model), model)
    train(step, model, optimizer, steps=5)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    state = optimizer.state_dict()
    state = torch.utils._pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, state)
    expected = train(step, model, optimizer, steps=4)
    model.load_state_dict(saved)
    optimizer.load_state_dict(state)
    assert_same(train(step, model, optimizer, steps=4), expected)


@pytest.mark.parametrize(
    ("level", "recipe"), [(None, ""), ("O1", "delayed"), ("O2", "tensorwise"), ("O3", "delayed")], ids=str
)
def test_nothing_waits_for_the_device(level: str | None, recipe: str) -> None:
    model, optimizer = build(level, recipe)
    step = fp8_megatron.record_step(loss_of(model), model)
    batches = [batch(seed).pin_memory() for seed in range(12)]
    for index in range(12):
        if index == 10:
            assert step.num_recordings == 2
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        step(batches[index])
        if index % 2:
            fp8_megatron.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("on_error", ["raise", "warn"])
@pytest.mark.parametrize("is_seen", [True, False], ids=["item", "synchronize"])
def test_a_step_that_waits(on_error: Any, is_seen: bool, caplog: pytest.LogCaptureFixture) -> None:
    """torch sees .item() before the recording; synchronize() breaks it. Random numbers go on all the same."""

    def build_waiting() -> Any:
        model, optimizer = build("O3", dropout=0.2)
        inner = loss_of(model)

        def compute(tokens: Tensor) -> Tensor:
            loss: Tensor = inner(tokens)
            if is_seen:
                return loss * 1.0 if loss.item() > 0 else loss
            torch.cuda.synchronize()
            return loss

        torch.manual_seed(5)
        return compute, model, optimizer

    expected = train(*build_waiting())
    compute, model, optimizer = build_waiting()
    step = fp8_megatron.record_step(compute, model, on_error=on_error)
    if on_error == "raise":
        with pytest.raises(RecordingError, match=r"test_any_model_recorded.py:\d+ \(.item" if is_seen else r"\(.item"):
            train(step, model, optimizer)
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        return
    with caplog.at_level(logging.WARNING):
        assert_same(train(step, model, optimizer), expected)
    assert len([record for record in caplog.records if "on_error" in record.message]) == 1


def test_the_optimizer_stays_outside() -> None:
    model, optimizer = build("O3")
    inner = loss_of(model)

    def compute(tokens: Tensor) -> Tensor:
        loss: Tensor = inner(tokens)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = fp8_megatron.record_step(compute, model)
    with pytest.raises(RecordingError, match="inside a recorded step"):
        for index in range(6):
            step(batch(index))


@pytest.mark.parametrize("level", [None, "O3"])
def test_memory_is_released(level: str | None) -> None:
    """Whatever way it goes. The workspaces of GEMMs on the recorders' stream stay."""

    def reserved() -> int:
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    def held() -> str:
        """The segments: pool, stream, bytes, and bytes of tensors."""
        keys = ("segment_pool_id", "stream", "total_size", "allocated_size")
        return "; ".join(str([segment.get(key) for key in keys]) for segment in torch.cuda.memory_snapshot())

    model, optimizer = build(level)
    train(fp8_megatron.record_step(loss_of(model), model), model, optimizer, steps=2, rows=64)  # unrecorded steps
    before = reserved()
    for way in ("release", "del"):
        step = fp8_megatron.record_step(loss_of(model), model)
        train(step, model, optimizer, rows=64)
        assert step.kept_bytes > 16 << 20
        if way == "release":
            step.release()
            assert step.kept_bytes == 0
            train(step, model, optimizer, steps=5, rows=64)
            assert step.num_recordings == 1
            step.release()
        del step
        assert reserved() <= before + (4 << 20), (way, held())  # torch keeps the random numbers' offset of every graph


@pytest.mark.parametrize("level", [None, "O3"])
@pytest.mark.parametrize("batches", ["tokens", "packed", "padded"])
@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "BertForMaskedLM"])
def test_masks_of_transformers(kind: str, batches: str, level: str | None) -> None:
    """Forward looks at positions and masks and waits for the GPU; in a recording it does not."""
    transformers = pytest.importorskip("transformers")
    if (kind, batches) == ("BertForMaskedLM", "packed"):
        pytest.skip("positions of a model without a causal mask pack nothing")
    torch.manual_seed(0)
    if kind == "GPT2LMHeadModel":
        shape = {"n_positions": 64, "n_embd": 128, "n_layer": 2, "n_head": 2, "vocab_size": 512, "use_cache": False}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        plain: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **dropout)).cuda()
    else:
        shape = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config = transformers.BertConfig(**shape, **dropout, vocab_size=512, max_position_embeddings=64)
        plain = transformers.BertForMaskedLM(config).cuda()

    def of(seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        made = {"input_ids": torch.randint(512, (4, 64), generator=generator)}
        place = torch.arange(64).expand(4, -1)
        border = torch.randint(16, 48, (4, 1), generator=generator)
        if batches == "packed":
            made["position_ids"] = torch.where(place < border, place, place - border)
        elif batches == "padded":
            made["attention_mask"] = (place < border).long()
        return {name: tensor.cuda() for name, tensor in made.items()}

    losses = []
    for is_recorded in (False, True):
        model = copy.deepcopy(plain)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if level is not None:
            model, optimizer = fp8_megatron.initialize(model, optimizer, opt_level=level)

        def compute(each: dict[str, Tensor], model: Any = model) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                loss: Tensor = model(**each, labels=each["input_ids"]).loss
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        step: Any = fp8_megatron.record_step(compute, model) if is_recorded else compute
        found = []
        for seed in range(8):
            found.append(step(of(seed)).detach())
            optimizer.step()
            optimizer.zero_grad()
        losses.append(torch.stack(found))
        assert not is_recorded or step.num_recordings == 1
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-3, atol=0)
