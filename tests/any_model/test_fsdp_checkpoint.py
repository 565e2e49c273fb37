"""torch.distributed.checkpoint of an FP8 model under fully_shard: a run resumes bit for bit, on other ranks too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, async_save, load, save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import fp8_megatron
from fp8_megatron.any_model import replace_linears
from fp8_megatron.any_model.optimizer import FP8Optimizer
from fp8_megatron.quantization.amax_history import AmaxHistory
from tests.any_model.test_fsdp_optimizer import build, train_step, whole_weights
from tests.harness.fp8_models import cpu_mesh, shard
from tests.harness.ranks import RankPool, on_default_group

Group = torch.distributed.ProcessGroup


def train_and_save(
    group: Group, folder: str, opt_level: str, dtype: torch.dtype, flattens: bool
) -> tuple[list[float], dict[str, Tensor]]:
    """Three steps, a checkpoint that is written during three more: their losses and the weights at the end."""
    model, optimizer = build(opt_level, dtype)
    for step in range(3):
        train_step(model, optimizer, step)
    options = StateDictOptions(flatten_optimizer_state_dict=flattens)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    state = {"model": model_state, "optimizer": optimizer_state}
    if flattens:
        save(state, checkpoint_id=folder)
        return [train_step(model, optimizer, step) for step in range(3, 6)], whole_weights(model)
    saving = async_save(state, checkpoint_id=folder, process_group=torch.distributed.new_group())
    losses = [train_step(model, optimizer, step) for step in range(3, 6)]
    saving.result()
    return losses, whole_weights(model)


def resume(
    group: Group, folder: str, opt_level: str, dtype: torch.dtype, flattens: bool
) -> tuple[list[float], dict[str, Tensor]]:
    """The same three steps from the checkpoint, in a model with other values."""
    model, optimizer = build(opt_level, dtype)
    train_step(model, optimizer, 7)
    options = StateDictOptions(flatten_optimizer_state_dict=flattens)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    state = {"model": model_state, "optimizer": optimizer_state}
    load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options
    )
    return [train_step(model, optimizer, step) for step in range(3, 6)], whole_weights(model)


@pytest.mark.parametrize(
    "opt_level, dtype, saved_by, resumed_by, flattens",
    [
        ("O3", torch.bfloat16, 2, 2, True),
        ("O3", torch.bfloat16, 2, 4, False),
        ("O3", torch.bfloat16, 2, 1, False),
        ("O2", torch.bfloat16, 2, 2, False),
        ("O3", torch.float32, 4, 4, False),
    ],
)
def test_resumes_bit_for_bit(
    ranks: RankPool, tmp_path: Path, opt_level: str, dtype: torch.dtype, saved_by: int, resumed_by: int, flattens: bool
) -> None:
    """The embedding and the head have uneven rows on four ranks. In FP32 they are their own masters."""
    args = (str(tmp_path), opt_level, dtype, flattens)
    losses, weights = ranks.run(on_default_group, train_and_save, *args, num_ranks=saved_by)[0]
    for resumed, resumed_weights in ranks.run(on_default_group, resume, *args, num_ranks=resumed_by):
        assert resumed == losses
        assert all(torch.equal(resumed_weights[name], weight) for name, weight in weights.items())


def saved_values(model: torch.nn.Module, optimizer: FP8Optimizer) -> dict[str, Tensor]:
    """The model's state and that of the linear weight, in FP32."""
    found = {**optimizer.state_dict()["state"][2], **model.state_dict()}
    return {key: (value.to_local() if isinstance(value, DTensor) else value).float() for key, value in found.items()}


def save_sharded(group: Group, folder: str) -> dict[str, Tensor]:
    model, optimizer, _ = delayed_model(group)
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    return saved_values(model, optimizer)


def resume_alone(group: Group, folder: str) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 64))
    model, optimizer = fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters()), "O3")
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    load(state, checkpoint_id=folder, planner=DefaultLoadPlanner(allow_partial_load=True))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return saved_values(model, optimizer)


def test_a_model_that_is_not_sharded_loads_one_that_is(ranks: RankPool, tmp_path: Path) -> None:
    (expected,) = ranks.run(on_default_group, save_sharded, str(tmp_path), num_ranks=1)
    (loaded,) = ranks.run(on_default_group, resume_alone, str(tmp_path), num_ranks=1)
    for name in ("step", "exp_avg_payload", "exp_avg_scale", "master_weight_payload", "0.weight", "1.weight"):
        assert torch.equal(loaded[name], expected[name]), name


