"""The predicted peak is that of the allocator in every recorded run on GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8_megatron.commands.run_settings import LEVELS
from fp8_megatron.config.io import parse_config
from fp8_megatron.config.schema import Config
from fp8_megatron.models.registry import architecture_of
from fp8_megatron.planning.activations import predict_host_bytes, predict_peak
from fp8_megatron.planning.memory import padded_vocab_size
from tests.planning.recorded_runs import ROOT, RecordedRun, read, recorded_runs

#: Runs of code that held more than today's: recordings that held all messages between stages, and what autograd kept of
#: the activation of experts in 16 bits.
OLDER = {
    "moe_mixtral_h200.json: bf16": 0.8977,
    "moe_qwen3_micro2_h200.json: bf16": 0.9460,
    "gpt7b_pp4_4h200.json: O3-fast, two chunks a stage": 0.9157,
    "gpt7b_16layers_pp2_2h200.json: recorded, every message held": 0.8819,
}
#: Predicted over measured of GPT-345M's recorded runs with validation. O3's recording has gaps of 2.2 GB.
WITH_VALIDATION = {"bf16": 0.994, "fast": 0.992, "O3": 0.909}
RUNS = recorded_runs()


def _over_measured(run: RecordedRun) -> float:
    vocab = padded_vocab_size(run.config)
    return predict_peak(run.config, vocab, world_size=run.world_size, records=run.records).total / 1e9 / run.peak_gb


def test_there_are_runs() -> None:
    assert len(RUNS) > 40 and len({run.file for run in RUNS}) > 10
    assert {run.config.precision.level for run in RUNS} >= {"O3", "bf16"}


@pytest.mark.parametrize("run", [run for run in RUNS if run.label not in OLDER], ids=lambda run: run.label)
def test_within_5_percent_of_the_allocator(run: RecordedRun) -> None:
    assert 0.95 < _over_measured(run) < 1.01


def test_long_sequences_within_5_percent_of_the_allocator() -> None:
    """Llama-3-8B: all recomputed, 31 layers' inputs on the host, the loss and the MLPs in chunks of 8,192."""
    (row,) = read("long_sequences_h200.json")["rows"]
    config = parse_config(
        f"--config {ROOT}/configs/llama_8b.yaml {ROOT}/configs/fast.yaml --mock-data --cuda-graph-impl none "
        f"--seq-length {row['tokens']} --micro-batch-size 1 --global-batch-size 1 --cpu-offloading-num-layers 31 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --loss-chunk-size 8192 "
        f"--mlp-chunks-for-training {row['tokens'] // 8192}".split()
    )
    predicted = predict_peak(config, padded_vocab_size(config), world_size=1).total / 1e9
    assert 0.95 < predicted / row["peak_gb"] < 1.01


@pytest.mark.parametrize("level", WITH_VALIDATION)
def test_recorded_runs_with_validation(level: str) -> None:
    """A recording's memory serves no validation."""
    flags = [*("--config", str(ROOT / "configs" / "gpt_345m.yaml"), "--vocab-size", "32000"), *LEVELS[level]]
    config = parse_config([*flags, "--mock-data", "--eval-interval", "612"])
    predicted = predict_peak(config, 32000, world_size=1, records=True).total
    rows = read("parity_gpt_345m_h200.json")["results"]
    measured = next(row for row in rows if row["name"] == level)["peak_memory_gib"] * 2**30
    assert predicted / measured == pytest.approx(WITH_VALIDATION[level], abs=0.001)


@pytest.mark.parametrize("label", OLDER)
def test_known_differences(label: str) -> None:
    run = next(run for run in RUNS if run.label == label)
    assert _over_measured(run) == pytest.approx(OLDER[label], abs=0.001)


def test_stages_hold_the_micro_batches_in_flight() -> None:
    """GPT-175B over 16 stages, plain 1F1B: stage s holds 16 - s micro-batches, and only the last has logits.

    With an LM head in FP8, backward of a layer takes more than they do.
    """
    config = parse_config(["--config", str(ROOT / "configs" / "gpt_175b.yaml"), "--mock-data", "--no-fp8-lm-head"])
    peaks = [predict_peak(config, 51200, world_size=128, stage=stage) for stage in range(16)]
    assert [round(16 * peak.activations / peaks[0].activations, 6) for peak in peaks] == list(range(16, 0, -1))
    assert [stage for stage, peak in enumerate(peaks) if peak.logits] == [15]
    # 20 bytes of an element, over 8 ranks; norm statistics and log-sum-exps are 50 bytes beside 30,720.
    assert peaks[15].activations == pytest.approx(6 * 2048 * 12288 * 20 / 8, rel=2e-3)


def test_an_interleaved_stage_holds_more() -> None:
    """With v virtual stages the first stage holds 1 + (p - 1) / (p·v) times as much (arXiv 2104.04473, section 2.2)."""
    config = parse_config(["--config", str(ROOT / "configs" / "gpt_175b.yaml"), "--mock-data"])
    interleaved = replace(config, parallel=replace(config.parallel, num_layers_per_virtual_pipeline_stage=2))
    plain, virtual = (predict_peak(one, 51200, world_size=128).activations for one in (config, interleaved))
    assert virtual / plain == pytest.approx(1 + 15 / (16 * 3), rel=1e-6)


def test_ranks_that_share_sequences_share_what_they_keep() -> None:
    """Activations and logits of a quarter of the tokens; the optimizer is sharded over all eight ranks either way."""
    flags = ["--mock-data", "--global-batch-size", "16"]
    config = parse_config(["--config", str(ROOT / "configs" / "llama_8b.yaml"), *flags])
    shared = replace(config, parallel=replace(config.parallel, context_parallel_size=4))
    whole, part = (predict_peak(one, 128256, world_size=8) for one in (config, shared))
    assert part.activations == pytest.approx(whole.activations / 4, rel=1e-9)
    assert part.state == whole.state and part.wire_buffers == whole.wire_buffers
    # The gradient of the head's weight is whole. It is made from that of the logits, in a byte, and is more than them.
    assert part.logits == 128256 * 2048 + 2 * 4096 * 128256 + 2 * 4096 * 2048
    assert part.tables == whole.tables // 4 == 2048 * 128 * 4


