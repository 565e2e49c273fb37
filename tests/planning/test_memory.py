"""The memory predicted from the configuration equals the tensors' bytes, up to padding to blocks and chunks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fp8_megatron.config.schema import (
    CheckpointConfig,
    Config,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
)
from fp8_megatron.dtypes import StorageDtype
from fp8_megatron.mcore.runtime import runtime
from fp8_megatron.mcore.topology import initialized
from fp8_megatron.planning.memory import predict_checkpoint_bytes, predict_memory
from fp8_megatron.reporting.memory_report import MemoryByKind
from fp8_megatron.training.build import build_training_state, measured_storage
from tests.harness.ranks import RankPool
from tests.harness.tiny_checkpoint import run_tiny_on_a_rank
from tests.harness.tiny_gpt import GPT3_STYLE, LLAMA_STYLE, VOCAB_SIZE, tiny_config, tiny_optimizer

CPU = torch.device("cpu")
VOCAB = 1024
#: No part is so small that its padding counts.
MODELS = {
    "gpt3": replace(GPT3_STYLE, hidden_size=256, num_layers=2),
    "llama": replace(LLAMA_STYLE, hidden_size=256, num_layers=2, add_qkv_bias=True, qk_layernorm=True),
    "llama-4": replace(LLAMA_STYLE, hidden_size=256, num_layers=4),
}


STRETCH = PrecisionConfig(
    main_params_dtype=StorageDtype.SPLIT, exp_avg_dtype=StorageDtype.INT8, exp_avg_sq_dtype=StorageDtype.UINT8
)


def make_config(
    model: ModelConfig, parallel: ParallelConfig, precision: PrecisionConfig, micro_batches: int, *, trains: bool = True
) -> Config:
    unclipped = tiny_optimizer(clip_grad=0.0)  # what gradients that are released need
    config = tiny_config(model, parallel=parallel, precision=precision, optimizer=unclipped)
    training = replace(config.training, micro_batch_size=1, global_batch_size=micro_batches, skip_train=not trains)
    return replace(config, training=training)


def _compare(config: Config) -> tuple[MemoryByKind, MemoryByKind]:
    with runtime(CPU), initialized(config.parallel, config.model.num_layers, CPU) as topology:
        measured = measured_storage(build_training_state(config, VOCAB, topology, CPU))
        return measured, predict_memory(config, VOCAB, world_size=topology.world_size, stage=topology.pp.rank())


@pytest.mark.parametrize(
    ("model", "num_ranks", "parallel", "precision", "global_batch"),
    [
        ("gpt3", 1, ParallelConfig(), PrecisionConfig(), 1),
        ("gpt3", 1, ParallelConfig(), PrecisionConfig(opt_level="O2"), 4),
        ("llama", 1, ParallelConfig(), PrecisionConfig(precision="bf16"), 1),
        ("gpt3", 4, ParallelConfig(), PrecisionConfig(), 4),
        ("llama", 2, ParallelConfig(), PrecisionConfig(opt_level="O1"), 2),
        ("gpt3", 1, ParallelConfig(), STRETCH, 1),
        ("gpt3", 1, ParallelConfig(), replace(STRETCH, release_gradients=True), 1),
        ("gpt3", 2, ParallelConfig(), STRETCH, 2),
        ("gpt3", 2, ParallelConfig(), PrecisionConfig(grad_accumulation="local"), 4),
        ("gpt3", 2, ParallelConfig(), PrecisionConfig(precision="bf16"), 2),
        ("gpt3", 2, ParallelConfig(pipeline_model_parallel_size=2), PrecisionConfig(), 2),
        ("llama", 4, ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True), PrecisionConfig(), 2),
        ("gpt3", 1, ParallelConfig(), PrecisionConfig(first_last_layers_bf16=True, num_layers_at_end_in_bf16=0), 1),
        (
            "llama-4",
            2,
            ParallelConfig(pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=1),
            PrecisionConfig(first_last_layers_bf16=True, num_layers_at_start_in_bf16=2, num_layers_at_end_in_bf16=1),
            2,
        ),
    ],
)
def test_predicted_is_measured(
    ranks: RankPool, model: str, num_ranks: int, parallel: ParallelConfig, precision: PrecisionConfig, global_batch: int
) -> None:
    _check_prediction(ranks, make_config(MODELS[model], parallel, precision, global_batch), num_ranks)


@pytest.mark.parametrize(
    "precision", [PrecisionConfig(), PrecisionConfig(opt_level="O2"), PrecisionConfig(precision="bf16")]
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_predicted_is_measured_of_an_evaluation(ranks: RankPool, num_ranks: int, precision: PrecisionConfig) -> None:
    config = make_config(MODELS["gpt3"], ParallelConfig(), precision, num_ranks, trains=False)
    _check_prediction(ranks, config, num_ranks)
    predicted = predict_memory(config, VOCAB, world_size=num_ranks)
    held = predicted.linear + predicted.rest
    assert held.gradients == sum(held.states.values()) == 0 and held.weights > 0


def _check_prediction(ranks: RankPool, config: Config, num_ranks: int) -> None:
    for measured, predicted in ranks.run(_compare, config, num_ranks=num_ranks):
        assert measured.linear.num_params == predicted.linear.num_params
        assert measured.rest.num_params == predicted.rest.num_params
        for group in ("linear", "rest"):
            held, said = getattr(measured, group), getattr(predicted, group)
            assert said.by_kind.keys() == held.by_kind.keys()
            for kind, count in held.by_kind.items():
                if kind != "scales":
                    # Padding of vectors to 128 per rank, of matrices and linear weights to a few thousand.
                    assert said.by_kind[kind] == pytest.approx(count, rel=0.02), kind
            # A word for each chunk and tensor beside the blocks'.
            assert said.scales == pytest.approx(held.scales, rel=0.15, abs=1024)


def test_sharded_bytes_per_parameter() -> None:
    """The levels' arithmetic at O3: 7 bytes on one rank; 1 + 7/4 on four (weight 1, BF16 shard of gradients 2/4,
    master and moments 5/4), with less than 0.1 of scales; 5 in the stretch form, 4 with gradients released."""
    model = replace(MODELS["gpt3"], num_layers=32, hidden_size=4096, num_attention_heads=32)
    for precision, world_size, least in (
        (PrecisionConfig(), 1, 7.0),
        (PrecisionConfig(), 4, 1 + 7 / 4),
        (PrecisionConfig(grad_accumulation_dtype="fp32"), 4, 1 + 9 / 4),
        (STRETCH, 1, 5.0),
        (replace(STRETCH, release_gradients=True), 1, 4.0),
    ):
        config = make_config(model, ParallelConfig(), precision, world_size)
        linear = predict_memory(config, 50304, world_size=world_size).linear
        assert linear.num_params == 12 * 32 * 4096**2
        assert least < linear.total / linear.num_params < least + 0.1


@pytest.mark.parametrize("dtype", ["native", "fp32"])
@pytest.mark.parametrize(
    "precision",
    [
        PrecisionConfig(),
        PrecisionConfig(opt_level="O1"),
        PrecisionConfig(precision="bf16"),
        STRETCH,
    ],
    ids=["O3", "O1", "bf16", "split"],
)
def test_predicted_size_of_a_checkpoint_is_that_on_disk(
    ranks: RankPool, tmp_path: Path, precision: PrecisionConfig, dtype: str
) -> None:
    """The files of the tensors hold the predicted bytes, and headers: 1 KB a tensor, torch's own 4 KB."""
    config = tiny_config(replace(GPT3_STYLE, num_layers=2), precision=precision)
    config = replace(config, checkpoint=CheckpointConfig(ckpt_state_dtype=dtype))  # type: ignore[arg-type]
    ranks.run(run_tiny_on_a_rank, config, 1, None, tmp_path, num_ranks=1)
    on_disk = sum(path.stat().st_size for path in tmp_path.glob("iter_*/*.distcp"))
    predicted = predict_checkpoint_bytes(config, VOCAB_SIZE)
    num_tensors = 3 * 14 * config.model.num_layers
    header_bytes = 1024 if dtype == "native" else 4096
    assert predicted <= on_disk <= predicted + header_bytes * num_tensors