def whole_state(group: Group) -> Any:
    """A gathered state dict, loaded into a second optimizer; dtypes and shapes of an FP8 layer's entry.

    Level O1, because gloo gathers no FP8.
    """
    model, optimizer = build("O1", torch.bfloat16)
    other, other_optimizer = build("O1", torch.bfloat16)
    for step in range(2):
        train_step(model, optimizer, step)
    options = StateDictOptions(full_state_dict=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    states = [model_state, optimizer_state]
    torch.distributed.broadcast_object_list(states, src=0)  # rank 0 alone gathered them
    set_state_dict(other, other_optimizer, model_state_dict=states[0], optim_state_dict=states[1], options=options)
    entries = optimizer.state_dict()["state"].values()
    entry = next(entry for entry in entries if entry["exp_avg"].shape == (128, 64))
    assert all(isinstance(value, DTensor) for key, value in entry.items() if key != "step")
    losses = [train_step(model, optimizer, 2), train_step(model, optimizer, 3)]
    assert [train_step(other, other_optimizer, 2), train_step(other, other_optimizer, 3)] == losses
    return {key: (value.dtype, tuple(value.shape)) for key, value in entry.items()}


def test_a_gathered_state_dict_loads(ranks: RankPool) -> None:
    for entry in ranks.run(on_default_group, whole_state, num_ranks=2):
        assert entry["exp_avg"] == (torch.float32, (128, 64))
        assert entry["master_weight_payload"] == (torch.float16, (128, 64))
        assert entry["master_weight_scale"] == (torch.float32, (32,))


def delayed_model(
    group: Group, mesh: DeviceMesh | None = None
) -> tuple[torch.nn.Sequential, FP8Optimizer, AmaxHistory]:
    """The first parameter is a norm's: no whole blocks of it lie on a rank."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 64))
    replace_linears(model, recipe="delayed")
    shard(model, mesh=mesh or cpu_mesh())
    model, optimizer = fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters()), "O3")
    history = model[1].quantizers.input.history
    assert isinstance(history, AmaxHistory)
    return model, optimizer, history


def delayed_step(model: torch.nn.Module, optimizer: FP8Optimizer, step: int, rank: int, factor: float = 1.0) -> float:
    """A step on a batch of this rank's own."""
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * step + rank))
    loss = (model(x) - 0.5).square().mean() * factor
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def delayed_run_resumes(group: Group, folder: str, is_old: bool) -> None:
    model, optimizer, _ = delayed_model(group)
    for step in range(3):
        delayed_step(model, optimizer, step, group.rank())
    model_state, optimizer_state = get_state_dict(model, optimizer)
    for entry in optimizer_state["state"].values() if is_old else ():
        entry.pop("delayed_0_known", None)
        entry.pop("delayed_0_streak", None)
    save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    losses = [delayed_step(model, optimizer, step, group.rank()) for step in range(3, 6)]
    other, other_optimizer, _ = delayed_model(group)
    state = dict(zip(("model", "optimizer"), get_state_dict(other, other_optimizer), strict=True))
    load(state, checkpoint_id=folder, planner=DefaultLoadPlanner(allow_partial_load=is_old))
    set_state_dict(other, other_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert [delayed_step(other, other_optimizer, step, group.rank()) for step in range(3, 6)] == losses
    assert all(map(torch.equal, whole_weights(other).values(), whole_weights(model).values()))


@pytest.mark.parametrize("is_old", [False, True])
def test_delayed_scales_of_ranks_with_other_batches_resume(ranks: RankPool, tmp_path: Path, is_old: bool) -> None:
    """A checkpoint has the scales of one rank. Those of earlier versions lack what the planner may leave out."""
    ranks.run(on_default_group, delayed_run_resumes, str(tmp_path), is_old, num_ranks=2)


def frozen_model(group: Group) -> tuple[torch.nn.Module, FP8Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
    model[0].requires_grad_(False)
    replace_linears(model)
    shard(model)
    return fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters()), "O3")


def save_frozen(group: Group, folder: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model, _ = frozen_model(group)
    save(model.state_dict(), checkpoint_id=folder)
    return whole_weights(model)


def load_frozen(group: Group, folder: str) -> dict[str, Tensor]:
    torch.manual_seed(1)
    model, _ = frozen_model(group)
    state = model.state_dict()
    load(state, checkpoint_id=folder)
    model.load_state_dict(state)
    return whole_weights(model)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_frozen_weight_is_restored(ranks: RankPool, tmp_path: Path, num_ranks: int) -> None:
    saved = ranks.run(on_default_group, save_frozen, str(tmp_path), num_ranks=2)[0]
    for loaded in ranks.run(on_default_group, load_frozen, str(tmp_path), num_ranks=num_ranks):
        assert torch.equal(loaded["0.weight"], saved["0.weight"])


def one_replica_clamps(group: Group) -> tuple[int, dict[str, Tensor], Tensor]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model, optimizer, history = delayed_model(group, mesh)
    for step in range(4):
        delayed_step(model, optimizer, step, group.rank(), 1e4 if (step, group.rank()) == (2, 1) else 1.0)
    assert history.scale is not None
    return optimizer.num_skipped_steps, whole_weights(model), history.scale


def test_replicas_of_hsdp_skip_the_same_steps(ranks: RankPool) -> None:
    """A cast of one replica clamps its gradients. They are finite, so only that replica sees it."""
    (skipped, weights, scale), (others, other_weights, other_scale) = ranks.run(
        on_default_group, one_replica_clamps, num_ranks=2
    )
    assert skipped == others == 1
    assert torch.equal(scale, other_scale)
    assert all(map(torch.equal, weights.values(), other_weights.values()))
