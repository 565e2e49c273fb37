"""Verification cards: what they hold, what agrees with them, and one that is run again."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from fp8_megatron.commands import verify
from fp8_megatron.config.checks import check_config
from fp8_megatron.config.io import parse_config
from fp8_megatron.reporting.card import Card, Result, compare, largest_difference, page, quoted

ROOT = Path(__file__).parents[2]
CARDS = sorted((ROOT / "benchmarks" / "cards").glob("*.yaml"))
TINY = ROOT / "benchmarks" / "cards" / "gpt_tiny_cpu.yaml"
LIMITS = {"loss": 0.01, "speed": 0.1, "memory": 0.05}
MADE = Result(
    date="2026-11-29",
    device="NVIDIA H200",
    versions={"torch": "2.13.0"},
    losses={10: 4.0, 20: 2.0},
    tokens_per_second=1000.0,
    peak_memory_gib=10.0,
    resumed=0.0,
    conversion="logits agree",
)


@pytest.mark.parametrize("path", CARDS, ids=lambda path: path.stem)
def test_a_card_can_be_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    card = Card.read(path)
    config = parse_config([*card.flags, "--data-path", "rule", "--tokenizer-type", "NullTokenizer"])
    check_config(config, card.ranks)
    assert config.train_iters(card.ranks) >= 20
    assert (card.result is None) == (not path.with_suffix(".md").exists())


@pytest.mark.parametrize("path", [path for path in CARDS if path.with_suffix(".md").exists()], ids=lambda p: p.stem)
def test_a_page_shows_its_card(path: Path) -> None:
    card = Card.read(path)
    assert path.with_suffix(".md").read_text() == page(card)
    assert card.result is not None and len(card.result.losses) == 10
    assert card.result.losses[max(card.result.losses)] < 0.8 * card.result.losses[min(card.result.losses)]  # it learns


def test_a_card_is_read_as_it_was_written(tmp_path: Path) -> None:
    card = Card(tmp_path / "a.yaml", "A model", ["--config", "a file.yaml"], 2, True, MADE)
    card.write()
    assert Card.read(card.path) == card
    assert "--gpus 2 --config 'a file.yaml'" in (tmp_path / "a.md").read_text()


@pytest.mark.parametrize(
    ("change", "beyond"),
    [
        ({}, []),
        ({"losses": {10: 4.03, 20: 2.0}}, []),
        ({"losses": {10: 4.05, 20: 2.0}}, ["losses"]),
        ({"losses": {5: 4.0}}, ["losses"]),
        ({"resumed": 0.02}, ["losses after resuming"]),
        ({"resumed": math.inf}, ["losses after resuming"]),
        ({"tokens_per_second": 890.0}, ["tokens/s"]),
        ({"peak_memory_gib": 10.6}, ["peak, GiB"]),
        ({"tokens_per_second": 500.0, "peak_memory_gib": 20.0, "device": "NVIDIA H100"}, []),
    ],
)
def test_what_is_beyond_its_limit_is_named(change: dict[str, object], beyond: list[str]) -> None:
    found = compare(MADE, replace(MADE, **change), **LIMITS)
    assert [one.quantity for one in found if not one.holds] == beyond


def test_a_faster_and_smaller_run_agrees_and_a_cpus_speed_is_not_compared() -> None:
    assert all(
        one.holds for one in compare(MADE, replace(MADE, tokens_per_second=2000.0, peak_memory_gib=5.0), **LIMITS)
    )
    on_cpu = replace(MADE, device="cpu", peak_memory_gib=0.0)
    found = compare(on_cpu, replace(on_cpu, tokens_per_second=1.0), **LIMITS)
    assert [(one.quantity, one.limit) for one in found][2:] == [("tokens/s", None)]


def test_quoted_losses_are_even_and_end_with_the_last() -> None:
    losses = {step: 1.0 / step for step in range(1, 41)}
    assert list(quoted(losses)) == [4, 8, 12, 16, 20, 24, 28, 32, 36, 40]
    assert list(quoted({step: 1.0 for step in range(1, 4)})) == [1, 2, 3]
    assert largest_difference({1: 2.0, 2: 4.0}, {2: 4.4, 3: 1.0}) == pytest.approx(0.1)


def test_the_exit_status_says_whether_it_agrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = Card.read(TINY).flags
    path = tmp_path / "card.yaml"
    Card(path, "A model", flags, 1, False, replace(MADE, device="cpu")).write()
    for loss, status, said in ((4.0, 0, "agrees with its run"), (5.0, 1, "does not agree")):
        now = replace(MADE, device="cpu", losses={10: loss, 20: 2.0}, versions={"torch": "2.15.0"})
        monkeypatch.setattr(verify, "measure", lambda card, folder, now=now: now)
        assert verify.main([str(path), "--output-dir", str(tmp_path / "runs")]) == status
        printed = capsys.readouterr().out
        assert said in printed and "torch 2.13.0 → 2.15.0" in printed


def test_mistakes_are_told_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "card.yaml"
    for text, told in (
        ("title: a\n", "is no card"),
        ("title: a\nflags: --vocab-size 64\nranks: 1\ngpu: false\n", "has no result yet"),
    ):
        path.write_text(text)
        assert verify.main([str(path), "--output-dir", str(tmp_path / "runs")]) == 2
        assert told in capsys.readouterr().err


@pytest.mark.slow
def test_the_tiny_card_agrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert verify.main([str(TINY), "--output-dir", str(tmp_path)]) == 0
    assert "agrees with its run" in capsys.readouterr().out
    assert [path.name for path in tmp_path.glob("*/checkpoints")] == []
