"""Steps launched as one CUDA graph are the steps that Python launches, bit for bit."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch

from fp8_megatron.config.io import parse_config
from fp8_megatron.device import memory as device_memory
from fp8_megatron.reporting.metrics_file import METRICS_FILE, read_rows
from fp8_megatron.training import graph_choice
from fp8_megatron.training.trainer import Trainer
from tests.harness.chat_tokenizer import save_chat_tokenizer, talk, write_lines
from tests.harness.runs import EXPERT_FLAGS, GPU_RUN, LLAMA_STYLE_FLAGS, tiny_flags
from tests.harness.token_files import write_token_files

pytestmark = pytest.mark.gpu

MODEL = {
    **GPU_RUN,
    "train_iters": 14,
    # Some steps measure underflow, some are followed by validation: recorded steps, and steps as they are, in turn.
    "log_interval": 4,
    "eval_interval": 5,
    "eval_iters": 2,
    "deterministic_mode": True,
}
FAST = {"fp8_recipe": "delayed", "fp8_weight_grad_scaling": "delayed", "fp8_lm_head": True}
PYTHON, GRAPH = ({"cuda_graph_impl": impl} for impl in ("none", "local"))


def fit(output_dir: Path, **overrides: object) -> list[dict]:
    """The metrics of a run on random tokens, without times."""
    Trainer(parse_config(tiny_flags(output_dir, **{**MODEL, **overrides}))).fit()
    kept = ("kind", "iteration", "loss", "grad_norm", "loss_scale")
    return [{name: record.get(name) for name in kept} for record in read_rows(output_dir / METRICS_FILE)]


def underflow(output_dir: Path) -> dict[int, float]:
    """Measured underflow by step."""
    records = [record for record in read_rows(output_dir / METRICS_FILE) if record["kind"] == "train"]
    return {
        r["iteration"]: r["grad_underflow_fraction"] for r in records if r.get("grad_underflow_fraction") is not None
    }


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"opt_level": "O1"},
        {"opt_level": "O3"},
        {"opt_level": "O3", **LLAMA_STYLE_FLAGS, "global_batch_size": 12},
        {"opt_level": "O3", **FAST},
        {"opt_level": "O3", "fp8_recipe": "blockwise"},
        {"opt_level": "O3", **FAST, "global_batch_size": 12, "keep_fp8_transpose_cache": 2},
        {"opt_level": "O3", "main_params_dtype": "split", "exp_avg_dtype": "fp8"},
        {"opt_level": "O3", "hidden_dropout": 0.1, "attention_dropout": 0.1},
        {"opt_level": "O3", **FAST, "recompute_granularity": "selective", "recompute_modules": ["mlp"]},
        {"opt_level": "O3", "squared_relu": True, "window_size": "64,0", "window_attn_skip_freq": "2"},
        {"opt_level": "O3", "seq_length": 200},  # no multiple of 128: see `fp8_megatron.device.cudnn`
        {"opt_level": "O3", **EXPERT_FLAGS},
        {"opt_level": "O3", **EXPERT_FLAGS, "global_batch_size": 12, "moe_expert_capacity_factor": 1.0},
        {"opt_level": "O3", **EXPERT_FLAGS, "fp8_recipe": "blockwise", "ffn_hidden_size": 1408},
    ],
    ids=[
        "bf16",
        "fp16",
        "O1",
        "O3",
        "llama-accumulation",
        "fast",
        "blockwise",
        "fast-accumulation",
        "split",
        "dropout",
        "recomputed-mlps",
        "window",
        "seq-200",
        "experts",
        "experts-capacity",
        "experts-blockwise",
    ],
)
def test_recorded_steps_train_bit_for_bit(tmp_path: Path, settings: dict) -> None:
    expected = fit(tmp_path / "python", **settings, **PYTHON)
    assert fit(tmp_path / "graph", **settings, **GRAPH) == expected
    measured = underflow(tmp_path / "graph")
    for iteration, fraction in underflow(tmp_path / "python").items():
        assert measured[iteration] == fraction


@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_recorded_steps_with_documents_train_bit_for_bit(tmp_path: Path, micro_batch_size: int) -> None:
    """Documents of 130 to 400 tokens: other numbers of them from batch to batch, within the room of a recording."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(130, 400, 90)
    write_token_files(tmp_path / "text", [[*rng.integers(1, 1024, size=length).tolist(), 0] for length in lengths])
    text = {"mock_data": None, "tokenizer_type": "NullTokenizer", "null_tokenizer_eod_id": 0, "split": "90,10,0"}
    settings = {**text, "data_path": [str(tmp_path / "text")], "reset_attention_mask": True, **LLAMA_STYLE_FLAGS}
    settings["micro_batch_size"] = micro_batch_size
    expected = fit(tmp_path / "python", **settings, **PYTHON)
    assert fit(tmp_path / "graph", **settings, **GRAPH) == expected
    crossed = fit(tmp_path / "crossed", **{**settings, "reset_attention_mask": False}, **PYTHON)
    # A batch may hold one document alone.
    assert [step["loss"] for step in crossed] != [step["loss"] for step in expected]


