import json
import lzma
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from fp8_megatron.commands import preprocess_data
from fp8_megatron.data import text_encoding
from fp8_megatron.data.indexed import check_indexed_dataset
from fp8_megatron.data.tokenizer_settings import build_tokenizer
from tests.harness.limits import files_limited_to


def run(*inputs: Path, output: Path, model: str, flags: tuple[str, ...] = ("--append-eod",), workers: int = 1) -> int:
    names = [str(path) for path in inputs]
    words = ["--input", *names, "--output-prefix", str(output), "--tokenizer-model", model, "--workers", str(workers)]
    return preprocess_data.main([*words, *flags])


def read(prefix: Path) -> list[list[int]]:
    """The documents that have tokens."""
    dataset = IndexedDataset(str(prefix))
    assert sorted(set(dataset.document_indices.tolist())) == list(range(len(dataset) + 1)), "one sequence a document"
    return [dataset[index].tolist() for index in range(len(dataset))]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def output(tmp_path) -> Path:
    """An output prefix in a folder that does not exist yet."""
    return tmp_path / "out" / "corpus"


def test_tokens_are_those_of_the_tokenizer_with_end_of_document(corpus, documents, tokenizer_model, output, capsys):
    assert run(corpus, output=output, model=tokenizer_model) == 0
    tokenizer = build_tokenizer("SentencePieceTokenizer", tokenizer_model)
    expected = [[*tokenizer.encode(text), tokenizer.eod] for text in documents]
    assert read(output.parent / "corpus_text_document") == expected
    summary = check_indexed_dataset(f"{output}_text_document", tokenizer.vocab_size)
    assert summary.dtype == np.uint16
    assert f"{len(documents):,} documents, {sum(map(len, expected)):,} tokens of uint16" in capsys.readouterr().out
    assert files(output.parent) == ["corpus_text_document.bin", "corpus_text_document.idx"]


def test_any_number_of_workers_and_compression_give_the_same_bytes(corpus, tokenizer_model, tmp_path):
    compressed = tmp_path / "corpus.jsonl.xz"
    compressed.write_bytes(lzma.compress(corpus.read_bytes(), preset=0))
    assert run(corpus, corpus, output=tmp_path / "one", model=tokenizer_model, workers=1) == 0
    assert run(corpus, compressed, output=tmp_path / "two", model=tokenizer_model, workers=2) == 0
    for extension in (".bin", ".idx"):
        one, two = (tmp_path / f"{name}_text_document{extension}" for name in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()


def test_workers_share_long_documents(documents, tokenizer_model, tmp_path, monkeypatch):
    long = "".join(documents) * (600_000 // len("".join(documents)) + 1)
    path = tmp_path / "long.jsonl"
    texts = [("first", "a title"), (long, ""), ("", "a title"), (long[::-1], long[:200_000])]
    path.write_text("".join(json.dumps({"text": text, "title": title}) + "\n" for text, title in texts))
    chunks: list[int] = []
    of_results = text_encoding.results_in_order
    counted = lambda *args, **kwargs: (chunks.append(1) or one for one in of_results(*args, **kwargs))  # noqa: E731
    monkeypatch.setattr(text_encoding, "results_in_order", counted)
    flags = ("--append-eod", "--json-keys", "text", "title")
    for workers in (1, 2):
        output = tmp_path / str(workers) / "out"
        assert run(path, output=output, model=tokenizer_model, flags=flags, workers=workers) == 0
    assert len(chunks) > 30, "parts of a sixteenth of what a worker has to do, or a little more"
    for name in files(tmp_path / "1"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()
    tokenizer = build_tokenizer("SentencePieceTokenizer", tokenizer_model)
    assert read(tmp_path / "2" / "out_text_document")[1] == [*tokenizer.encode(long), tokenizer.eod]


def test_keys_plain_text_and_empty_documents(tokenizer_model, output, tmp_path, capsys):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"a": "x = 1", "b": "def"}\n{"a": "", "b": "return"}\n')
    text = tmp_path / "text.txt"
    text.write_text("import os\n\nimport sys\n")
    flags = ("--json-keys", "a", "b", "--split-on-blank-lines")
    assert run(pairs, text, output=output, model=tokenizer_model, flags=flags) == 0
    decode = build_tokenizer("SentencePieceTokenizer", tokenizer_model).decode
    assert [decode(ids) for ids in read(Path(f"{output}_a_document"))] == ["x = 1", "import os", "import sys\n".strip()]
    assert [decode(ids) for ids in read(Path(f"{output}_b_document"))] == ["def", "return"]
    assert "empty documents, kept without tokens: 1" in capsys.readouterr().out
    assert IndexedDataset(f"{output}_a_document").document_indices.tolist() == [0, 1, 1, 2, 3], "it keeps its place"


def test_vocabularies_beyond_16_bits_are_written_as_int32(tmp_path):
    path = tmp_path / "ids.jsonl"
    path.write_text('{"text": "70000 1 2"}\n')
    words = ["--input", str(path), "--output-prefix", str(tmp_path / "ids"), "--workers", "1", "--append-eod"]
    assert preprocess_data.main([*words, "--tokenizer-type", "NullTokenizer", "--vocab-size", "80000"]) == 0
    assert read(tmp_path / "ids_text_document") == [[70000, 1, 2, 79999]]
    assert check_indexed_dataset(str(tmp_path / "ids_text_document")).dtype == np.int32


@pytest.mark.parametrize("workers", [1, 2])
def test_a_malformed_line_stops_the_run_with_nothing_written(
    corpus, tokenizer_model, output, tmp_path, capsys, workers
):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"txt": "not"}\n')
    assert run(corpus, bad, output=output, model=tokenizer_model, workers=workers) == 2
    assert "bad.jsonl:2: no key \"text\" (it has 'txt'" in capsys.readouterr().err
    assert files(output.parent) == []


def test_malformed_lines_can_be_left_out(corpus, documents, tokenizer_model, output, tmp_path, capsys):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"txt": "not"}\n{"text": 3}\n{"text": "good"}')
    assert run(corpus, bad, output=output, model=tokenizer_model, flags=("--skip-errors",)) == 0
    assert len(read(Path(f"{output}_text_document"))) == len(documents) + 2
    report = capsys.readouterr().out
    assert (
        "malformed documents, left out: 2; the first: " in report
        and "bad.jsonl:2: " in report
        and "bad.jsonl:3: " in report
    )


