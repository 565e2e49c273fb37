"""Sampled casts in runs: which are measured, that losses stay, and that ranks' statistics are those of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fp8_megatron.config.io import parse_config
from fp8_megatron.reporting.cast_statistics import CastName, CastStatistics, HealthSample
from fp8_megatron.reporting.metrics_file import HEALTH_FILE, METRICS_FILE
from fp8_megatron.training.trainer import Trainer
from tests.harness.ranks import RankPool
from tests.harness.runs import tiny_flags

LAYERS = [
    f"decoder.layers.{layer}.{linear}"
    for layer in range(2)
    for linear in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
]
#: Sizes that blocks of 128 fit into, on two ranks.
BLOCKS = {"hidden_size": 256, "seq_length": 128}


def train(folder: Path, **flags: Any) -> None:
    Trainer(
        parse_config(
            tiny_flags(folder, **{"train_iters": 2, "fp8_health_interval": 1, "fp8_recipe": "tensorwise", **flags})
        )
    ).fit()


def samples(folder: Path) -> list[dict[str, Any]]:
    path = folder / HEALTH_FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def losses(folder: Path) -> list[tuple[float, float]]:
    lines = (folder / METRICS_FILE).read_text().splitlines()
    return [(line["loss"], line["grad_norm"]) for line in map(json.loads, lines)]


def keys(sample: dict[str, Any]) -> list[tuple[str, str]]:
    return list(zip(sample["layers"], sample["roles"], strict=True))


@pytest.mark.parametrize(
    "flags",
    [
        {"fp8_recipe": "tensorwise"},
        {"fp8_recipe": "delayed", "fp8_weight_grad_scaling": "delayed", "fp8_lm_head": True},
        {"fp8_recipe": "blockwise", "opt_level": "O2", **BLOCKS},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"global_batch_size": 4},
    ],
    ids=["tensorwise", "delayed", "blockwise", "recomputed", "micro-batches"],
)
def test_every_cast_is_measured_and_losses_stay(tmp_path: Path, flags: dict[str, Any]) -> None:
    """One rounding to E4M3 leaves about 31.5 dB, to E5M2 25.5; saturation under delayed scales costs some of it."""
    train(tmp_path / "sampled", **flags)
    train(tmp_path / "plain", **{**flags, "fp8_health_interval": 0})
    assert losses(tmp_path / "sampled") == losses(tmp_path / "plain") and not samples(tmp_path / "plain")
    found = samples(tmp_path / "sampled")
    assert [sample["iteration"] for sample in found] == [1, 2]
    # Several micro-batches are added in 16 bits on one replica: their gradients are not cast.
    roles = ["input", "weight", "grad_output"] + (["weight_grad"] if "global_batch_size" not in flags else [])
    expected = [(layer, role) for layer in LAYERS for role in roles]
    if flags.get("fp8_lm_head"):
        expected += [("output_layer", role) for role in roles[:3]]
    for sample in found:
        assert keys(sample) == expected
        rows = zip(sample["roles"], sample["formats"], sample["layers"], sample["snr_db"], strict=True)
        for role, format, layer, snr in rows:
            stored = role == "weight" and "opt_level" not in flags and layer != "output_layer"
            lowest = 15.0 if flags.get("fp8_recipe") == "delayed" else 28.0 if format == "E4M3" else 22.0
            assert snr is None if stored else snr > lowest, (layer, role, format, snr)
        assert all(len(exponents) > 3 for exponents in sample["exponents"])
        assert not any(sample["non_finite_values"])


def _train_on_ranks(folder: str, flags: dict[str, Any]) -> None:
    train(Path(folder), **flags)


EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 128}


def casts_of_experts(sample: dict[str, Any]) -> dict[tuple[str, str], tuple[str, float, float, float]]:
    """(layer, role) → format, signal-to-noise ratio, underflow, kurtosis."""
    quantities = (sample[name] for name in ("formats", "snr_db", "underflowed", "kurtosis"))
    found = zip(keys(sample), zip(*quantities, strict=True), strict=True)
    return {key: values for key, values in found if "experts" in key[0]}


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
def test_casts_of_experts_are_measured(tmp_path: Path, recipe: str) -> None:
    """Of tokens, and of what is cast for an expert's rows. Their weights' are not."""
    flags = {**EXPERTS, "fp8_recipe": recipe, **BLOCKS}
    train(tmp_path / "sampled", **flags)
    train(tmp_path / "plain", **{**flags, "fp8_health_interval": 0})
    assert losses(tmp_path / "sampled") == losses(tmp_path / "plain")
    for sample in samples(tmp_path / "sampled"):
        found = casts_of_experts(sample)
        assert list(found) == [
            (f"decoder.layers.{layer}.mlp.experts.{linear}", role)
            for layer in range(2)
            for linear in ("linear_fc1", "linear_fc2")
            for role in ("input", "grad_output")
        ]
        for key, (format, snr, lost, _) in found.items():
            assert snr > (15.0 if recipe == "delayed" else 28.0 if format == "E4M3" else 22.0), (key, format, snr)
            assert lost < 0.01, key


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_casts_of_experts_that_ranks_share(tmp_path: Path, ranks: RankPool, dispatcher: str) -> None:
    """Tokens are measured where they are cast, before they travel: what two ranks measure is what one does, with one
    scale a block. Rows that have no token, of which two ranks have more, do not count."""
    flags = {**EXPERTS, "fp8_recipe": "blockwise", "train_iters": 1, "micro_batch_size": 2, **BLOCKS}
    train(tmp_path / "one", **flags)
    shared = {"micro_batch_size": 1, "expert_model_parallel_size": 2, "moe_token_dispatcher_type": dispatcher}
    ranks.run(_train_on_ranks, str(tmp_path / "two"), {**flags, **shared}, num_ranks=2)
    one, two = (casts_of_experts(*samples(tmp_path / name)) for name in ("one", "two"))
    assert list(one) == list(two)
    for key, (format, snr, _, kurtosis) in one.items():
        if key[1] == "input":
            assert two[key][:2] == (format, pytest.approx(snr, rel=2e-3)), key
        assert two[key][3] == pytest.approx(kurtosis, rel=0.05), key


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"pipeline_model_parallel_size": 2, "global_batch_size": 4},
        {"fp8_grad_reduce": "nccl"},
    ],
    ids=["replicas", "tensor parallel", "pipeline", "auto-scaled"],
)
def test_ranks_report_the_whole_model(tmp_path: Path, ranks: RankPool, flags: dict[str, Any]) -> None:
    """Every layer once, in the model's order. μ is there with auto-scaling only."""
    ranks.run(_train_on_ranks, str(tmp_path), flags, num_ranks=2)
    roles = ["input", "weight", "grad_output"] + (["weight_grad"] if "global_batch_size" not in flags else [])
    for sample in samples(tmp_path):
        assert keys(sample) == [(layer, role) for layer in LAYERS for role in roles]
        for role, mu in zip(sample["roles"], sample["mu"], strict=True):
            assert (mu is not None) == (role == "weight_grad" and "fp8_grad_reduce" in flags)
    assert len(samples(tmp_path)) == 2


