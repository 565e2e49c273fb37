"""tools/parquet_to_jsonl.py: rows in order, other columns and empty rows left out, one line for each mistake."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from fp8_megatron.errors import UserError
from tools import parquet_to_jsonl

pyarrow = pytest.importorskip("pyarrow")
TEXTS = ["first\nline", "", "zweite ü 😀", None, 'quote " and \\ backslash']


def write_table(path: Path, texts: list[str | None]) -> str:
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"id": list(range(len(texts))), "text": texts}), path)
    return str(path)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_rows_become_lines_in_order(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / f"new/corpus.jsonl{suffix}"
    inputs = [write_table(tmp_path / "a.parquet", TEXTS), write_table(tmp_path / "b.parquet", ["last"] * 3000)]
    assert parquet_to_jsonl.main(["--input", *inputs, "--output", str(output)]) == 0
    content = gzip.decompress(output.read_bytes()) if suffix else output.read_bytes()
    documents = [json.loads(line) for line in content.decode().split("\n")[:-1]]
    assert documents == [{"text": text} for text in TEXTS if text] + [{"text": "last"}] * 3000
    assert "3,003 documents, 2 rows without text left out" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_folders_of_arrow_files_and_patterns_are_read(kind: str, tmp_path: Path) -> None:
    """As `datasets` saves a dataset: streams, here also Arrow's file format."""
    from pyarrow import ipc

    (tmp_path / "saved").mkdir()
    for number, texts in enumerate((["one", "two"], ["three"] * 3)):
        table = pyarrow.table({"id": list(range(len(texts))), "text": texts})
        path = tmp_path / "saved" / f"data-{number}.arrow"
        opened = ipc.new_stream if kind == "stream" else ipc.new_file
        with opened(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    (tmp_path / "saved" / "state.json").write_text("{}")
    for given in (tmp_path / "saved", tmp_path / "saved" / "data-*.arrow"):
        output = tmp_path / "corpus.jsonl"
        assert parquet_to_jsonl.main(["--input", str(given), "--output", str(output)]) == 0
        assert [json.loads(line)["text"] for line in output.read_text().splitlines()] == ["one", "two", *["three"] * 3]
    for missing in ("no*.arrow", "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(UserError, match="has no file: check the path"):
            parquet_to_jsonl.main(["--input", str(tmp_path / missing), "--output", str(output)])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--json-keys body", 'no column "body" (it has'),
        ("--json-keys id", 'column "id" is int64, expected strings'),
        ("--input missing.parquet", "input missing.parquet does not exist"),
        ("--input damaged.parquet", "input damaged.parquet cannot be read"),
        ("--input empty.parquet", "no row has text"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_no_file(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_table(tmp_path / "a.parquet", TEXTS)
    write_table(tmp_path / "empty.parquet", [""])
    (tmp_path / "damaged.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-50])
    with pytest.raises(UserError) as caught:
        parquet_to_jsonl.main(["--input", "a.parquet", "--output", "corpus.jsonl", *words.split()])
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not list(tmp_path.glob("corpus.jsonl.partial"))