def test_input_without_text_is_an_error(tokenizer_model, output, tmp_path, capsys):
    blank = tmp_path / "blank.jsonl"
    blank.write_text('\n\n{"text": ""}\n')
    assert run(blank, output=output, model=tokenizer_model) == 2
    assert 'no text under "text" in the input (0 malformed and 1 empty documents)' in capsys.readouterr().err
    (tmp_path / "none.jsonl").touch()
    assert run(tmp_path / "none.jsonl", output=output, model=tokenizer_model) == 2
    assert "none.jsonl is empty" in capsys.readouterr().err
    assert run(blank, output=output, model=str(tmp_path / "absent.model")) == 2
    assert "absent.model does not exist" in capsys.readouterr().err
    assert files(output.parent) == []


def test_an_existing_output_is_replaced_only_on_request(corpus, tokenizer_model, output, tmp_path, capsys):
    assert run(corpus, output=output, model=tokenizer_model) == 0
    before = Path(f"{output}_text_document.bin").read_bytes()
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "other"}\n')
    assert run(other, output=output, model=tokenizer_model) == 2
    assert "corpus_text_document.bin exists: give another --output-prefix, or --overwrite" in capsys.readouterr().err
    assert Path(f"{output}_text_document.bin").read_bytes() == before
    assert run(other, output=output, model=tokenizer_model, flags=("--overwrite",)) == 0
    assert len(read(Path(f"{output}_text_document"))) == 1


def test_a_failed_overwrite_keeps_the_old_output(corpus, tokenizer_model, output, tmp_path):
    assert run(corpus, output=output, model=tokenizer_model) == 0
    before = {name: (output.parent / name).read_bytes() for name in files(output.parent)}
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{]\n')
    assert run(bad, output=output, model=tokenizer_model, flags=("--overwrite",)) == 2
    assert {name: (output.parent / name).read_bytes() for name in files(output.parent)} == before


def test_a_killed_worker_is_an_error_not_a_hang(corpus, tokenizer_model, output, capsys, monkeypatch):
    monkeypatch.setattr(text_encoding, "encode", exit_at_once)
    assert run(corpus, output=output, model=tokenizer_model, workers=2) == 2
    assert "a worker process died, probably out of memory: give fewer --workers than 2" in capsys.readouterr().err
    assert files(output.parent) == []


def exit_at_once(*_: object) -> None:
    os._exit(9)