def test_statistics_of_replicas_are_those_of_one_rank(tmp_path: Path, ranks: RankPool) -> None:
    """Two replicas with a sequence each see what one rank sees in a micro-batch of two, with one scale a block."""
    flags = {"fp8_recipe": "blockwise", "train_iters": 1, "micro_batch_size": 2, **BLOCKS}
    train(tmp_path / "one", **flags)
    ranks.run(_train_on_ranks, str(tmp_path / "two"), {**flags, "micro_batch_size": 1}, num_ranks=2)
    (one,), (two,) = samples(tmp_path / "one"), samples(tmp_path / "two")
    assert keys(one) == keys(two)
    for place, role in enumerate(one["roles"]):
        if role == "input" or role == "weight":  # gradients are divided by another number of tokens
            for quantity in ("amax", "kurtosis", "snr_db"):
                pair = two[quantity][place], one[quantity][place]
                assert pair == (None, None) or pair[0] == pytest.approx(pair[1], rel=2e-3), (quantity, place)


def test_health_of_a_resumed_run_goes_on_and_that_of_a_new_one_starts_again(tmp_path: Path) -> None:
    flags = {"save": str(tmp_path / "save"), "fp8_health_interval": 1}
    train(tmp_path, **flags, train_iters=6, exit_interval=3)
    train(tmp_path, **flags, train_iters=6, load=str(tmp_path / "save"))
    assert [sample["iteration"] for sample in samples(tmp_path)] == [1, 2, 3, 4, 5, 6]
    train(tmp_path, train_iters=1, fp8_health_interval=1)
    assert [sample["iteration"] for sample in samples(tmp_path)] == [1]
    assert len((tmp_path / "health.1.jsonl").read_text().splitlines()) == 6


def test_a_run_without_fp8_samples_nothing(tmp_path: Path) -> None:
    train(tmp_path, precision="bf16", fp8_recipe=None, fp8_health_interval=None)
    assert not samples(tmp_path)


def test_the_worst_cast_of_each_role_goes_to_tensorboard() -> None:
    row = [0.0] * 64
    row[0], row[1], row[2], row[4], row[5], row[7], row[8], row[9] = 4.0, 0.5, 100.0, 10.0, 50.0, 100.0, 1.0, 300.0
    other = [*row[:4], 20.0, *row[5:8], 0.1, *row[9:]]
    casts = [
        CastStatistics.of_row(CastName(f"layers.{index}", "input", "E4M3"), values)
        for index, values in enumerate((row, other))
    ]
    sample = HealthSample(7, tuple(cast for cast in casts if cast is not None))
    assert sample.scalars() == {
        "fp8_health/input/saturated": 0.2,
        "fp8_health/input/underflowed": 0.0,
        "fp8_health/input/snr_db": 20.0,
        "fp8_health/input/amax": 4.0,
        "fp8_health/input/amax_over_scale": 0.5,
        "fp8_health/input/kurtosis": 3.0,
    }
    assert CastStatistics.of_row(CastName("layers.0", "input", "E4M3"), [0.0] * 64) is None
