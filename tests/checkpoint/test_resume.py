"""Under the same layout, a resumed run is bitwise equal to one that never stopped: every storage form, all state.

Loading decodes state to FP32 and encodes it again, so this tests that both keep every form's values, and that blocks
which they would change are copied.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from fp8_megatron.checkpoint import run_state, torch_dist
from fp8_megatron.checkpoint.loading import LoadOptions, load_checkpoint
from fp8_megatron.checkpoint.metadata_file import read_metadata
from fp8_megatron.checkpoint.run_state import Progress, autoscales_of
from fp8_megatron.checkpoint.saving import CheckpointWriter
from fp8_megatron.config.schema import Config, ParallelConfig, PrecisionConfig
from fp8_megatron.dtypes import COMPANDED_DTYPES, GradReduceMode, StorageDtype
from fp8_megatron.kernels.quantize import blockwise
from fp8_megatron.kernels.reference import encode
from fp8_megatron.mcore.runtime import rng_states, runtime, seed_everything, set_rng_states
from fp8_megatron.optimizer.split_state import SplitSpaceState
from fp8_megatron.sharding.sharded_grads import ShardedGradBuffer
from tests.harness.ranks import RankError, RankPool
from tests.harness.tiny_checkpoint import TinyRun, run_tiny_on_a_rank, tiny_resumable, train_steps
from tests.harness.tiny_gpt import GPT3_STYLE, LLAMA_STYLE, tiny_config, tiny_optimizer

#: Buckets smaller than a space, so that every parameter is in several ranks' shards.
BUCKETS = ParallelConfig(ddp_bucket_size=1 << 15)
TP2 = replace(BUCKETS, tensor_model_parallel_size=2, sequence_parallel=True)
COMPANDED = PrecisionConfig(exp_avg_dtype=StorageDtype.INT8, exp_avg_sq_dtype=StorageDtype.UINT8)
SPLIT = replace(COMPANDED, main_params_dtype=StorageDtype.SPLIT)
FORMS = {
    "O3": PrecisionConfig(),
    "O1": PrecisionConfig(opt_level="O1"),
    "O2": PrecisionConfig(opt_level="O2"),
    "bf16": PrecisionConfig(precision="bf16"),
    "companded": COMPANDED,
    "split": SPLIT,
    "delayed": PrecisionConfig(fp8_recipe="delayed"),
    "fp8_master": PrecisionConfig(main_params_dtype=StorageDtype.FP8),
    "bf16_master": PrecisionConfig(main_params_dtype=StorageDtype.BF16, exp_avg_sq_dtype=StorageDtype.FP8),
}


def config_of(precision: PrecisionConfig, parallel: ParallelConfig = BUCKETS) -> Config:
    return tiny_config(replace(GPT3_STYLE, num_layers=1), precision=precision, parallel=parallel)


def run(
    ranks: RankPool,
    num_ranks: int,
    config: Config,
    num_steps: int,
    load: Path | None,
    save: Path | None,
    options: LoadOptions | None = None,
) -> list[TinyRun]:
    return ranks.run(run_tiny_on_a_rank, config, num_steps, load, save, options, 4, num_ranks=num_ranks)


def straight_run(ranks: RankPool, num_ranks: int, config: Config) -> list[TinyRun]:
    """Four steps that are neither saved nor resumed."""
    return ranks.run_once(run_tiny_on_a_rank, config, 4, None, None, None, 4, num_ranks=num_ranks)


def assert_goes_on(resumed: TinyRun, straight: TinyRun) -> None:
    """The resumed run is the end of the straight one."""
    assert resumed.losses == straight.losses[-len(resumed.losses) :]
    for name, value in straight.end.items():
        assert torch.equal(resumed.end[name], value), name


def _run_and_save_in_pieces(config: Config, num_steps: int, save: Path) -> TinyRun:
    """Parameters cut in small pieces, that lie in several files of a rank."""
    with (
        mock.patch.object(run_state, "_CHUNK_NUMEL", 1000),
        mock.patch.object(torch_dist, "_MIN_FILE_BYTES", 20_000),
        mock.patch.object(torch_dist, "_UNWRITTEN_BYTES", 30_000),
    ):
        return run_tiny_on_a_rank(config, num_steps, None, save, None, 4)


@pytest.mark.parametrize(
    ("parallel", "form"), [(BUCKETS, "split"), (TP2, "O3"), pytest.param(BUCKETS, "O3", marks=pytest.mark.slow)]
)
def test_state_is_written_in_pieces(ranks: RankPool, tmp_path: Path, parallel: ParallelConfig, form: str) -> None:
    """No chunk exceeds the limit, and the resumed run equals one that never stopped."""
    config = config_of(FORMS[form], parallel)
    straight = straight_run(ranks, 2, config)
    ranks.run(_run_and_save_in_pieces, config, 2, tmp_path, num_ranks=2)
    folder = tmp_path / "iter_0000002"
    assert {path.name for path in folder.glob("*.distcp")} == {
        f"__{rank}_{index}.distcp" for rank in range(2) for index in range(4)
    }
    chunks = [math.prod(chunk.sizes) for tensor in read_metadata(folder).values() for chunk in tensor.chunks]
    assert max(chunks) <= 1024  # the least that is whole rows of 128 or more elements and whole scale blocks
    for resumed, before in zip(run(ranks, 2, config, 2, tmp_path, None), straight, strict=True):
        assert_goes_on(resumed, before)


#: Each dtype of a master or a moment is in one of these, and so are both ways of scaling.
FAST = ("O3", "bf16", "split", "delayed", "bf16_master")


@pytest.mark.parametrize(
    "form", [form if form in FAST else pytest.param(form, marks=pytest.mark.slow) for form in FORMS]
)
def test_resuming_is_not_noticed(ranks: RankPool, tmp_path: Path, form: str) -> None:
    config = config_of(FORMS[form])
    straight = straight_run(ranks, 2, config)
    run(ranks, 2, config, 2, None, tmp_path)
    for resumed, expected in zip(run(ranks, 2, config, 2, tmp_path, None), straight, strict=True):
        assert_goes_on(resumed, expected)


def _run_with_small_codes(config: Config, num_steps: int, load: Path | None, save: Path | None) -> TinyRun:
    """Steps that store no value with the largest code: a GPU's do so for one block in some ten thousand."""

    def encode_below(x: Tensor, scale: Tensor, dtype: torch.dtype, noise: Tensor | None = None) -> Tensor:
        codes = encode(x, scale, dtype, noise)
        if noise is None or dtype not in COMPANDED_DTYPES:
            return codes
        most = torch.iinfo(dtype).max - 2
        return codes.clamp(-most if dtype is torch.int8 else 0, most)

    with mock.patch.object(blockwise, "encode", encode_below):
        return run_tiny_on_a_rank(config, num_steps, load, save, None, 4)


