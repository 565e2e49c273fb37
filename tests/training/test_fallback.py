"""Layers that leave delayed scaling in mid-run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8_megatron.quantization.amax_history import AmaxHistory
from tests.harness.fields import differing_fields
from tests.harness.ranks import RankPool
from tests.training.test_cast_sampling import BLOCKS, losses, samples, train

FLAGS: dict[str, Any] = {
    "fp8_recipe": "delayed",
    "fp8_lm_head": True,
    "train_iters": 8,
    "fp8_health_interval": 0,
    **BLOCKS,
}


def fallbacks(folder: Path) -> list[tuple[int, list[str]]]:
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [(line["iteration"], line["layers"]) for line in events if line["kind"] == "fallback"]


@pytest.mark.parametrize("model", [{}, {"num_experts": 4, "moe_ffn_hidden_size": 128}], ids=["dense", "experts"])
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_a_run_that_falls_back_is_one_that_was_resumed_with_the_recipe(
    tmp_path: Path, recipe: str, model: dict[str, Any]
) -> None:
    """Step for step, bit for bit; and it goes on as it was when it is resumed behind that."""
    save = {"save": str(tmp_path / "save"), "save_interval": 1}
    falls = {"fp8_fallback_recipe": recipe, "fp8_fallback_iter": 4, "hidden_size": 128, **model}
    train(tmp_path / "straight", **{**FLAGS, **falls, **save})
    load = {"load": str(tmp_path / "save")}
    train(tmp_path / "other", **{**FLAGS, **model, "fp8_recipe": recipe, "hidden_size": 128}, **load, ckpt_step=3)
    assert losses(tmp_path / "straight")[3:] == losses(tmp_path / "other")
    watched = {**falls, "fp8_fallback_iter": None, "fp8_fallback_underflow": 0.9, "fp8_health_interval": 9}
    train(tmp_path / "resumed", **{**FLAGS, **watched}, **load, ckpt_step=5)
    assert losses(tmp_path / "straight")[5:] == losses(tmp_path / "resumed")
    layers = ["decoder.layers.0", "decoder.layers.1", "output_layer"]
    assert fallbacks(tmp_path / "straight") == [(4, layers)] and fallbacks(tmp_path / "resumed") == [(5, layers)]


def test_a_run_that_ends_behind_a_sample_goes_on_as_one_that_did_not_end(tmp_path: Path) -> None:
    """Layers leave before the next step, in a run that has nothing else to wait for there."""
    watched = {"fp8_fallback_recipe": "tensorwise", "fp8_fallback_underflow": 0.0, "fp8_health_interval": 2}
    flags = {**FLAGS, **watched, "train_iters": 4}
    train(tmp_path / "straight", **flags)
    train(tmp_path / "first", **flags, save=str(tmp_path / "save"), exit_interval=2)
    train(tmp_path / "then", **flags, load=str(tmp_path / "save"))
    assert fallbacks(tmp_path / "straight") == fallbacks(tmp_path / "first")
    assert losses(tmp_path / "straight") == losses(tmp_path / "first") + losses(tmp_path / "then")


def _train_on_ranks(folder: str, flags: dict[str, Any]) -> None:
    train(Path(folder), **flags)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"tensor_model_parallel_size": 2, "sequence_parallel": True}, marks=pytest.mark.slow),
        {"pipeline_model_parallel_size": 2, "global_batch_size": 4},
        pytest.param({"micro_batch_size": 1}, marks=pytest.mark.slow),
    ],
    ids=["tensor parallel", "pipeline", "replicas"],
)
def test_the_watch_changes_the_same_layers_on_all_ranks(
    tmp_path: Path, ranks: RankPool, layout: dict[str, Any]
) -> None:
    """The first sample of a layer is above a bound of 0, the head's perhaps later; the next one has the other recipe's
    formats."""
    flags = {**FLAGS, "fp8_fallback_recipe": "blockwise", "fp8_fallback_underflow": 0.0, "fp8_health_interval": 3}
    save = {"save": str(tmp_path / "save"), "save_interval": 5}
    ranks.run(_train_on_ranks, str(tmp_path), {**flags, **layout, **save}, num_ranks=2)
    (iteration, layers), *later = fallbacks(tmp_path)
    assert iteration == 3 and layers[:2] == ["decoder.layers.0", "decoder.layers.1"]
    assert [layer for _, left in later for layer in left] in ([], ["output_layer"])
    first, second = (
        {
            (layer, role): format
            for layer, role, format in zip(*(line[key] for key in ("layers", "roles", "formats")), strict=True)
        }
        for line in samples(tmp_path)
    )
    grad = ("decoder.layers.1.mlp.linear_fc1", "grad_output")
    assert (first[grad], second[grad]) == ("E5M2", "E4M3")
    resumed = {**flags, **layout, "load": str(tmp_path / "save"), "ckpt_step": 5}
    ranks.run(_train_on_ranks, str(tmp_path / "resumed"), resumed, num_ranks=2)
    assert fallbacks(tmp_path / "resumed") == [(5, layers), *later]
    assert losses(tmp_path)[5:] == losses(tmp_path / "resumed")


def test_slots_that_were_left_begin_again_as_cold_ones() -> None:
    """Where a run is resumed with delayed scales for them; nobody waits for them in the run that left them."""

    def new() -> AmaxHistory:
        history = AmaxHistory(4, "max", power_of_two=False)
        for _ in range(3):
            history.add_slot(torch.float8_e4m3fn)
        history.allocate(torch.device("cpu"))
        return history

    left, resumed = new(), new()
    for amaxes in ([2.0, 3.0, 0.0], [2.0, 3.0, 0.0]):
        left.raise_amax(2, torch.zeros(1))
        left.amax.copy_(torch.tensor(amaxes))
        left.update(None)
    assert left.has_cold_casts
    left.leave([1, 2])
    assert not left.has_cold_casts
    resumed.load_state_dict({name: value.clone() for name, value in left.state_dict().items()})
    assert resumed.left == {1, 2} and [resumed.knows(slot) for slot in range(3)] == [True, False, False]
    assert resumed.scale is not None and resumed.scale[1].isinf() and resumed.scale[0] == 2.0 / 448.0
    again = new()
    again.load_state_dict({name: value.clone() for name, value in resumed.state_dict().items()})
    assert differing_fields(again, resumed, ignored=frozenset({"ended"})) == []
