"""Layouts: all that the checks take and the memory allows, the fastest first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8_megatron.config.checks import ConfigError, check_config
from fp8_megatron.config.io import parse_config
from fp8_megatron.config.schema import Config
from fp8_megatron.planning.largest import largest_model, num_parameters
from fp8_megatron.planning.layouts import ROOM, Cluster, best_layouts, better_accumulation, largest_peak
from fp8_megatron.planning.memory import padded_vocab_size
from tests.planning.recorded_runs import ROOT

FOUR_H200 = Cluster(gpus=4, gpus_per_node=8, memory_bytes=141e9, network_bytes=50e9)


def _config(flags: str) -> Config:
    return parse_config([*flags.replace("configs/", f"{ROOT}/configs/").split(), "--mock-data"])


def _never(config: Config) -> bool:
    return False


def test_layouts_fit_and_are_sorted() -> None:
    layouts = best_layouts(_config("--config configs/gpt_7b.yaml configs/fast.yaml"), FOUR_H200, _never)
    seconds = [layout.step.total for layout in layouts if layout.step]
    assert len(seconds) > 20 and seconds == sorted(seconds)
    assert not any(layout.step for layout in layouts[len(seconds) :]), "small layers, whose time is not predicted"
    for layout in layouts:
        check_config(layout.config, 4, on_this_machine=False)
        assert layout.peak.total <= ROOM * 141e9 and layout.config.global_batch_size(4) == 64
        assert largest_peak(layout.config, 4) == (layout.stage, layout.peak)
    sizes = {layout.config.parallel.tensor_model_parallel_size for layout in layouts}
    assert sizes == {1, 2, 4}
    recomputed = {(one.config.training.recompute_granularity, one.config.training.recompute_modules) for one in layouts}
    assert recomputed == {(None, ()), ("selective", ("mlp",)), ("full", ())}


def test_the_measured_layout_of_gpt_7b_precedes_tensor_parallelism() -> None:
    """As in gpt7b_4h200_scaling.json: data-parallel is faster than TP 2, which is faster than TP 4."""
    layouts = best_layouts(_config("--config configs/gpt_7b.yaml configs/fast.yaml"), FOUR_H200, _never)
    plain = [
        layout.config.parallel.tensor_model_parallel_size
        for layout in layouts
        if layout.config.training.micro_batch_size == 4
        and layout.config.training.recompute_granularity is None
        and layout.config.parallel.pipeline_model_parallel_size == 1
    ]
    assert plain == [1, 2, 4]


def test_the_layout_that_is_asked_for_is_one() -> None:
    """Three sequences a micro-batch are no power of two."""
    config = _config("--config configs/gpt_7b.yaml --micro-batch-size 3 --global-batch-size 48")
    sizes = {one.config.training.micro_batch_size for one in best_layouts(config, FOUR_H200, _never)}
    assert {2, 3, 4} < sizes


def test_less_memory_leaves_fewer() -> None:
    config = _config("--config configs/gpt_13b.yaml configs/fast.yaml")
    many, few, none = (
        best_layouts(config, replace(FOUR_H200, memory_bytes=size), _never) for size in (141e9, 60e9, 5e9)
    )
    assert len(many) > len(few) > len(none) == 0


def test_a_recording_that_does_not_fit_is_not_made() -> None:
    flags = "--config configs/gpt_7b.yaml configs/fast.yaml --micro-batch-size 4 --global-batch-size 16"
    config = _config(f"{flags} --eval-interval 0")
    peak = largest_peak(config, 4)[1].total
    recorded = largest_peak(config, 4, records=True)[1].total
    # FP8 weights and the BF16 embedding, a quarter of them on each rank.
    assert recorded - peak == pytest.approx((32 * 12 * 4096**2 + 2 * 4096 * (50304 + 2048)) / 4, rel=0.01)
    for memory, records in (((peak + recorded) / 2, False), (recorded, True)):
        cluster = replace(FOUR_H200, memory_bytes=1.001 * memory / ROOM)
        same = [one for one in best_layouts(config, cluster, lambda _: True) if one.peak.state > 18e9]
        assert [one.records for one in same if one.config.training == config.training] == [records]


def test_gradients_that_the_network_delays_are_added_up_on_the_rank() -> None:
    """Micro-batches of 2,048 tokens hide their gradients inside a node and not between nodes; what does not fit is not
    proposed."""
    config = _config("--config configs/gpt_13b.yaml --micro-batch-size 1 --global-batch-size 512")
    for gpus, memory, found in ((8, 141e9, None), (64, 141e9, "local"), (64, 24e9, None)):
        cluster = replace(FOUR_H200, gpus=gpus, memory_bytes=memory)
        own = next(one for one in best_layouts(config, cluster, _never) if one.config == config)
        other = better_accumulation(own, cluster)
        assert (None if other is None else other.config.precision.grad_accumulation) == found
    cluster = replace(FOUR_H200, gpus=8)
    local = replace(config, precision=replace(config.precision, grad_accumulation="local"))
    own = next(one for one in best_layouts(local, cluster, _never) if one.config == local)
    other = better_accumulation(own, cluster)
    assert other is not None and other.config == config and other.peak.total < own.peak.total


def test_the_embedding_is_padded_for_tensor_parallelism() -> None:
    config = _config("--config configs/gpt_7b.yaml --tensor-model-parallel-size 4 --sequence-parallel")
    assert padded_vocab_size(config) == 50688  # 50,304 rounded up to a multiple of 4 × 128


@pytest.mark.parametrize(
    ("flags", "gpus", "said"),
    [
        ("--config configs/gpt_7b.yaml", 12, "is not a multiple of --gpus-per-node 8"),
        ("--config configs/gpt_7b.yaml --global-batch-size 7", 3, "global_batch_size(7)"),
        ("--config configs/gpt_7b.yaml --num-attention-heads 7", 4, "hidden_size(4096)"),
        (
            "--config configs/gpt_7b.yaml --rampup-batch-size 8 8 1000 --global-batch-size 33",
            4,
            "rampup_batch_size(8 8 1000) cannot be followed",
        ),
    ],
)
def test_what_works_in_no_layout(flags: str, gpus: int, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        best_layouts(_config(flags), replace(FOUR_H200, gpus=gpus), _never)
    assert said in str(error.value)


@pytest.mark.parametrize("level", ["--precision bf16", "--precision fp8"])
def test_the_largest_model_fits_and_the_next_width_does_not(level: str) -> None:
    base = f"--num-layers 8 --hidden-size 1024 --num-attention-heads 8 --seq-length 2048 --vocab-size 50304 {level}"
    config = _config(f"{base} --max-position-embeddings 2048 --attention-dropout 0 --hidden-dropout 0")
    cluster = Cluster(gpus=8, gpus_per_node=8, memory_bytes=80e9, network_bytes=50e9)
    largest = largest_model(config, cluster)
    assert largest is not None
    check_config(largest, 8, on_this_machine=False)
    assert largest_peak(largest, 8)[1].total <= ROOM * 80e9
    # Alone, weights and optimizer state of 12·L·h² parameters over 8 ranks: 18 and 7 bytes each.
    bytes_each = 18 if "bf16" in level else 7
    width = largest.model.hidden_size + 1024
    assert 12 * (width // 128) * width**2 * bytes_each / 8 > ROOM * 80e9
    assert num_parameters(largest) == pytest.approx(12 * largest.model.num_layers * (width - 1024) ** 2, rel=0.05)


def test_the_largest_model_of_context_parallel_ranks() -> None:
    """Ranks that share sequences are no replicas; a cluster that they do not divide holds nothing."""
    config = _config("--config configs/gpt_345m.yaml --attention-dropout 0 --context-parallel-size 2")
    cluster = Cluster(gpus=8, gpus_per_node=8, memory_bytes=10e9, network_bytes=50e9)
    largest = largest_model(config, cluster)
    assert largest is not None
    check_config(largest, 8, on_this_machine=False)
    assert largest.num_micro_batches(8) == largest.parallel.pipeline_model_parallel_size
    assert largest_model(config, replace(cluster, gpus=3)) is None


def test_a_gpu_too_small_for_any_model() -> None:
    assert largest_model(_config("--config configs/gpt_345m.yaml"), replace(FOUR_H200, memory_bytes=1e8)) is None


def test_ranks_share_experts_where_all_of_them_do_not_fit() -> None:
    """Mixtral-8x7B on eight H100."""
    layouts = best_layouts(_config("--config configs/mixtral_8x7b.yaml"), Cluster(8, 8, 80e9, 50e9), _never)
    sizes = {(one.config.data_parallel_size(8), one.config.parallel.expert_model_parallel_size) for one in layouts}
    assert (8, 8) in sizes and (8, 1) not in sizes and (1, 1) in sizes
