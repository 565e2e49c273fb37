"""Accelerate 1.15 runs FP8 models: with its MS-AMP recipe through `msamp`, and without after our own `initialize`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.compat import small_training as small
from tests.harness.ranks import RankError, RankPool, on_default_group

accelerate = pytest.importorskip("accelerate")

import fp8_megatron  # noqa: E402

LEVELS = ["O1", "O2", "O3"]


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps the state of a process in singletons."""
    forget()
    yield
    forget()


def forget() -> None:
    """Make Accelerate start anew."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def accelerator_of(**arguments: Any) -> Any:
    """An accelerator on the CPU; its warnings that this backend is deprecated are known."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return accelerate.Accelerator(cpu=True, **arguments)


def prepare(accelerator: Any, *objects: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return accelerator.prepare(*objects)


def train(accelerator: Any, model: Any, optimizer: Any, scheduler: Any, data: Any, max_norm: float = 1.0) -> list:
    """Accelerate's own loop; the loss of each micro-batch."""
    losses = []
    for tokens, classes in data:
        with accelerator.accumulate(model):
            loss = small.loss_of(model, tokens, classes)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_its_msamp_recipe_is_the_raw_loop(msamp: ModuleType, level: str) -> None:
    model, optimizer = small.build()
    scheduler = decay(optimizer)
    raw_model, raw_optimizer = msamp.initialize(model, optimizer, opt_level=level)
    expected = small.train(raw_model, raw_optimizer, small.batches(12), accumulate=2, max_norm=1.0, scheduler=scheduler)

    recipe = accelerate.utils.MSAMPRecipeKwargs(opt_level=level)
    accelerator = accelerator_of(mixed_precision="fp8", kwargs_handlers=[recipe], gradient_accumulation_steps=2)
    assert accelerator.fp8_backend == "MSAMP"
    model, optimizer = small.build()
    model, optimizer, scheduler = prepare(accelerator, model, optimizer, decay(optimizer))
    assert isinstance(optimizer.optimizer, fp8_megatron.FP8Optimizer)
    losses = train(accelerator, model, optimizer, scheduler, small.batches(12))
    assert losses == expected
    assert sum(losses[-3:]) < 0.95 * sum(losses[:3])
    for name, value in small.weights_of(raw_model).items():
        assert torch.equal(value, accelerator.unwrap_model(model).state_dict()[name]), name


def test_its_msamp_recipe_leaves_gradients_unscaled(msamp: ModuleType) -> None:
    """Accelerate's scaler would multiply the loss, and nobody would divide: norms would be 65,536 times too large."""
    accelerator = accelerator_of(mixed_precision="fp8", kwargs_handlers=[accelerate.utils.MSAMPRecipeKwargs()])
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    model, _ = prepare(accelerator, *small.build())
    tokens, classes = next(small.batches(1))
    accelerator.backward(small.loss_of(model, tokens, classes))
    norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)

    raw_model, _ = msamp.initialize(*small.build(), opt_level="O2")
    with torch.autocast("cpu", torch.bfloat16):
        loss = small.loss_of(raw_model, tokens, classes)
    loss.backward()
    assert norm.item() == torch.nn.utils.clip_grad_norm_(raw_model.parameters(), 1e9).item()


@pytest.mark.parametrize("level", LEVELS)
def test_without_msamp_it_is_the_raw_loop(level: str) -> None:
    """accumulate, clip and a scheduler, after `fp8_megatron.initialize`."""
    raw_model, raw_optimizer = fp8_megatron.initialize(*small.build(), opt_level=level)
    expected = small.train(
        raw_model, raw_optimizer, small.batches(12), accumulate=2, max_norm=1.0, scheduler=decay(raw_optimizer)
    )
    accelerator = accelerator_of(mixed_precision="bf16", gradient_accumulation_steps=2)
    model, optimizer = fp8_megatron.initialize(*small.build(), opt_level=level)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, decay(optimizer))
    assert train(accelerator, model, optimizer, scheduler, small.batches(12)) == expected


@pytest.mark.parametrize("level", LEVELS)
def test_save_state_continues_bit_for_bit(level: str, tmp_path: Path) -> None:
    def start() -> tuple[Any, Any, Any, Any]:
        forget()
        accelerator = accelerator_of(mixed_precision="bf16")
        model, optimizer = fp8_megatron.initialize(*small.build(), opt_level=level)
        return accelerator, *accelerator.prepare(model, optimizer, decay(optimizer))

    accelerator, model, optimizer, scheduler = start()
    train(accelerator, model, optimizer, scheduler, small.batches(3))
    accelerator.save_state(str(tmp_path))
    expected = train(accelerator, model, optimizer, scheduler, small.batches(4, seed=5))

    accelerator, model, optimizer, scheduler = start()
    accelerator.load_state(str(tmp_path))
    assert train(accelerator, model, optimizer, scheduler, small.batches(4, seed=5)) == expected


