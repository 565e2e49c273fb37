"""--cuda-graph-impl auto records small layers on the GPUs of one node, if memory allows."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8_megatron.config.io import parse_config
from fp8_megatron.reporting.flops import layer_flops
from fp8_megatron.training import graph_choice
from fp8_megatron.training.graph_choice import GraphChoice, choose_graph, has_room

CONFIGS = Path(__file__).parents[2] / "configs"
CPU = torch.device("cpu")
TOTAL = 100 << 30


def choose(flags: str, *, model: str = "345m", **facts: Any) -> GraphChoice:
    """Of a model of `configs/` with micro-batches of 4 sequences; by default on one GPU."""
    config = parse_config(["--config", str(CONFIGS / f"gpt_{model}.yaml"), "--micro-batch-size", "4", *flags.split()])
    return choose_graph(config, **{"has_gpu": True, "world_size": 1, "node_size": 1, **facts})


@pytest.mark.parametrize(
    ("model", "tensor_parallel", "tflop", "records"),
    [
        ("345m", 1, "0.4", True),
        ("7b", 4, "2.7", True),
        ("7b", 2, "5.4", True),
        ("13b", 2, "8.2", True),
        ("7b", 1, "10.7", False),
        ("13b", 1, "16.5", False),
    ],
)
def test_small_layers_are_recorded(model: str, tensor_parallel: int, tflop: str, records: bool) -> None:
    ranks = {"world_size": tensor_parallel, "node_size": tensor_parallel}
    choice = choose(f"--tensor-model-parallel-size {tensor_parallel}", model=model, **ranks)
    assert choice.records == choice.needs_room == records
    assert choice.reason.startswith(f"a layer has {tflop} TFLOP a micro-batch")


def test_large_layers_over_ranks_are_not_recorded() -> None:
    choice = choose("--tensor-model-parallel-size 2 --micro-batch-size 6", model="13b", world_size=2, node_size=2)
    assert not choice.records and choice.reason.startswith("a layer has 12.4 TFLOP a micro-batch")


def test_a_layers_work_is_its_gemms() -> None:
    """GPT-7B's 12 · 4096² weights and full attention over 2,048 tokens, three times 2 FLOPs each, over two ranks; with
    another number of layers or words the same."""
    tokens, width = 4 * 2048, 4096
    expected = 3 * tokens * (2 * 12 * width**2 + 4 * 2048 * width) / 2
    for flags in ("", "--num-layers 8", "--vocab-size 256000"):
        flags = f"--micro-batch-size 4 --tensor-model-parallel-size 2 {flags}"
        assert layer_flops(parse_config(["--config", str(CONFIGS / "gpt_7b.yaml"), *flags.split()])) == expected


@pytest.mark.parametrize(
    ("flags", "facts", "reason"),
    [
        ("", {"has_gpu": False}, "there is no GPU"),
        ("", {"world_size": 4, "node_size": 2}, "of WORLD_SIZE(4) ranks LOCAL_WORLD_SIZE(2) are on this node"),
        ("--recompute-granularity selective", {}, "cannot record recompute_granularity(selective)"),
        ("--release-gradients --clip-grad 0", {}, "the updates of release_gradients"),
        ("--precision te", {}, "Transformer Engine's layers"),
        ("--cuda-graph-warmup-steps 1", {}, "cuda_graph_warmup_steps(1)"),
        ("--global-batch-size 172", {}, "a step has 1032 layers × micro-batches, more than 1024"),
        ("--profile --profile-trace", {}, "profile_trace shows how Python launches a step"),
    ],
)
def test_however_small_these_are_not_recorded(flags: str, facts: dict[str, Any], reason: str) -> None:
    choice = choose(flags, **facts)
    assert not choice.records and reason in choice.reason


@pytest.mark.parametrize("layout", ["", "--pipeline-model-parallel-size 2"])
def test_many_micro_batches_over_many_ranks_are_few_on_each(layout: str) -> None:
    assert choose(f"--global-batch-size 172 {layout}", world_size=2, node_size=2).records


@pytest.mark.parametrize("layout", ["--pipeline-model-parallel-size 2", "--context-parallel-size 2"])
def test_stages_and_parts_of_a_sequence_are_recorded(layout: str) -> None:
    assert choose(layout, world_size=2, node_size=2).records


@pytest.mark.parametrize(("value", "world_size", "records"), [("1", 2, False), ("1", 1, True), ("0", 2, True)])
def test_a_launch_that_may_hang_is_not_chosen(
    value: str, world_size: int, records: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", value)
    choice = choose("", world_size=world_size, node_size=world_size)
    assert choice.records == records and (records or "NCCL_GRAPH_REGISTER is 1" in choice.reason)


def test_the_table_of_a_profile_is_of_recorded_steps() -> None:
    assert choose("--profile").records


def test_all_ranks_of_one_node_record() -> None:
    assert choose("", world_size=8, node_size=8).records


@pytest.mark.parametrize("model", ["345m", "7b"])
@pytest.mark.parametrize("facts", [{}, {"has_gpu": False}, {"world_size": 4, "node_size": 2}])
def test_who_asks_is_not_overruled(model: str, facts: dict[str, Any]) -> None:
    always, never = (choose(f"--cuda-graph-impl {impl}", model=model, **facts) for impl in ("local", "none"))
    assert always.records and not always.needs_room
    assert not never.records


@pytest.mark.parametrize(("model", "level"), [("345m", logging.INFO), ("7b", logging.DEBUG)])
def test_one_line_says_what_was_chosen(model: str, level: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        choose("", model=model).log()
    (record,) = caplog.records
    assert record.levelno == level and "TFLOP a micro-batch" in record.getMessage()


@pytest.mark.parametrize(
    ("reserved", "beside", "validation", "another_ranks", "expected"),
    [
        (86, 0, 0, 0.0, True),
        (88, 0, 0, 0.0, False),
        (81, 5, 0, 0.0, True),
        (81, 7, 0, 0.0, False),
        (10, 0, 0, 0.86, True),
        (10, 0, 0, 0.88, False),
        (60, 0, 30, 0.0, True),
        (60, 0, 32, 0.0, False),
    ],
)
def test_room_is_for_more_than_was_in_use_on_every_rank(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    reserved: int,
    beside: int,
    validation: int,
    another_ranks: float,
    expected: bool,
) -> None:
    """GiB of 100 that the allocator reserved at most, of which it has 20 now or all, that others have beside it, and of
    validation; another rank's share of its memory."""
    now = min(reserved, 20)
    reductions: list[object] = []

    def all_reduce(share: torch.Tensor, op: object) -> None:
        reductions.append(op)
        share.copy_(share.maximum(torch.tensor([another_ranks * 1.15, another_ranks, 0.0])))

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (TOTAL - ((now + beside) << 30), TOTAL))
    monkeypatch.setattr(graph_choice.device_memory, "memory_bytes", lambda device: TOTAL)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: now << 30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: reserved << 30)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2 if another_ranks else 1)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    with caplog.at_level(logging.INFO):
        assert has_room(CPU, validation << 30) == expected
    assert reductions == ([torch.distributed.ReduceOp.MAX] if another_ranks else [])
    assert [record.name for record in caplog.records] == ([] if expected else [graph_choice.__name__])
    assert expected or f"{60 if validation else 88}% of a GPU's memory were in use" in caplog.text
    assert expected or ("and 32% of the memory for validation" in caplog.text) == bool(validation)
