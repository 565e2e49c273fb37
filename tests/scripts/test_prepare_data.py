"""scripts/prepare_data.sh: every form of a corpus becomes the same token files."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fp8_megatron.commands.train_tokenizer import train
from fp8_megatron.data.tokenizer_settings import build_tokenizer

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "prepare_data.sh"
TEXTS = [f"Document {number}: the quick brown fox jumps over {number * 7} lazy dogs.\n" * 20 for number in range(30)]


def prepare(folder: Path, *words: str, status: int = 0) -> str:
    """Run the script in `folder`; its output, or after an error its last line on stderr."""
    environment = os.environ | {"PY": sys.executable, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        ["bash", str(SCRIPT), *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == status, run.stderr
    return run.stderr.splitlines()[-1] if status else run.stdout


def documents(prefix: Path, tokenizer: Path) -> list[str]:
    """The texts of token files."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    decoder = build_tokenizer("SentencePieceTokenizer", str(tokenizer))
    dataset = IndexedDataset(str(prefix))
    return [decoder.decode([int(token) for token in dataset[index]][:-1]) for index in range(len(dataset))]


def lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text, "url": "x"}).encode() + b"\n" for text in texts)


@pytest.mark.slow
def test_all_forms_of_a_folder_become_one_corpus(tmp_path: Path) -> None:
    """Five files of six documents, each in another form, below one folder with a file of another kind."""
    pyarrow = pytest.importorskip("pyarrow")
    zstandard = pytest.importorskip("zstandard")
    from pyarrow import parquet

    corpus = tmp_path / "corpus"
    (corpus / "deeper").mkdir(parents=True)
    forms: list[tuple[str, Callable[[bytes], bytes]]] = [
        ("a.jsonl", bytes),
        ("b.json.gz", gzip.compress),
        ("c.jsonl.xz", lzma.compress),
        ("deeper/d.jsonl.zst", zstandard.ZstdCompressor().compress),
    ]
    for index, (name, compress) in enumerate(forms):
        (corpus / name).write_bytes(compress(lines(TEXTS[6 * index : 6 * index + 6])))
    (corpus / "README").write_text("not text of the corpus")
    parquet.write_table(pyarrow.table({"text": TEXTS[24:]}), corpus / "deeper" / "e.parquet")
    output = prepare(tmp_path, "--output", "made", "--vocab-size", "300", "--workers", "2", "corpus")
    assert documents(tmp_path / "made/corpus_text_document", tmp_path / "made/tokenizer.model") == TEXTS
    assert not (tmp_path / "made/parquet.jsonl.gz").exists()
    assert "--data-path made/corpus_text_document" in output.splitlines()[-1]


@pytest.mark.slow
def test_plain_text_takes_flags_of_preprocess_and_a_given_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.txt.bz2").write_bytes(bz2.compress("\n\n".join(text.strip() for text in TEXTS).encode()))
    first = prepare(tmp_path, "--output", "made", "--vocab-size", "300", "a.txt.bz2", "--", "--split-on-blank-lines")
    assert "tokenizer: 300 pieces" in first
    tokenizer = "made/tokenizer.model"
    again = prepare(
        tmp_path, "--output", "again", "--tokenizer-model", tokenizer, "a.txt.bz2", "--", "--split-on-blank-lines"
    )
    assert "pieces" not in again
    for folder in ("made", "again"):
        found = documents(tmp_path / folder / "corpus_text_document", tmp_path / tokenizer)
        assert [text.strip() for text in found] == [text.strip() for text in TEXTS]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_addresses_that_end_alike_are_all_read_and_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for folder, text in {"en": "1 2", "de": "3"}.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "0000.jsonl").write_bytes(lines([text]))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(tmp_path))) as server:
        threading.Thread(target=server.serve_forever).start()
        words = ["--output", "made", "--tokenizer-type", "NullTokenizer", "--workers", "1"]
        words += [f"http://127.0.0.1:{server.server_port}/{folder}/0000.jsonl?x=1" for folder in ("en", "de")]
        words += ["--", "--vocab-size", "9", "--overwrite"]
        first, again = prepare(tmp_path, *words), prepare(tmp_path, *words)
        server.shutdown()
    assert "2 documents, 5 tokens" in first and "2 documents, 5 tokens" in again
    assert first.count("downloading") == 2 and "downloading" not in again


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "error: give --output FOLDER"),
        ("--output made", "error: give at least one file, folder or https:// address"),
        ("--output made missing.jsonl", "error: input missing.jsonl does not exist"),
        ("--output made .", "error: . holds no .jsonl, .json, .ndjson, .txt, .text, .md or .parquet file"),
        ("missing.jsonl --output", "error: --output has no value; give one after it, or drop it"),
        (
            "--output made --tokenizer-model x.model --vocab-size 300 prepare.txt",
            "error: --vocab-size 300 is of a tokenizer that is trained, and none is; leave it out (a NullTokenizer's "
            "comes after --)",
        ),
        (
            "--output made --append-eod x",
            "error: unknown flag --append-eod; flags of fp8-megatron preprocess come after the inputs and --",
        ),
    ],
)
def test_a_mistake_is_one_line(words: str, message: str, tmp_path: Path) -> None:
    assert prepare(tmp_path, *words.split(), status=2) == message


def test_a_tokenizer_that_is_there_has_the_size_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "my data").mkdir()
    model = train(TEXTS, vocab_size=310, model_type="bpe", num_threads=1)
    (tmp_path / "my data" / "tokenizer.model").write_bytes(model)
    (tmp_path / "a.txt").write_text("text")
    words = ("--output", "my data", "a.txt", "--vocab-size")
    assert "my data/tokenizer.model has 310 pieces, not --vocab-size 300" in prepare(tmp_path, *words, "300", status=2)
    (tmp_path / "my data" / "tokenizer.model").write_text("damaged")
    assert "my data/tokenizer.model cannot be read" in prepare(tmp_path, *words, "310", status=2)
