"""Quoted figures are those of benchmarks/results, and the chart shows what its file says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.plot_results import _RESULTS, _RUNS, DIGEST_KEY, digest, read_bars
from tests.docs.documents import (
    PAGES,
    ROOT,
    Figure,
    name_of,
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