@pytest.mark.parametrize("form", ["companded", "split"])
def test_the_largest_value_of_a_block_may_have_any_code(ranks: RankPool, tmp_path: Path, form: str) -> None:
    config = config_of(FORMS[form])
    straight = ranks.run(_run_with_small_codes, config, 4, None, None, num_ranks=2)
    ranks.run(_run_with_small_codes, config, 2, None, tmp_path, num_ranks=2)
    resumed = ranks.run(_run_with_small_codes, config, 2, tmp_path, None, num_ranks=2)
    for end, expected in zip(resumed, straight, strict=True):
        assert_goes_on(end, expected)


def test_experts_in_blocks_go_on(ranks: RankPool, tmp_path: Path) -> None:
    """On two expert-parallel ranks."""
    sizes = {"moe_ffn_hidden_size": 128, "num_query_groups": 4, "seq_length": 64}
    model = replace(LLAMA_STYLE, num_layers=1, num_experts=4, **sizes)  # type: ignore[arg-type]
    parallel = replace(BUCKETS, expert_model_parallel_size=2, moe_token_dispatcher_type="alltoall")
    config = tiny_config(model, precision=PrecisionConfig(fp8_recipe="blockwise"), parallel=parallel)
    straight = straight_run(ranks, 2, config)
    run(ranks, 2, config, 2, None, tmp_path)
    for resumed, expected in zip(run(ranks, 2, config, 2, tmp_path, None), straight, strict=True):
        assert_goes_on(resumed, expected)


@pytest.mark.parametrize("rule", [("sgd", "nesterov=true"), ("lion",), ("muon",)], ids=["sgd", "lion", "muon"])
def test_resuming_is_not_noticed_by_other_rules(ranks: RankPool, tmp_path: Path, rule: tuple[str, ...]) -> None:
    optimizer = tiny_optimizer(lr=1e-3, optimizer=rule[0], optimizer_options=rule[1:], sgd_momentum=0.8)
    config = replace(config_of(PrecisionConfig()), optimizer=optimizer)
    straight = straight_run(ranks, 2, config)
    run(ranks, 2, config, 2, None, tmp_path)
    for resumed, expected in zip(run(ranks, 2, config, 2, tmp_path, None), straight, strict=True):
        assert_goes_on(resumed, expected)
    if rule[0] != "muon":
        with pytest.raises(RankError, match="another optimizer's state"):
            run(ranks, 2, config_of(PrecisionConfig()), 1, tmp_path, None)


