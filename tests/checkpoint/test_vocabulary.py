"""A vocabulary that another tensor-parallel size pads differently: tokens' rows stay, padding rows are added or
dropped.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fp8_megatron.checkpoint.placement import Placement
from fp8_megatron.checkpoint.saved_run import Elements, SavedRun
from fp8_megatron.config.io import parse_config
from fp8_megatron.reporting.metrics_file import METRICS_FILE, read_rows
from fp8_megatron.sharding.region import Region
from fp8_megatron.training.trainer import Trainer
from tests.harness.ranks import RankError, RankPool
from tests.harness.runs import tiny_flags

KEY = "embedding.word_embeddings.weight"


def _fit(output_dir: Path, overrides: dict) -> list[float]:
    Trainer(parse_config(tiny_flags(output_dir, **overrides))).fit()
    records = read_rows(output_dir / METRICS_FILE)
    return [record["loss"] for record in records if record["kind"] == "train"]


def fit(ranks: RankPool, output_dir: Path, num_ranks: int, **overrides: object) -> list[float]:
    return ranks.run(_fit, output_dir, overrides, num_ranks=num_ranks)[0]


#: 40 tokens: 48 rows on one rank, 64 on two.
SETTINGS = {"vocab_size": 40, "make_vocab_size_divisible_by": 16, "ffn_hidden_size": 256, "hidden_size": 64}


def whole(folder: Path, key: str) -> torch.Tensor:
    return SavedRun(folder).reader.read_whole(key)


def test_padding_comes_and_goes(ranks: RankPool, tmp_path: Path) -> None:
    fit(ranks, tmp_path / "one", 1, save=tmp_path / "saved", train_iters=3, **SETTINGS)
    first = tmp_path / "saved" / "iter_0000003"
    resumed = {"load": tmp_path / "saved", "train_iters": 4, "exit_interval": 1, **SETTINGS}
    fit(ranks, tmp_path / "two", 2, save=tmp_path / "saved2", tensor_model_parallel_size=2, **resumed)
    second = tmp_path / "saved2" / "iter_0000004"
    assert whole(first, KEY).shape == (48, 64) and whole(second, KEY).shape == (64, 64)
    resumed |= {"load": tmp_path / "saved2", "train_iters": 5}
    fit(ranks, tmp_path / "back", 1, save=tmp_path / "saved3", **resumed)
    third = tmp_path / "saved3" / "iter_0000005"
    # A step moves a weight by about the learning rate, so rows are still those that were saved.
    for key in (KEY, f"optimizer.exp_avg.{KEY}"):
        for before, after in ((first, second), (second, third)):
            a, b = whole(before, key)[:40], whole(after, key)[:40]
            assert torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.5, key
    assert whole(third, KEY).shape == (48, 64)


def test_new_padding_is_the_old_paddings(ranks: RankPool, tmp_path: Path) -> None:
    """New padding rows copy trained ones (unlikely tokens); without any they are zero."""
    fit(ranks, tmp_path, 1, save=tmp_path, train_iters=3, **SETTINGS)
    fit(ranks, tmp_path / "full", 1, save=tmp_path / "full", train_iters=3, **{**SETTINGS, "vocab_size": 48})
    for folder, last_is_padding in ((tmp_path, True), (tmp_path / "full", False)):
        saved = SavedRun(folder / "iter_0000003")
        table = saved.reader.read_whole(KEY)
        placement = Placement(KEY, Region((32, 64), axis=0, rank=1, size=2))
        # The whole, and a fragment that begins inside of the padding, and inside of a row.
        wanted = [Elements(placement, "master", 0, 32 * 64), Elements(placement, "master", 20 * 64 + 3, 200)]
        whole, fragment = saved.read(wanted)
        part = whole.view(32, 64)
        assert torch.equal(part[:16], table[32:])
        assert torch.equal(part[16:], table[47].expand(16, 64) if last_is_padding else torch.zeros(16, 64))
        assert torch.equal(fragment, part.flatten()[20 * 64 + 3 :][:200])


def test_another_vocabulary_is_another_model(ranks: RankPool, tmp_path: Path) -> None:
    """50 tokens have other rows; 41 are padded to the same rows as 40."""
    fit(ranks, tmp_path, 1, save=tmp_path, train_iters=1, **SETTINGS)
    resumed = {**SETTINGS, "load": tmp_path, "train_iters": 2}
    with pytest.raises(RankError, match=r"CheckpointError: .*word_embeddings.weight has shape \(48, 64\), "):
        fit(ranks, tmp_path / "b", 1, **{**resumed, "vocab_size": 50})
    with pytest.raises(RankError, match=r"a vocabulary of 40 tokens, this run has 41; give --vocab-size 40"):
        fit(ranks, tmp_path / "c", 1, **{**resumed, "vocab_size": 41})
    assert fit(ranks, tmp_path / "d", 1, **{**resumed, "vocab_size": 41, "finetune": True})


def test_finetuning_takes_another_vocabulary_that_is_padded_to_other_rows(ranks: RankPool, tmp_path: Path) -> None:
    """New tokens take padding rows, whatever the tensor-parallel size pads beyond; fewer tokens leave rows out."""
    fit(ranks, tmp_path, 1, save=tmp_path, train_iters=1, **SETTINGS)
    table = whole(tmp_path / "iter_0000001", KEY)
    tuned = {**SETTINGS, "load": tmp_path, "train_iters": 1, "finetune": True, "lr": 1e-30, "weight_decay": 0.0}
    for vocab_size, tensor_size, num_rows in ((47, 2, 64), (20, 1, 32)):
        more = {"vocab_size": vocab_size, "tensor_model_parallel_size": tensor_size, "save": tmp_path / str(vocab_size)}
        assert fit(ranks, tmp_path / f"log{vocab_size}", tensor_size, **{**tuned, **more})
        own = whole(tmp_path / str(vocab_size) / "iter_0000001", KEY)
        assert own.shape == (num_rows, 64)
        # Scale blocks of the master are cut elsewhere.
        assert torch.allclose(own[:vocab_size], table[:vocab_size], rtol=2**-10, atol=1e-6)
    with pytest.raises(
        RankError, match=r"has 48 rows, fewer than the vocabulary of 49 tokens .*give a --vocab-size up"
    ):
        fit(ranks, tmp_path / "more", 1, **{**tuned, "vocab_size": 49})