def test_sigterm_in_the_middle_leaves_nothing(tokenizer_model, output, tmp_path, capfd):
    path = tmp_path / "long.jsonl"
    path.write_text((json.dumps({"text": "word " * 20_000}) + "\n") * 100)
    process = multiprocessing.get_context("fork").Process(target=run_and_exit, args=(path, output, tokenizer_model))
    process.start()
    while not (output.parent.exists() and files(output.parent)):
        assert process.is_alive()
        time.sleep(0.01)
    assert files(output.parent)[0].endswith(".partial")
    process.terminate()
    process.join(timeout=60)
    assert process.exitcode == 2
    assert "stopped by SIGTERM: nothing is written" in capfd.readouterr().err
    assert files(output.parent) == []


def test_the_next_run_clears_what_a_killed_one_left(corpus, tokenizer_model, output, tmp_path):
    """But not the files of one that runs, or of another output."""
    path = tmp_path / "long.jsonl"
    path.write_text((json.dumps({"text": "word " * 20_000}) + "\n") * 1000)
    other = output.with_name(f"{output.name}_text_document.bin.of_somebody.partial")
    begun = []
    for _ in range(2):
        process = multiprocessing.get_context("fork").Process(target=run_and_exit, args=(path, output, tokenizer_model))
        process.start()
        while not (output.parent.exists() and any(f"-{process.pid}-" in name for name in files(output.parent))):
            assert process.is_alive()
            time.sleep(0.01)
        begun.append(process)
    killed, stopped = begun
    os.kill(stopped.pid, signal.SIGSTOP)
    killed.kill()
    killed.join(timeout=60)
    other.touch()
    os.utime(other, (0, 0))
    left = files(output.parent)
    assert any(f"-{killed.pid}-" in name for name in left)
    assert run(corpus, output=output, model=tokenizer_model) == 0
    written = [f"{output.name}_text_document.{kind}" for kind in ("bin", "idx")]
    of_stopped = [name for name in left if f"-{stopped.pid}-" in name]
    assert files(output.parent) == sorted([*written, *of_stopped, other.name])
    stopped.kill()
    os.kill(stopped.pid, signal.SIGCONT)
    stopped.join(timeout=60)
    assert run(corpus, output=output, model=tokenizer_model, flags=("--overwrite",)) == 0
    assert files(output.parent) == sorted([*written, other.name])


def run_and_exit(path: Path, output: Path, model: str) -> None:
    sys.exit(run(path, output=output, model=model, workers=2))


def test_workers_are_bounded_by_cores_with_a_line(corpus, tokenizer_model, output, capsys, monkeypatch):
    monkeypatch.setattr(preprocess_data, "num_cores", lambda: 2)
    assert run(corpus, output=output, model=tokenizer_model, workers=100_000) == 0
    assert "--workers 100000: this process has 2 cores, so 2 run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--workers", "0"), "argument --workers: 0 is out of range; give 1 to"),
        (("--log-interval", "\uff11"), "is not a whole number"),
        (("--vocab-size", "0"), "argument --vocab-size: 0 is out of range; give 2 to"),
        (("--json-keys", ""), "argument --json-keys: the text is empty"),
        (("--json-keys", "text", "text"), "--json-keys names 'text' twice"),
        (("--json-keys", "a/b"), "a slash cannot be part of the output's name"),
        (("--tokenizer-type", "NullTokenizer", "--vocab-size", "9"), "is not read by a NullTokenizer; leave it out"),
        (("--split-on-blank-lines",), "--split-on-blank-lines cuts plain text, and --input has JSON lines alone"),
        (("--output-prefix", ""), "argument --output-prefix: the text is empty"),
        (("--output-prefix", "folder/"), "--output-prefix: folder/ is a folder; add the start of the files' names"),
        (("--output-prefix", "/proc/version/x"), "/proc/version is a file, not a folder"),
        (("--tokenizer-model", ""), "argument --tokenizer-model: the text is empty"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_flags_are_one_line(corpus, tokenizer_model, output, capsys, flags, message):
    try:
        status = run(corpus, output=output, model=tokenizer_model, flags=flags)
    except SystemExit as error:
        status = error.code
    lines = capsys.readouterr().err.splitlines()
    assert status == 2 and not output.parent.exists()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:] and message in lines[-1]


def test_a_full_disk_in_the_middle_names_the_file(corpus, tokenizer_model, output, capsys):
    """A limit on the size of files makes the same call fail."""
    with files_limited_to(20_000):
        assert run(corpus, output=output, model=tokenizer_model) == 2
    error = capsys.readouterr().err
    assert f"--output-prefix {output}_text_document.bin cannot be written (File too large" in error
    assert "GB free on its disk" in error and files(output.parent) == []