@pytest.mark.parametrize(("first", "second"), [("adam", "muon"), ("muon", "adam")])
def test_adamw_and_muon_take_over_from_each_other(ranks: RankPool, tmp_path: Path, first: str, second: str) -> None:
    """Masters, and under Muon the moments of what both update with AdamW. The rest starts with zeros."""
    before, after = (
        replace(config_of(PrecisionConfig()), optimizer=tiny_optimizer(lr=1e-3, optimizer=name))
        for name in (first, second)
    )
    saved = run(ranks, 2, before, 3, None, tmp_path)[0].end
    taken = run(ranks, 2, after, 1, tmp_path, None)[0].start
    assert all(torch.equal(taken[key], value) for key, value in saved.items() if key.startswith("master"))
    is_matrix = {key: key.endswith("weight") and ".linear_" in key and taken[key].ndim > 1 for key in taken}
    moments = [key for key in taken if not key.startswith("master")]
    kept = [key for key in moments if second == "muon" and not is_matrix[key]]
    assert len(kept) > 4 or second == "adam"
    assert all(torch.equal(taken[key], saved[key]) for key in kept)
    assert len(moments) > len(kept) + 3 and not any(taken[key].any() for key in moments if key not in kept)


@pytest.mark.parametrize(
    ("num_ranks", "config"),
    [
        (4, config_of(SPLIT, TP2)),
        (2, config_of(PrecisionConfig(fp8_recipe="delayed"), TP2)),
        (2, config_of(PrecisionConfig(fp8_recipe="delayed", fp8_weight_grad_scaling="delayed"))),
        (2, config_of(PrecisionConfig(), replace(BUCKETS, fp8_grad_reduce=GradReduceMode.NCCL))),
    ],
    ids=["tp2_dp2-split", "tp2-delayed", "delayed_weight_grads", "native_sum"],
)
def test_resuming_is_not_noticed_in_other_layouts(
    ranks: RankPool, tmp_path: Path, num_ranks: int, config: Config
) -> None:
    straight = straight_run(ranks, num_ranks, config)
    run(ranks, num_ranks, config, 2, None, tmp_path)
    for resumed, expected in zip(run(ranks, num_ranks, config, 2, tmp_path, None), straight, strict=True):
        assert_goes_on(resumed, expected)


@pytest.mark.parametrize("form", ["O3", "split", pytest.param("companded", marks=pytest.mark.slow)])
def test_any_number_of_replicas_takes_over_every_bit(ranks: RankPool, tmp_path: Path, form: str) -> None:
    """Masters, moments, and the FP8 weights that are derived from them."""
    config = config_of(FORMS[form])
    straight = run(ranks, 2, config, 2, None, tmp_path)[0]
    weights = run(ranks, 2, config, 0, tmp_path, None)[0].weights
    for num_ranks in (1, 4):
        for loaded in run(ranks, num_ranks, config, 0, tmp_path, None):
            for name, value in straight.end.items():
                assert torch.equal(loaded.start[name], value), (num_ranks, name)
            for name, value in weights.items():
                assert torch.equal(loaded.weights[name], value), (num_ranks, name)


def test_ranks_that_share_sequences_take_over_every_bit(ranks: RankPool, tmp_path: Path) -> None:
    """Resuming is not noticed; a rank alone, replicas, and other ranks that share sequences have every bit too."""
    shared = {size: config_of(PrecisionConfig(), replace(BUCKETS, context_parallel_size=size)) for size in (1, 2, 4)}
    straight = straight_run(ranks, 2, shared[2])
    saved = run(ranks, 2, shared[2], 2, None, tmp_path)[0]
    for resumed, expected in zip(run(ranks, 2, shared[2], 2, tmp_path, None), straight, strict=True):
        assert_goes_on(resumed, expected)
    for num_ranks, size in ((1, 1), (2, 1), (4, 2), (4, 4)):
        for loaded in run(ranks, num_ranks, shared[size], 0, tmp_path, None):
            assert all(torch.equal(loaded.start[name], value) for name, value in saved.end.items()), (num_ranks, size)


def test_parts_that_are_not_taken(ranks: RankPool, tmp_path: Path) -> None:
    """--no-load-optim: moments from zero at the same iteration; --finetune: weights alone, iteration 0."""
    config = config_of(PrecisionConfig())
    saved = run(ranks, 2, config, 2, None, tmp_path)[0]
    for options, iteration in ((LoadOptions(optimizer=False), 2), (LoadOptions(finetune=True), 0)):
        loaded = run(ranks, 2, config, 0, tmp_path, None, options)[0]
        assert loaded.progress.iteration == iteration
        for name, value in saved.end.items():
            expected = value if name.startswith("master/") else torch.zeros_like(value)
            assert torch.equal(loaded.start[name], expected), (options, name)
            assert value.any(), name


