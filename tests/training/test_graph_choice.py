"""--cuda-graph-impl auto records small layers on the GPUs of one node, if memory allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fp8_megatron.config.io import parse_config
from fp8_megatron.reporting.flops import layer_flops
from fp8_megatron.training.graph_choice import GraphChoice, choose_graph

CONFIGS = Path(__file__).parents[2] / "configs"


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
    assert choice.records == choice.needs_memory == records
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
        (
            "--num-experts 8 --expert-model-parallel-size 2 --moe-token-dispatcher-type flex",
            {"world_size": 2, "node_size": 2},
            "cannot record moe_token_dispatcher_type(flex), where the host waits for the numbers of tokens",
        ),
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


def test_the_table_of_a_profile_is_of_recorded_steps() -> None:
    assert choose("--profile").records


def test_all_ranks_of_one_node_record() -> None:
    assert choose("", world_size=8, node_size=8).records


@pytest.mark.parametrize("model", ["345m", "7b"])
@pytest.mark.parametrize("facts", [{}, {"has_gpu": False}, {"world_size": 4, "node_size": 2}])
def test_who_asks_is_not_overruled(model: str, facts: dict[str, Any]) -> None:
    always, never = (choose(f"--cuda-graph-impl {impl}", model=model, **facts) for impl in ("local", "none"))
    assert always.records and not always.needs_memory
    assert not never.records