def test_recorded_steps_with_conversations_train_bit_for_bit(tmp_path: Path) -> None:
    """Samples of several conversations, other numbers of them from batch to batch; answers alone count."""
    pytest.importorskip("transformers")
    rng = np.random.default_rng(1)
    lines = [talk("q" * int(size), "a" * int(size)) for size in rng.integers(5, 60, 200)]
    text = {"mock_data": None, "tokenizer_type": "HuggingFaceTokenizer", "sft": True, "split": "90,10,0"}
    text["tokenizer_model"] = save_chat_tokenizer(tmp_path / "tokenizer")
    settings = {**text, "data_path": [write_lines(tmp_path / "chats.jsonl", lines)], **LLAMA_STYLE_FLAGS}
    settings |= {"micro_batch_size": 2, "global_batch_size": 4, "calculate_per_token_loss": True}
    expected = fit(tmp_path / "python", **settings, **PYTHON)
    assert fit(tmp_path / "graph", **settings, **GRAPH) == expected
    losses = [record["loss"] for record in expected if record["kind"] == "train"]
    assert losses[-1] < losses[0] - 1.0


@pytest.mark.parametrize("has_memory", [True, False])
def test_by_default_small_layers_are_recorded_where_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, has_memory: bool
) -> None:
    if not has_memory:
        monkeypatch.setattr(graph_choice, "_MEMORY_FACTOR", 1e9)
    with caplog.at_level("INFO", logger="fp8_megatron"):
        measured = fit(tmp_path / "default")
    assert "steps are recorded as a CUDA graph: a layer has 0.0 TFLOP" in caplog.text
    assert ("recorded a step as a CUDA graph in" in caplog.text) == has_memory
    assert ("steps are not recorded as a CUDA graph: " in caplog.text) == (not has_memory)
    assert measured == fit(tmp_path / "python", **PYTHON)


def test_resumes_bit_for_bit(tmp_path: Path) -> None:
    """A graph recorded by a resumed run goes on where another run's stopped, random generators too."""
    settings = {**FAST, "hidden_dropout": 0.1}
    straight = fit(tmp_path / "straight", **settings, **GRAPH)
    saving = {"save": tmp_path / "checkpoints", "save_interval": 3, "async_save": True}
    fit(tmp_path / "halves", exit_interval=7, **saving, **settings, **GRAPH)
    assert fit(tmp_path / "halves", load=tmp_path / "checkpoints", **saving, **settings, **GRAPH) == straight
    # Random states of either kind go on in the other.
    resumed = fit(tmp_path / "python", load=tmp_path / "checkpoints", ckpt_step=7, **settings, **PYTHON)
    assert resumed == [record for record in straight if record["iteration"] > 7]


def test_holds_no_more_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations of warm-up and both recordings are not held beside each other; peak in GiB, all counted."""
    peaks = {}
    settings = {
        "eval_interval": 0,
        "num_layers": 8,
        "hidden_size": 1024,
        "seq_length": 512,
        "micro_batch_size": 16,
        "vocab_size": 8192,
    }
    settings |= {"deterministic_mode": False}
    for name, graph in (("python", PYTHON), ("graph", GRAPH)):
        gc.collect()  # the trainer before is in cycles, with a model's memory
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        monkeypatch.setattr(device_memory, "_earlier_peak_gib", 0.0)
        Trainer(parse_config(tiny_flags(tmp_path / name, **{**MODEL, **settings, **graph}))).fit()
        records = [r for r in read_rows(tmp_path / name / METRICS_FILE) if r["kind"] == "train"]
        peaks[name] = records[-1]["peak_memory_gib"]
    assert peaks["graph"] < 1.15 * peaks["python"], peaks