def _native_sum_state(folder: Path, num_steps: int, load: bool) -> tuple[int, dict[str, torch.Tensor]]:
    """μ and what was seen to saturate by parameter, after loading or after training and saving; replicas."""
    parallel = replace(BUCKETS, fp8_grad_reduce=GradReduceMode.NCCL)
    config = config_of(PrecisionConfig(), parallel)
    with tiny_resumable(config, 4) as (gpt, state):
        if load:
            load_checkpoint(folder, state)
        else:
            train_steps(gpt, config, 0, num_steps, 4)
            for value in (buffer for buffer in gpt.optimizer.buffers if isinstance(buffer, ShardedGradBuffer)):
                for index, autoscale in enumerate(value.autoscales):
                    autoscale.mu.mul_(1 + index + 0.25 * torch.arange(autoscale.num_tensors))
            writer = CheckpointWriter(folder, gpt.topology)
            writer.save(state, Progress(num_steps))
            writer.finish()
        values = {name: torch.stack(parts, 1) for name, parts in autoscales_of(gpt.optimizer).items()}
        return gpt.topology.dp.size(), values


def test_mu_is_taken_over(ranks: RankPool, tmp_path: Path) -> None:
    """Under the same layout to the bit and by bucket; under more replicas the least μ of a tensor, over them."""
    saved = ranks.run(_native_sum_state, tmp_path, 2, False, num_ranks=2)
    assert len({value[0, 0].item() for value in saved[0][1].values()}) > 2
    again = ranks.run(_native_sum_state, tmp_path, 0, True, num_ranks=2)
    for (_, loaded), (_, expected) in zip(again, saved, strict=True):
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    for _, loaded in ranks.run(_native_sum_state, tmp_path, 0, True, num_ranks=4):
        for name, value in saved[0][1].items():
            assert torch.equal(loaded[name][0], (value[0].min() / 2).expand_as(loaded[name][0])), name


def _split_scales(folder: Path, load: bool) -> dict[str, tuple[float, torch.Tensor]]:
    """Scale and payload of every split weight, with scales that the values alone would not give."""
    config = config_of(SPLIT)
    with tiny_resumable(config, 4) as (gpt, state):
        spaces = [(space, slot) for space, slot in gpt.optimizer.slots() if isinstance(space, SplitSpaceState)]
        if load:
            load_checkpoint(folder, state)
        else:
            for space, slot in spaces:
                space.set_master(slot, space.get_master(slot), 4.0 * space.scale_of(slot))
            writer = CheckpointWriter(folder, gpt.topology)
            writer.save(state, Progress(1))
            writer.finish()
        return {slot.name: (space.scale_of(slot).item(), slot.param.dequantize()) for space, slot in spaces}


def test_scales_of_split_masters_are_taken_over(ranks: RankPool, tmp_path: Path) -> None:
    saved = ranks.run(_split_scales, tmp_path, False, num_ranks=2)[0]
    assert saved
    for num_ranks in (2, 1):
        for loaded in ranks.run(_split_scales, tmp_path, True, num_ranks=num_ranks):
            for name, (scale, weight) in saved.items():
                assert loaded[name][0] == scale and torch.equal(loaded[name][1], weight), name


#: What a GPU's generators give: a seed and an offset.
GPU_STATES = {
    "cpu": torch.Generator().manual_seed(3).get_state(),
    "cuda": torch.arange(16, dtype=torch.uint8),
    "tracker/model-parallel-rng": torch.arange(16, dtype=torch.uint8),
}


def test_random_states_of_another_kind_of_device_are_not_taken() -> None:
    """A GPU's generators take no state of a CPU's, nor the other way round."""
    device = torch.device("cpu")
    with runtime(device), torch.random.fork_rng(devices=[]):
        seed_everything(1, device, tensor_parallel_rank=0, pipeline_rank=0)
        before = rng_states(device)
        assert not set_rng_states(GPU_STATES, device)
        assert not set_rng_states(before, torch.device("cuda"))
        after = rng_states(device)
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        with get_cuda_rng_tracker().fork():
            torch.rand(1)
        assert not torch.equal(rng_states(device)["tracker/model-parallel-rng"], before["tracker/model-parallel-rng"])
        assert set_rng_states(before, device)
        assert torch.equal(rng_states(device)["tracker/model-parallel-rng"], before["tracker/model-parallel-rng"])
