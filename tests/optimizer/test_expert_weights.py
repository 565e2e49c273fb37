"""The weights of a layer's experts [E, N, K]: any cut over replicas and over expert-parallel ranks has the same bits.

Every element of masters, moments and weights must have the same bits under any layout, those of stochastic rounding
included (`tests.harness.experts` says why they can).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fp8_megatron.checkpoint.loading import load_checkpoint
from fp8_megatron.checkpoint.run_state import Progress
from fp8_megatron.checkpoint.saving import CheckpointWriter
from fp8_megatron.config.schema import CheckpointConfig, Config, ModelConfig, ParallelConfig, PrecisionConfig
from fp8_megatron.dtypes import StorageDtype
from fp8_megatron.planning.memory import model_storage
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from fp8_megatron.sharding.data_parallel import DataParallelModule
from fp8_megatron.watch.replica_hash import PendingCheck, ReplicaCheck
from tests.harness.experts import CPU, NUM_EXPERTS, SHAPES, expert_run, initial_value
from tests.harness.ranks import RankPool

F = StorageDtype
NUM_STEPS = 5
PRECISIONS = {
    "O3": PrecisionConfig(),
    "O2": PrecisionConfig(opt_level="O2"),
    "O1": PrecisionConfig(opt_level="O1"),
    "5_bytes": PrecisionConfig(main_params_dtype=F.SPLIT),
    "4_bytes": PrecisionConfig(main_params_dtype=F.SPLIT, exp_avg_dtype=F.INT8, exp_avg_sq_dtype=F.UINT8),
    "bf16": PrecisionConfig(precision="bf16"),
}


def config_of(level: str, expert_ranks: int = 1, state_dtype: str = "native") -> Config:
    return Config(
        model=ModelConfig(num_layers=1, hidden_size=64, num_attention_heads=4, num_experts=NUM_EXPERTS),
        precision=PRECISIONS[level],
        parallel=ParallelConfig(expert_model_parallel_size=expert_ranks),
        checkpoint=CheckpointConfig(ckpt_state_dtype=state_dtype),  # type: ignore[arg-type]
    )


def _train(config: Config, same_tokens: bool, bucket_numel: int) -> dict[str, Tensor]:
    with expert_run(config, bucket_numel) as run:
        before = run.state()
        run.train(0, NUM_STEPS, same_tokens=same_tokens)
        after = run.state()
    assert all((after[key] != before[key]).float().mean() > 0.5 for key in after if key.startswith("master"))
    return after


def trained(
    ranks: RankPool,
    level: str,
    expert_ranks: int = 1,
    replicas: int = 1,
    *,
    same_tokens: bool = False,
    bucket_numel: int = 1 << 30,
) -> dict[str, Tensor]:
    """The state of all experts after training."""
    args = (config_of(level, expert_ranks), same_tokens, bucket_numel)
    return joined(ranks.run(_train, *args, num_ranks=expert_ranks * replicas), expert_ranks)


def joined(outcomes: list[dict[str, Tensor]], expert_ranks: int) -> dict[str, Tensor]:
    """The state of all experts, from that of each rank."""
    for rank, outcome in enumerate(outcomes):
        for key, value in outcomes[rank % expert_ranks].items():
            assert torch.equal(outcome[key], value), f"replicas differ in {key}"
    return {key: torch.cat([outcome[key] for outcome in outcomes[:expert_ranks]]) for key in outcomes[0]}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert value.isfinite().all() and value.any(), key
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("level", PRECISIONS)
def test_any_layout_is_one_rank(ranks: RankPool, level: str) -> None:
    expected = trained(ranks, level)
    # The mean of equal gradients is exact. Buckets are larger than the parameters, and smaller.
    assert_equal(trained(ranks, level, replicas=2, same_tokens=True), expected)
    assert_equal(trained(ranks, level, replicas=4, same_tokens=True, bucket_numel=1 << 14), expected)
    for expert_ranks in (2, 4):
        assert_equal(trained(ranks, level, expert_ranks), expected)
    # Replicas of the experts, each with its own tokens.
    assert_equal(trained(ranks, level, 2, 2), trained(ranks, level, 1, 2))


@pytest.mark.parametrize("level", ["O3", "O2", "4_bytes"])
def test_released_gradients_are_those_of_the_step(ranks: RankPool, level: str) -> None:
    config = config_of(level, 2)
    released = replace(config, precision=replace(config.precision, release_gradients=True))
    kept, updated = (ranks.run(_train, one, False, 1 << 30, num_ranks=2) for one in (config, released))
    assert_equal(joined(updated, 2), joined(kept, 2))


def _compare_replicas(config: Config) -> list[list[tuple[int, ...]]]:
    """The groups of ranks that hold the same bits, by rank."""
    with expert_run(config) as run:
        run.train(0, 2)
        topology = run.topology
        check = ReplicaCheck(run.optimizer, [], stage_group=topology.stage_group, world=topology.world, device=CPU)
        pending = PendingCheck(check)
        pending.start()
        pending.examine()
        return check.layout


@pytest.mark.parametrize("level", ["O3", "4_bytes"])
def test_replicas_of_experts_compare_their_bits(ranks: RankPool, level: str) -> None:
    """Two expert-parallel ranks with two replicas each; all ranks count the same steps."""
    (layout, *_) = ranks.run(_compare_replicas, config_of(level, 2), num_ranks=4)
    assert layout == [[(rank % 2, rank % 2 + 2), (0, 1, 2, 3)] for rank in range(4)]


def _train_and_save(config: Config, folder: Path) -> dict[str, Tensor]:
    with expert_run(config) as run:
        run.train(0, 2)
        writer = CheckpointWriter(folder, run.topology)
        writer.save(run.resumable, Progress(2, 2))
        writer.finish()
        run.train(2, 2)
        return run.state()


def _load_and_train(config: Config, folder: Path) -> dict[str, Tensor]:
    with expert_run(config) as run:
        progress = load_checkpoint(folder, run.resumable)
        assert progress is not None
        run.train(progress.iteration, 2)
        return run.state()


@pytest.mark.parametrize(
    ("level", "state_dtype"), [*((level, "native") for level in PRECISIONS), ("O2", "fp32"), ("4_bytes", "fp32")]
)
def test_a_run_goes_on_with_any_expert_parallel_size(
    ranks: RankPool, tmp_path: Path, level: str, state_dtype: str
) -> None:
    """Bit for bit as if it had not stopped."""
    args = (config_of(level, 2, state_dtype), tmp_path)
    expected = joined(ranks.run(_train_and_save, *args, num_ranks=2), 2)
    for expert_ranks, num_ranks in ((2, 2), (1, 1), (4, 4)):
        args = (config_of(level, expert_ranks, state_dtype), tmp_path)
        assert_equal(joined(ranks.run(_load_and_train, *args, num_ranks=num_ranks), expert_ranks), expected)


def test_each_expert_has_its_own_scale() -> None:
    value = initial_value(next(iter(SHAPES)))
    weight = ScaledTensor.quantize(value)
    for index, matrix in enumerate(value):
        alone = ScaledTensor.quantize(matrix)
        assert torch.equal(weight.scale[index : index + 1], alone.scale)
        assert torch.equal(weight.dequantize()[index], alone.dequantize())
    some = weight[2:4]
    assert isinstance(some, ScaledTensor) and torch.equal(some.dequantize(), weight.dequantize()[2:4])
    with torch.no_grad():
        some.copy_(value[:2])
    expected = torch.cat([value[:2], value[:2], value[4:]])
    assert torch.equal(weight.dequantize(), ScaledTensor.quantize(expected).dequantize())
    restored = torch.nn.Parameter(ScaledTensor.quantize(torch.ones_like(value)))
    restored.data.copy_(weight)
    assert torch.equal(restored.dequantize(), weight.dequantize())


def test_experts_that_are_no_whole_chunks_are_refused() -> None:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(ScaledTensor.quantize(torch.ones(4, 48, 64)))
    with pytest.raises(ValueError, match="48 × 64"):
        DataParallelModule(module, storage=model_storage(PrecisionConfig(), num_micro_batches=1))
