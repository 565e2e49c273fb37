"""Quoted figures are those of benchmarks/results, and the chart shows what its file says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.plot_results import _RESULTS, _RUNS, DIGEST_KEY, digest, plot, read_bars
from tests.docs.documents import (
    PAGES,
    ROOT,
    Figure,
    name_of,
    parse_figures,
    prose_numbers,
    sections,
    table_numbers,
)

#: Pages on which every result has to name its file.
_CHECKED = [ROOT / "README.md", ROOT / "docs" / "performance.md"]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_quoted_figures_are_those_of_the_results(page: Path) -> None:
    wrong = [
        f"'{section.title}' quotes {figure.quoted}, {figure.source} is {figure.value}"
        for section in sections(page)
        for figure in section.figures
        if not figure.matches()
    ]
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_figures_that_are_named_are_quoted(page: Path) -> None:
    missing = [
        f"'{section.title}': {figure.quoted}"
        for section in sections(page)
        for figure in section.figures
        if not re.search(rf"(?<![\d.,]){re.escape(figure.quoted)}(?![\d]|[.,]\d)", section.text)
    ]
    assert not missing


@pytest.mark.parametrize("page", _CHECKED, ids=name_of)
def test_every_result_names_its_file(page: Path) -> None:
    unnamed = []
    for section in sections(page):
        named = {figure.quoted for figure in section.figures} | section.inputs
        for number in (*table_numbers(section.text), *prose_numbers(section.text)):
            if number.lstrip("+") not in named and number not in named:
                unnamed.append(f"'{section.title}': {number}")
    assert not unnamed


def test_the_chart_shows_its_results() -> None:
    bars = read_bars(_RESULTS / "gpt7b_4h200_micro4x4.json", _RUNS)
    with Image.open(ROOT / "benchmarks" / "results" / "headline.png") as image:
        assert image.text[DIGEST_KEY] == digest(bars), "run python benchmarks/plot_results.py"


@pytest.mark.parametrize(
    ("quoted", "value", "matches"),
    [("23,170", 23169.5, True), ("23,171", 23169.4, False), ("44.5", 44.54, True), ("44.5", 44.56, False)],
)
def test_a_figure_is_compared_in_the_digits_that_are_quoted(quoted: str, value: float, matches: bool) -> None:
    assert Figure(quoted, "", value).matches() is matches


def test_a_wrong_path_is_an_error() -> None:
    with pytest.raises(KeyError, match="O3-slow"):
        parse_figures("gpt7b_4h200_micro4x4.json\nresults/O3-slow: peak_gb=1.0")


def test_ratios_and_inputs_are_read() -> None:
    figures, inputs = parse_figures(
        "gpt7b_4h200_micro4x4.json\n"
        "results/O3-fast/step_ms over results/megatron-te-delayed/step_ms = 0.85\n"
        "inputs: 2,048"
    )
    assert [figure.matches() for figure in figures] == [True]
    assert inputs == {"2,048"}


def test_a_chart_carries_the_digest_of_its_figures(tmp_path: Path) -> None:
    bars = read_bars(_RESULTS / "gpt1.3b_h200.json", {"O3-lean": "ours", "bf16": "BF16"})
    plot(bars, "GPT-1.3B", tmp_path / "chart.png")
    with Image.open(tmp_path / "chart.png") as image:
        assert image.text[DIGEST_KEY] == digest(bars) != digest(bars[::-1])


def test_a_run_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="has no run O4: its runs are O3-lean"):
        read_bars(_RESULTS / "gpt1.3b_h200.json", {"O4": "ours"})
