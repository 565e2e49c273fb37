"""benchmarks/context_parallel.py on two CPU ranks: times, compares and writes."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from unittest import mock

from benchmarks import context_parallel
from tests.harness.ranks import RankPool


def _main(flags: list[str]) -> tuple[int, str]:
    """The exit status of the program on this rank, and what it prints."""
    with (
        mock.patch.object(sys, "argv", ["context_parallel.py", *flags]),
        mock.patch.object(context_parallel, "_LEAST_CALLS", 1),
        mock.patch.object(context_parallel, "_MOST_CALLS", 1),
        mock.patch.dict("os.environ", {"WORLD_SIZE": "2"}),
        contextlib.redirect_stdout(io.StringIO()) as out,
    ):
        return context_parallel.main(), out.getvalue()


def test_two_ranks_over_gloo(ranks: RankPool, tmp_path: Path) -> None:
    output = tmp_path / "out" / "rows.json"
    flags = ["--tokens", "32", "64", "--heads", "4", "--groups", "2", "--width", "16", "--output", str(output)]
    (status, printed), (other, _) = ranks.run(_main, flags, num_ranks=2)
    assert (status, other) == (0, 0) and "all_gather" in printed
    report = json.loads(output.read_text())
    assert [(row["tokens"], row["comm_type"]) for row in report["rows"]] == [
        (tokens, comm_type) for tokens in (32, 64) for comm_type in ("p2p", "all_gather")
    ]
    # Blocks are rounded to BF16 before they are merged: 50 dB.
    assert all(min(row["snr_db"]) > 40 and row["forward"] > 0 for row in report["rows"])
    # 64 tokens, 2 heads of 16 columns, keys and values, 2 bytes; a half of them is the other rank's.
    assert [row["received_bytes"] for row in report["rows"][2:]] == [64 * 2 * 16 * 2 * 2 // 2, 3 * 64 * 2 * 16 * 2 // 4]
