"""Tests of `benchmarks/head_sums.py`: the emulated sums of a tensor core."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import head_sums


def test_short_sums_take_from_small_products_beside_a_large_one() -> None:
    """1 and 31 products of 2⁻¹³: with 13 bits all are kept, with 12 none. Alone they are kept."""
    a = torch.cat([torch.ones(1), torch.full((31,), 2.0**-13)])[None]
    b = torch.ones(32, 1)
    exact = 1.0 + 31 * 2.0**-13
    assert head_sums._emulated(a, b, 13).item() == exact
    assert head_sums._emulated(a, b, 12).item() == 1.0
    assert head_sums._emulated(a[:, 1:], b[1:], 12).item() == 31 * 2.0**-13


def test_every_tile_is_added_in_fp32() -> None:
    """The large product is in the first of three tiles, so the others keep theirs."""
    a = torch.full((1, 3 * 128), 2.0**-13)
    a[0, 0] = 1.0
    assert head_sums._emulated(a, torch.ones(3 * 128, 1), 12).item() == 1.0 + 256 * 2.0**-13


def test_the_label_takes_from_the_others_and_long_sums_do_not(tmp_path: Path) -> None:
    sizes = ["--tokens", "512", "--vocabulary", "512", "--width", "32"]
    found = {}
    for bits in (10, 23):
        output = tmp_path / f"{bits}.json"
        assert head_sums.main([*sizes, "--sum-bits", str(bits), "--output", str(output)]) == 0
        found[bits] = json.loads(output.read_text())["sums"]
    short, exact = (
        {name: sums["bias_percent"] for name, sums in found[bits].items() if "wgrad, 1 to 3" in name}
        for bits in (10, 23)
    )
    assert short["p − onehot, wgrad, 1 to 3 labels"] < 2 * short["p, wgrad, 1 to 3 labels"] < -0.1
    assert all(abs(bias) < 0.01 for bias in exact.values())


def test_sizes_that_fp8_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        head_sums.main(["--width", "40"])
    assert "--width 40 is not a multiple of 16" in capsys.readouterr().err
