"""benchmarks/tensor_parallel.py on two CPU ranks: times, checks and writes."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from unittest import mock

from benchmarks import tensor_parallel
from tests.harness.ranks import RankPool


def _main(flags: list[str]) -> tuple[int, str]:
    """The exit status of the program on this rank, and what it prints."""
    with (
        mock.patch.object(sys, "argv", ["tensor_parallel.py", *flags]),
        contextlib.redirect_stdout(io.StringIO()) as out,
    ):
        return tensor_parallel.main(), out.getvalue()


def test_two_ranks_over_gloo(ranks: RankPool, tmp_path: Path) -> None:
    output = tmp_path / "out" / "rows.json"
    flags = ["--tokens", "32", "--hidden", "64", "--check-exchanges", "2", "--output", str(output)]
    (status, printed), (other, _) = ranks.run(_main, flags, num_ranks=2)
    assert (status, other) == (0, 0)
    assert "fc2 [64, 128]" in printed and "0 of 2 exchanges wrong" in printed
    report = json.loads(output.read_text())
    assert [row["name"] for row in report["rows"]] == ["qkv", "fc1", "proj", "fc2"]
    assert all(row["alone"] > 0 and row["by_parts"] is None for row in report["rows"])
    gathered = [row["name"] for row in report["rows"] if (row["cast_then_gathered"] or 0) > 0]
    assert gathered == [row["name"] for row in report["rows"] if (row["gathered_then_cast"] or 0) > 0] == ["qkv", "fc1"]
