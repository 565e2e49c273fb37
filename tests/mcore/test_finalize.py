"""Gradients after backward, over real ranks: means over replicas, sums over shards and stages, one norm."""

from __future__ import annotations

import hashlib
import math
from functools import partial

import pytest
import torch
from torch import Tensor

from fp8_megatron.config.schema import Config, ParallelConfig, PrecisionConfig
from fp8_megatron.kernels.quantize import blockwise
from fp8_megatron.mcore.finalize import finalize_model_grads
from fp8_megatron.mcore.initialization import shard
from fp8_megatron.mcore.runtime import runtime
from fp8_megatron.mcore.topology import initialized
from fp8_megatron.optimizer.clip_grads import global_grad_norm
from fp8_megatron.quantization.stats import snr_db
from fp8_megatron.sharding.partition import Fragment
from tests.harness.ranks import RankPool
from tests.harness.tiny_gpt import GPT3_STYLE, LLAMA_STYLE, TinyGPT, assemble, build_tiny_gpt, sharding_of, tiny_config

CPU = torch.device("cpu")
EMBEDDING = "embedding.word_embeddings.weight"
LAYOUTS = {
    "tp2_sp": (2, ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)),
    "tp2": (2, ParallelConfig(tensor_model_parallel_size=2)),
    "pp2": (2, ParallelConfig(pipeline_model_parallel_size=2)),
    "dp2": (2, ParallelConfig()),
    "tp2_pp2": (
        4,
        ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True),
    ),
    "tp2_dp2": (4, ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)),
}


def whole_grad(name: str, shape: tuple[int, ...], part: str) -> Tensor:
    """A random gradient of a whole parameter; `part` tells contributions to it apart."""
    seed = int.from_bytes(hashlib.sha256(f"{name}/{part}".encode()).digest()[:4], "little")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def write_grads(gpt: TinyGPT) -> dict[str, Tensor]:
    """Give every parameter this rank's part of its gradient, and return what the whole gradient must become.

    Every replica contributes its own gradient; under sequence parallelism every tensor-parallel rank its own to norms
    and row-parallel biases; a tied embedding gets one from each end of the pipeline.
    """
    topology = gpt.topology
    tp, dp = topology.tp, topology.dp
    expected = {}
    for slot in (slot for _, slot in gpt.optimizer.slots()):
        param, sharding = slot.param, sharding_of(slot.param)
        shape = list(param.shape)
        if sharding is not None:
            shape[sharding[0]] *= tp.size()
        is_partial = getattr(param, "sequence_parallel", False)
        ends = ["first", "last"] if slot.name == EMBEDDING and topology.pp.size() > 1 else ["only"]
        end = ends[-1] if topology.is_last_stage else ends[0]
        parts = range(tp.size()) if is_partial else [0]

        def contribution(replica: int, part: int, end: str, name: str = slot.name, shape=shape) -> Tensor:  # type: ignore[no-untyped-def]
            return whole_grad(name, tuple(shape), f"{replica}/{part}/{end}")

        mine = contribution(dp.rank(), tp.rank() if is_partial else 0, end)
        if sharding is not None:
            mine = shard(mine, *sharding, tp.rank(), tp.size())
        param.main_grad.accumulate_(mine)  # type: ignore[attr-defined]
        everyone = [
            contribution(replica, part, each).double()
            for replica in range(dp.size())
            for part in parts
            for each in ends
        ]
        expected[slot.name] = torch.stack(everyone).sum(dim=0) / dp.size()
    return expected


def fragment_of(shard: Tensor, fragment: Fragment) -> Tensor:
    return shard[fragment.shard_start : fragment.shard_start + fragment.length]


def _finalize_on_a_rank(config: Config) -> tuple[dict[str, tuple[Tensor, Tensor]], float, dict[str, float]]:
    """Name → (gradient, its expected whole), the global norm, and each expected whole gradient's squared norm."""
    with runtime(CPU), initialized(config.parallel, config.model.num_layers, CPU) as topology:
        gpt = build_tiny_gpt(config, topology, CPU, num_micro_batches=1)
        expected = write_grads(gpt)
        finalize_model_grads(gpt.model)
        norm = global_grad_norm(gpt.optimizer.buffers, topology.world, CPU).item()
        mine, shardings = {}, {}
        for buffer in gpt.optimizer.buffers:
            flat = blockwise.load_state(buffer.payload, buffer.scales)
            for slot in buffer.space.slots:
                mine[slot.name] = buffer.space.assemble(slot, partial(fragment_of, flat))
                shardings[slot.name] = sharding_of(slot.param)
        everyone: list[dict[str, Tensor]] = [{}] * topology.tp.size()
        torch.distributed.all_gather_object(everyone, mine, group=topology.tp)
        grads = {
            name: (assemble([parts[name] for parts in everyone], shardings[name]), whole)
            for name, whole in expected.items()
        }
        return grads, norm, {name: whole.square().sum().item() for name, whole in expected.items()}


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize(
    ("precision", "least_db", "norm_tolerance"),
    [
        # FP32 gradients: sums of at most eight terms.
        ("bf16", 130.0, 1e-5),
        # FP8: quantised once, 31.5 dB, less 0.5 dB; replicas' sums are FP32. Noise raises a norm by half its power,
        # 10^-3.1 / 2, and rounding is not biased beyond that.
        ("fp8", 31.0, 1e-3),
    ],
)
def test_every_gradient_and_the_norm(
    ranks: RankPool, layout: str, precision: str, least_db: float, norm_tolerance: float
) -> None:
    world, parallel = LAYOUTS[layout]
    model = GPT3_STYLE if layout != "tp2_dp2" else LLAMA_STYLE  # tied, and with gated MLP's stride
    config = tiny_config(model, parallel=parallel, precision=PrecisionConfig(precision=precision))  # type: ignore[arg-type]
    results = ranks.run(_finalize_on_a_rank, config, num_ranks=world)
    squares: dict[str, float] = {}
    for grads, norm, rank_squares in results:
        assert norm == results[0][1]  # every rank clips alike
        squares |= rank_squares  # a tied embedding counts once
        for name, (grad, expected) in grads.items():
            assert snr_db(grad, expected) > least_db, name
    assert results[0][1] == pytest.approx(math.sqrt(sum(squares.values())), rel=norm_tolerance)
