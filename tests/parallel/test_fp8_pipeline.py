"""FP8 between pipeline stages: stages compute what one rank computes that casts at their borders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8_megatron.collectives.packed import packed, unpacked
from fp8_megatron.config.schema import Config, ParallelConfig, PrecisionConfig
from fp8_megatron.dtypes import E4M3
from fp8_megatron.mcore import pipeline
from fp8_megatron.planning.wire import message_buffer_bytes, predict_stage_bytes, stage_message_bytes
from tests.harness.ranks import RankPool
from tests.harness.tiny_gpt import TinyGPT, TinyRun, random_batches, tiny_config, train_tiny_gpt
from tests.parallel.test_layouts import MODELS, OPTIMIZER, TOLERANCES, assert_same

CURRENT = PrecisionConfig(fp8_recipe="tensorwise")
IN_FP8 = replace(CURRENT, fp8_pipeline_communication=True)
#: Name → (ranks, the stages, the same without stages, the layers before a border).
CASES: dict[str, tuple[int, ParallelConfig, ParallelConfig, list[int]]] = {
    "pp2": (2, ParallelConfig(pipeline_model_parallel_size=2), ParallelConfig(), [1]),
    "pp4": (4, ParallelConfig(pipeline_model_parallel_size=4), ParallelConfig(), [0, 1, 2]),
    "pp2_vpp2": (
        2,
        ParallelConfig(pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=1),
        ParallelConfig(),
        [0, 1, 2],
    ),
    "uneven": (
        2,
        ParallelConfig(pipeline_model_parallel_size=2, decoder_first_pipeline_num_layers=1),
        ParallelConfig(),
        [0],
    ),
    # What was cast once passes the empty stage unchanged: its block has a power of two for a scale.
    "empty": (
        2,
        ParallelConfig(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et*2||t|tL"),
        ParallelConfig(),
        [1, 2],
    ),
    "tp2_sp_pp2": (
        4,
        ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True, pipeline_model_parallel_size=2),
        ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True),
        [1],
    ),
    "cp2_pp2": (
        4,
        ParallelConfig(context_parallel_size=2, pipeline_model_parallel_size=2),
        ParallelConfig(context_parallel_size=2),
        [1],
    ),
}


class _Crossing(torch.autograd.Function):
    """A tensor as the next stage receives it; in backward its gradient as the previous stage receives it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _sent(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return _sent(grad)


def _sent(x: Tensor) -> Tensor:
    return unpacked(packed(x.contiguous(), E4M3), x.shape, E4M3)


def cast_outputs(module: torch.nn.Module, layers: Sequence[int]) -> None:
    """Let what leaves these layers of a whole GPT cross as between stages, and its gradient."""

    def cross(layer: torch.nn.Module, inputs: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        return _Crossing.apply(output[0]), output[1]

    for index in layers:
        module.decoder.layers[index].register_forward_hook(cross)  # type: ignore[union-attr,operator,index]


def batches() -> Tensor:
    """One batch four times; four micro-batches, so that the interleaved schedule sends both ways at once."""
    return random_batches(1, 4).expand(4, -1, -1, -1)


def train(config: Config, tokens: Tensor, borders: list[int]) -> TinyRun:
    def cast_at_borders(gpt: TinyGPT) -> None:
        for chunk in gpt.chunks if borders else []:
            cast_outputs(chunk.module, borders)

    return train_tiny_gpt(config, tokens, before_training=cast_at_borders)


def config_of(model: str, parallel: ParallelConfig, precision: PrecisionConfig) -> Config:
    return tiny_config(MODELS[model], parallel=parallel, precision=precision, optimizer=OPTIMIZER)


def slow(*case: str) -> object:
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("model", "case"),
    [
        ("gpt3", "pp2"),
        ("llama", "pp2_vpp2"),
        ("gpt3", "tp2_sp_pp2"),
        slow("llama", "pp4"),
        slow("llama", "uneven"),
        slow("gpt3", "empty"),
        slow("llama", "cp2_pp2"),
    ],
)
def test_stages_compute_what_casts_at_their_borders_do(ranks: RankPool, model: str, case: str) -> None:
    world, stages, whole, borders = CASES[case]
    num_whole = world // stages.pipeline_model_parallel_size
    of_one = config_of(model, whole, CURRENT)
    start = ranks.run(train, of_one, batches()[:0], borders, num_ranks=num_whole)[0]
    expected = ranks.run(train, of_one, batches(), borders, num_ranks=num_whole)[0]
    runs = ranks.run(train, config_of(model, stages, IN_FP8), batches(), [], num_ranks=world)
    assert all(run.losses == runs[0].losses for run in runs)
    assert_same(runs[0], start, expected, TOLERANCES["fp8", False])
    (uncast,) = ranks.run(train, of_one, batches()[:1], [], num_ranks=num_whole)[:1]
    assert abs(uncast.losses[0] - expected.losses[0]) > 1e-4, "the cast changes nothing"


def sent_bytes(config: Config, tokens: Tensor) -> tuple[list[int], list[torch.dtype]]:
    """Bytes of each message of a step, and the formats that were unpacked."""
    sizes: list[int] = []
    formats: list[torch.dtype] = []
    send, unpack = torch.distributed.isend, pipeline.unpacked

    def counting(tensor: Tensor, *args: object, **kwargs: object) -> object:
        sizes.append(tensor.nbytes)
        return send(tensor, *args, **kwargs)

    def noting(run: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
        formats.append(dtype)
        return unpack(run, shape, dtype)

    torch.distributed.isend, pipeline.unpacked = counting, noting  # type: ignore[assignment]
    try:
        train_tiny_gpt(config, tokens)
    finally:
        torch.distributed.isend, pipeline.unpacked = send, unpack
    return sizes, formats


def places_of_messages(config: Config, tokens: Tensor) -> dict[str, list[int]]:
    """Where the messages of a step lie that this rank sends and receives."""
    places: dict[str, list[int]] = {"isend": [], "irecv": []}
    exchanges = {name: getattr(torch.distributed, name) for name in places}

    def noting(name: str, tensor: Tensor, *args: object, **kwargs: object) -> object:
        places[name].append(tensor.data_ptr())
        return exchanges[name](tensor, *args, **kwargs)

    for name in places:
        setattr(torch.distributed, name, partial(noting, name))
    try:
        train_tiny_gpt(config, tokens)
    finally:
        for name, exchange in exchanges.items():
            setattr(torch.distributed, name, exchange)
    return places


@pytest.mark.parametrize("precision", [CURRENT, IN_FP8], ids=["16 bits", "fp8"])
def test_messages_of_a_step_share_buffers(ranks: RankPool, precision: PrecisionConfig) -> None:
    """A recorded step would hold every other place of a message.

    With virtual stages, ranks 0 and 1 exchange with the next and with the previous one, 4 micro-batches each way.
    """
    parallel = ParallelConfig(pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=1)
    config = config_of("gpt3", parallel, precision)
    for stage, places in enumerate(ranks.run(places_of_messages, config, random_batches(1, 4), num_ranks=2)):
        assert {name: len(set(found)) for name, found in places.items()} == {"isend": 2, "irecv": 2}
        assert all(len(found) == 3 * 4 for found in places.values())
        assert message_buffer_bytes(config, stage=stage) == 4 * stage_message_bytes(config)


def test_buffers_of_stages_that_meet_fewer() -> None:
    config = config_of("gpt3", ParallelConfig(pipeline_model_parallel_size=4), CURRENT)
    size = stage_message_bytes(config)
    assert [message_buffer_bytes(config, stage=stage) // size for stage in range(4)] == [2, 4, 4, 2]
    assert message_buffer_bytes(config_of("gpt3", ParallelConfig(), CURRENT)) == 0


def test_a_message_has_about_half_the_bytes(ranks: RankPool) -> None:
    """A stage sends 4 micro-batches of 32 tokens, 128 values each: 2 bytes a value, or 1 and a scale for 128 values."""
    parallel = ParallelConfig(pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=1)
    tokens = random_batches(1, 4)
    values = tokens.shape[2] * 32 * 128
    for precision, expected in ((CURRENT, 2 * values), (IN_FP8, values + 4 * values // 128)):
        config = config_of("gpt3", parallel, precision)
        batch = {"micro_batch_size": tokens.shape[2], "global_batch_size": 4 * tokens.shape[2]}
        config = replace(config, training=replace(config.training, **batch))
        everyones = ranks.run(sent_bytes, config, tokens, num_ranks=2)
        # Four model chunks: three borders, crossed by every micro-batch in both directions.
        assert list(chain.from_iterable(sizes for sizes, _ in everyones)) == [expected] * (3 * 2 * 4)
        for stage, (sizes, _) in enumerate(everyones):
            assert predict_stage_bytes(config, world_size=2, stage=stage) == sum(sizes)
        formats = list(chain.from_iterable(found for _, found in everyones))
        assert formats == [E4M3] * (24 if precision is IN_FP8 else 0)
