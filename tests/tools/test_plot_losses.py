"""plot_losses: the file that it names is the one it writes, and one that it cannot write is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp8_megatron.commands import plot_losses


@pytest.fixture
def run(tmp_path: Path) -> str:
    """A run's folder."""
    records = [{"kind": "train", "iteration": i, "loss": 3.0 / i, "consumed_tokens": i} for i in (1, 2, 3)]
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(folder)


@pytest.mark.parametrize(("given", "written"), [("losses", "losses.png"), ("losses.svg", "losses.svg")])
def test_the_printed_file_is_written(
    given: str, written: str, run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plot_losses.main([run, "--output", str(tmp_path / given)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / written}\n"
    assert (tmp_path / written).stat().st_size > 0


def test_an_output_that_cannot_be_written_is_named(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert plot_losses.main([run, "--output", str(tmp_path / "file" / "x.png")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert f"--output {tmp_path}/file/x.png: {tmp_path}/file is a file, not a folder" in error
