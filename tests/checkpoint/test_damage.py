"""Every damaged, missing or foreign file is found before training, and named."""

from __future__ import annotations

import logging
import random
import shutil
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fp8_megatron.checkpoint import manifest
from fp8_megatron.checkpoint.files import CheckpointError
from fp8_megatron.checkpoint.loading import LoadOptions, load_checkpoint
from fp8_megatron.checkpoint.manifest import (
    FileEntry,
    problem_with,
    read_manifest,
    write_file,
    write_manifest,
)
from fp8_megatron.checkpoint.saved_run import differing_setting
from fp8_megatron.config.schema import ModelConfig, ParallelConfig, PrecisionConfig
from tests.harness.ranks import RankError, RankPool
from tests.harness.tiny_checkpoint import run_tiny_on_a_rank, tiny_resumable, whole_state
from tests.harness.tiny_gpt import GPT3_STYLE, tiny_config

MODEL = replace(GPT3_STYLE, num_layers=1)
CONFIG = tiny_config(MODEL, precision=PrecisionConfig(fp8_recipe="delayed"))


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {"truncated": _truncate, "flipped": _flip_a_bit, "missing": Path.unlink}


@pytest.mark.parametrize("size", [999, 1000, 1001, 4 * 1000, 12_345])
def test_a_file_is_summed_up_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """A flipped bit is found in any piece, and so is a file that shrinks while it is read."""
    monkeypatch.setattr(manifest, "_PIECE_BYTES", 1000)
    monkeypatch.setattr(manifest, "_READ_BYTES", 300)
    monkeypatch.setattr(manifest, "_WRITEBACK_BYTES", 500)
    content = random.Random(size).randbytes(size)
    record = write_file(tmp_path, "file", content)
    assert record.checksum == f"{zlib.crc32(content):08x}"
    assert problem_with(tmp_path, record) is None
    for place in (0, size // 3, size - 1):
        damaged = bytearray(content)
        damaged[place] ^= 1
        (tmp_path / "file").write_bytes(damaged)
        assert "is damaged: its crc32 is" in (problem_with(tmp_path, record) or "")
    (tmp_path / "file").write_bytes(content[:-1])
    with pytest.raises(OSError, match="became shorter"):
        manifest._checksum_of_file(tmp_path / "file", size)


def _load_damaged(root: Path) -> list[str]:
    """The error of loading, for every damage of every file; the model stays unchanged."""
    folder = root / "iter_0000002"
    messages = []
    with tiny_resumable(CONFIG, 2) as (gpt, state):
        before = whole_state(gpt)
        for path in sorted(folder.iterdir()):
            for damage in DAMAGES.values():
                content = path.read_bytes()
                damage(path)
                try:
                    load_checkpoint(root, state)
                except CheckpointError as error:
                    assert path.name in str(error), error
                    messages.append(str(error))
                path.write_bytes(content)
        after = whole_state(gpt)
        assert all(torch.equal(after[name], value) for name, value in before.items())
        assert load_checkpoint(root, state) is not None
    return messages


def test_every_damage_of_every_file_is_found(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(run_tiny_on_a_rank, CONFIG, 2, None, tmp_path, num_ranks=2)
    files = sorted(path.name for path in (tmp_path / "iter_0000002").iterdir())
    assert files == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "checkpoint.json",
        "config.yaml",
        "manifest.json",
        "metadata.json",
        "rank_tp00_pp000_dp0000.safetensors",
        "rank_tp00_pp000_dp0001.safetensors",
    ]
    (messages,) = ranks.run(_load_damaged, tmp_path, num_ranks=1)
    assert len(messages) == len(DAMAGES) * len(files)


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_an_older_one_is_taken_instead(
    ranks: RankPool, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One of two ranks verifies the damaged file; both take the older one. A damaged one that is named by number is an
    error.
    """
    ranks.run(run_tiny_on_a_rank, CONFIG, 2, None, tmp_path, num_ranks=1)
    ranks.run(run_tiny_on_a_rank, CONFIG, 2, tmp_path, tmp_path, num_ranks=1)
    DAMAGES[damage](tmp_path / "iter_0000004" / "__0_0.distcp")
    for run in ranks.run(run_tiny_on_a_rank, CONFIG, 1, tmp_path, None, num_ranks=2):
        assert run.progress.iteration == 2
    with pytest.raises(
        RankError, match=r"iter_0000004/__0_0.distcp is .*; use another iteration \(--ckpt-step\), there are: 2"
    ):
        ranks.run(run_tiny_on_a_rank, CONFIG, 1, tmp_path, None, LoadOptions(iteration=4), num_ranks=2)
    DAMAGES[damage](tmp_path / "iter_0000002" / "metadata.json")
    with pytest.raises(
        RankError, match=r"all 2 checkpoints under .* are damaged: restore one from a copy, or start wi"
    ):
        ranks.run(run_tiny_on_a_rank, CONFIG, 1, tmp_path, None, num_ranks=2)


def _load_and_log(root: Path) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fp8_megatron.checkpoint")
    logger.addHandler(handler)
    with tiny_resumable(CONFIG, 2) as (_, state):
        load_checkpoint(root, state)
    logger.removeHandler(handler)
    return lines


def test_what_is_ignored_is_said(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(run_tiny_on_a_rank, CONFIG, 2, None, tmp_path, num_ranks=1)
    ranks.run(run_tiny_on_a_rank, CONFIG, 2, tmp_path, tmp_path, num_ranks=1)
    shutil.copytree(tmp_path / "iter_0000004", tmp_path / "iter_0000006.tmp")
    (tmp_path / "iter_0000004" / "metadata.json").unlink()
    (lines,) = ranks.run(_load_and_log, tmp_path, num_ranks=1)
    assert lines == [
        f"ignoring {tmp_path}/iter_0000006.tmp: saving it was cut short",
        f"ignoring {tmp_path}/iter_0000004, trying iter_0000002: checkpoint file "
        f"{tmp_path}/iter_0000004/metadata.json is missing",
    ]


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one rank, to be read alone."""
    folder = tmp_path_factory.mktemp("saved")
    ranks.run(run_tiny_on_a_rank, CONFIG, 2, None, folder, num_ranks=1)
    return folder


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (
            replace(MODEL, hidden_size=64),
            r"embedding\.word_embeddings\.weight has shape \(256, 128\), this model's is \(256, 64\)",
        ),
        (replace(MODEL, num_layers=2), r"decoder\.layers\..* has shape \(1, .*\), this model's is \(2, .*\)"),
        (replace(MODEL, ffn_hidden_size=256), r"mlp\.linear_fc1\.weight has shape \(1, 512, 128\), .* \(1, 256, 128\)"),
        (
            replace(MODEL, untie_embeddings_and_output_weights=True),
            r"has no tensor 'output_layer.weight', which this model has: it is another model's",
        ),
        (replace(MODEL, disable_bias_linear=True), r"holds 'decoder.*bias', which this model has not: it is another"),
        (
            replace(MODEL, num_attention_heads=8),
            r"iter_0000002 was saved with num_attention_heads\(4\), this run has num_attention_heads\(8\), .*; "
            r"give --num-attention-heads 4",
        ),
    ],
    ids=["width", "depth", "ffn", "head", "biases", "attention heads"],
)
def test_another_models_checkpoint(ranks: RankPool, saved: Path, model: ModelConfig, expected: str) -> None:
    """The first tensor or setting that differs is named with both shapes or values, alike on every rank."""
    config = tiny_config(model, parallel=ParallelConfig(tensor_model_parallel_size=2))
    with pytest.raises(RankError, match=expected) as error:
        ranks.run(run_tiny_on_a_rank, config, 1, saved, None, num_ranks=2)
    assert "then rank" not in str(error.value) or "CheckpointError" in str(error.value).splitlines()[-1]


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "model:",
        "[4]",
        "model: [4]",
        "model: {num_layers: 1, num_attention_heads: 4, an_older_one: 3}",
        "model: {num_layers: one, num_attention_heads: 4, hidden_size: [64]}",
        "model: {num_attention_heads: four, norm_epsilon: null}",
        "model: {",
        "\xff",
        "model: !!python/object/apply:os.mkdir [{}]",
    ],
)
def test_settings_that_cannot_be_read(tmp_path: Path, content: str | None) -> None:
    """Without readable settings all count as equal, and so do those that have no value here. Nothing is executed."""
    if content is not None:
        text = content.replace("{}", str(tmp_path / "made"))
        (tmp_path / "config.yaml").write_bytes(text.encode("latin-1"))
    assert differing_setting(tmp_path, MODEL) is None
    assert not (tmp_path / "made").exists()


def test_a_checkpoint_under_another_iterations_name(saved: Path, tmp_path: Path) -> None:
    """Its run would go on from an iteration that nobody asked for."""
    shutil.copytree(saved / "iter_0000002", tmp_path / "iter_0000009")
    with (
        tiny_resumable(CONFIG, 2) as (_, state),
        pytest.raises(CheckpointError, match=r"iter_0000009/checkpoint.json is of iteration 2, its folder is named"),
    ):
        load_checkpoint(tmp_path, state, LoadOptions(iteration=9))


def test_a_manifest_names_files_of_its_folder_alone(tmp_path: Path) -> None:
    write_manifest(tmp_path, [FileEntry("../x", 1, "00000000")])
    with pytest.raises(CheckpointError, match=r"'\.\./x', which is not in its folder"):
        read_manifest(tmp_path)