@pytest.mark.parametrize(("fp8_attention", "columns"), [(False, 4096 + 1024), (True, 4096 + 2 * 1024)])
def test_norms_of_query_and_key_keep_their_inputs(fp8_attention: bool, columns: int) -> None:
    """In 16 bits. Attention in 16 bits keeps the value beside them anyway; tests/nn/test_fp8_attention.py counts the
    bytes of FP8 attention."""
    flags = ["--fp8-recipe", "delayed"] + (["--fp8-dot-product-attention"] if fp8_attention else [])
    config = parse_config(["--config", str(ROOT / "configs" / "llama_8b.yaml"), "--mock-data", *flags])
    normed = replace(config, model=replace(config.model, qk_layernorm=True))
    plain, more = (architecture_of(one.model).kept_bytes(one, 0) for one in (config, normed))
    assert more - plain == 2 * columns


def test_recomputed_mlps_keep_no_input_of_their_activation() -> None:
    """Of 20 bytes of an element, 8 are the MLP's. None has them while the logits exist."""
    config = parse_config(["--config", str(ROOT / "configs" / "gpt_7b.yaml"), "--mock-data"])
    training = replace(config.training, recompute_granularity="selective", recompute_modules=("mlp", "core_attn"))
    plain, held = (
        predict_peak(one, 50304, world_size=4).activations for one in (config, replace(config, training=training))
    )
    assert plain - held == 4 * 2048 * 4096 * 8 * 32


def test_recomputation_keeps_the_inputs_of_layers() -> None:
    """Two bytes of an element for each of 32 layers, and 20 bytes for the one that is recomputed."""
    config = parse_config(["--config", str(ROOT / "configs" / "gpt_7b.yaml"), "--mock-data"])
    training = replace(
        config.training, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
    )
    recomputed = replace(config, training=training)
    held = predict_peak(recomputed, 50304, world_size=4).activations
    assert held == pytest.approx(4 * 2048 * 4096 * (32 * 2 + 20), rel=1e-3)


def _llama_8b(**training: object) -> Config:
    config = parse_config(["--config", str(ROOT / "configs" / "llama_8b.yaml"), "--mock-data", "--fp8-lm-head"])
    changed = replace(config.training, global_batch_size=1, **training)  # type: ignore[arg-type]
    return replace(config, training=changed)


#: Bytes of a token and layer: x, query, output and x in 4,096 columns, key and value in 1,024, the MLP's input in
#: 28,672, all BF16; statistics of two norms and 32 heads in FP32.
KEPT = 2 * (4 * 4096 + 2 * 1024 + 28672) + 16 + 4 * 32


@pytest.mark.parametrize(("count", "on_device"), [(0, 32), (20, 12), (30, 2), (31, 1), (32, 1)])
def test_layers_that_leave_are_on_the_host(count: int, on_device: int) -> None:
    """While the logits exist, the device has the layers that stay; or the last one, on its way."""
    config = _llama_8b(cpu_offloading_num_layers=count)
    assert predict_peak(config, 128256, world_size=1).activations == 8192 * KEPT * on_device
    assert predict_host_bytes(config, world_size=1) == 8192 * KEPT * count


@pytest.mark.parametrize(("group", "inputs", "again"), [(1, 4, 0), (4, 2, 4)])
def test_inputs_of_recomputed_layers_leave(group: int, inputs: int, again: int) -> None:
    """Four layers stay. In groups of one the logits are more than a layer's backward. Four at once are more than the
    logits, and while they run backward the input of the group before arrives."""
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": group}
    config = _llama_8b(cpu_offloading_num_layers=28, **full)
    assert predict_host_bytes(config, world_size=1) == 8192 * 2 * 4096 * 28 // group
    peak = predict_peak(config, 128256, world_size=1)
    assert peak.activations == 8192 * (2 * 4096 * inputs + KEPT * again)
    assert bool(peak.logits) == (again == 0) and bool(peak.backward) == (again > 0)


def test_the_host_holds_the_micro_batches_in_flight() -> None:
    config = parse_config(["--config", str(ROOT / "configs" / "gpt_175b.yaml"), "--mock-data"])
    moved = replace(config, training=replace(config.training, cpu_offloading_num_layers=3))
    bytes_of = [predict_host_bytes(moved, world_size=128, stage=stage) for stage in (0, 15)]
    assert bytes_of[0] == pytest.approx(16 * bytes_of[1], rel=1e-6)
    first, last = (predict_peak(one, 51200, world_size=128, stage=0).activations for one in (config, moved))
    assert last == pytest.approx(first / 2, rel=1e-6)  # three of six layers


def test_the_loss_over_chunks_has_the_logits_of_one() -> None:
    """FP8 head: 8 parts of the vocabulary. The weight's gradient is added in FP32, and the input's is whole."""
    whole, chunks = (predict_peak(_llama_8b(loss_chunk_size=size), 128256, world_size=1) for size in (None, 4096))
    final_input = 2 * 8192 * 4096
    assert whole.logits == 2 * 8192 * 128256 * 9 // 8 + final_input
    # The gradient of a chunk's weight, from that of its logits in a byte, is more than the logits in parts.
    weight = 128256 * 4096
    assert chunks.logits == 4096 * 128256 + 2 * weight + 4 * weight + 2 * 8192 * 4096 + final_input