def _on_two_ranks(group: Any, level: str, folder: str) -> dict[str, Any]:
    """One rank: Accelerate's loop with a checkpoint in its middle, then the checkpoint's continuation."""
    rank = group.rank()
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]  # Accelerate asks for it
    data = list(small.batches(10, seed=10 + rank))

    def start() -> tuple[Any, Any, Any, Any]:
        forget()
        accelerator = accelerator_of(mixed_precision="bf16", gradient_accumulation_steps=2)
        assert accelerator.num_processes == 2
        model, optimizer = fp8_megatron.initialize(*small.build(seed=1 + rank), opt_level=level)
        return accelerator, *accelerator.prepare(model, optimizer, decay(optimizer))

    accelerator, model, optimizer, scheduler = start()
    losses = train(accelerator, model, optimizer, scheduler, iter(data[:6]))
    accelerator.save_state(folder)
    losses += train(accelerator, model, optimizer, scheduler, iter(data[6:]))
    weights = small.weights_of(accelerator.unwrap_model(model))

    accelerator, model, optimizer, scheduler = start()
    accelerator.load_state(folder)
    resumed = train(accelerator, model, optimizer, scheduler, iter(data[6:]))
    forget()
    return {"losses": losses, "resumed": resumed, "weights": weights}


def _raw_on_two_ranks(group: Any, level: str) -> dict[str, Any]:
    """One rank: the plain loop over torch's DDP, which Accelerate's `prepare` wraps around the model."""
    model, optimizer = fp8_megatron.initialize(*small.build(seed=1 + group.rank()), opt_level=level)
    data = small.batches(10, seed=10 + group.rank())
    # Accelerate's scheduler steps once a process.
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    losses = small.train(wrapped, optimizer, data, accumulate=2, max_norm=1.0, scheduler=scheduler)
    return {"losses": losses, "weights": small.weights_of(model)}


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_two_processes(ranks: RankPool, level: str, tmp_path: Path) -> None:
    """Weights start as rank 0's and stay equal; losses are the plain loop's; a checkpoint continues bit for bit."""
    results = ranks.run(on_default_group, _on_two_ranks, level, str(tmp_path), num_ranks=2)
    raw = ranks.run(on_default_group, _raw_on_two_ranks, level, num_ranks=2)
    for result, expected in zip(results, raw, strict=True):
        assert result["losses"] == expected["losses"]
        assert result["resumed"] == result["losses"][6:]
    for name, value in results[0]["weights"].items():
        assert torch.equal(value, results[1]["weights"][name]), name
        assert torch.equal(value, raw[0]["weights"][name]), name


def _sharded_loop(group: Any, order: str, folder: str) -> dict[str, Any]:
    """A loop under Accelerate's FSDP2 plugin: losses, and those of its second half after a load.

    Accelerate shards on accelerators alone, so its state is told that this is one.
    """
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, fsdp_utils

    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    forget()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="no_wrap", state_dict_type="SHARDED_STATE_DICT"
    )
    accelerator = accelerator_of(mixed_precision="bf16")
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    assert accelerator.is_fsdp2
    model, optimizer = small.build(lr=1e-2)
    if order == "initialize, prepare":
        model, optimizer = fp8_megatron.initialize(model, optimizer, opt_level="O3")
        model, optimizer = prepare(accelerator, model, optimizer)
    else:
        if order == "replace, prepare, initialize":
            fp8_megatron.replace_linears(model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = prepare(accelerator, model, optimizer)
    if order == "replace, prepare, initialize":
        optimizer.optimizer = fp8_megatron.initialize(model, optimizer.optimizer, opt_level="O3")[1]

    def run(data: Any) -> list[float]:
        losses = []
        for tokens, classes in data:
            loss = small.loss_of(model, tokens, classes)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    data = list(small.batches(40, seed=2 + group.rank()))
    losses = run(data[:20])
    fsdp_utils.save_fsdp_model(plugin, accelerator, model, folder)
    fsdp_utils.save_fsdp_optimizer(plugin, accelerator, optimizer.optimizer, model, folder)
    losses += run(data[20:])
    fsdp_utils.load_fsdp_model(plugin, accelerator, model, folder)
    fsdp_utils.load_fsdp_optimizer(plugin, accelerator, optimizer.optimizer, model, folder)
    return {"losses": losses, "resumed": run(data[20:]), "num_params": len(set(optimizer.param_groups[0]["params"]))}


def test_its_fsdp2_shards_fp8_weights(ranks: RankPool, tmp_path: Path) -> None:
    """All weights are updated, losses are BF16's, and a loaded state continues bit for bit."""
    results = {}
    for order in ("prepare", "replace, prepare, initialize"):
        results[order] = ranks.run(on_default_group, _sharded_loop, order, str(tmp_path / order), num_ranks=2)
    for plain, fp8 in zip(*results.values(), strict=True):
        assert fp8["num_params"] == plain["num_params"] == 7
        assert fp8["resumed"] == fp8["losses"][20:]
        assert sum(fp8["losses"]) == pytest.approx(sum(plain["losses"]), rel=0.02)


def test_its_fsdp2_behind_initialize_is_an_error(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="since initialize: first replace_linears, then fully_shard"):
        ranks.run(on_default_group, _sharded_loop, "initialize, prepare", str(tmp_path), num_ranks=2)
