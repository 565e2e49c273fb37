from pathlib import Path

import pytest

from fp8_megatron.commands import train_tokenizer
from fp8_megatron.data.tokenizer_settings import build_tokenizer


def run(corpus: Path, output: Path, *flags: str) -> int:
    return train_tokenizer.main(["--input", str(corpus), "--output", str(output), *flags])


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_trained_model_gives_its_corpus_back_exactly(corpus, documents, tmp_path, model_type):
    output = tmp_path / "new" / "tokenizer.model"
    flags = ("--vocab-size", "600", "--model-type", model_type, "--max-bytes", "120000")
    assert run(corpus, output, *flags) == 0
    tokenizer = build_tokenizer("SentencePieceTokenizer", str(output))
    assert (tokenizer.vocab_size, tokenizer.eod) == (600, 1)
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(documents)] == documents
    again = tmp_path / "again.model"
    assert run(corpus, again, *flags) == 0
    assert again.read_bytes() == output.read_bytes(), "same input and flags, same model"


def test_sample_is_capped_even_and_in_order(corpus, documents):
    segments = train_tokenizer.sample_text([str(corpus)], ["text"], 10**9, 1)
    assert "".join(segments) == "".join(documents), "nothing is lost without a cap"
    some = train_tokenizer.sample_text([str(corpus)], ["text"], 400_000, 1)
    assert 300_000 < sum(len(segment.encode()) for segment in some) <= 400_000
    positions = [segments.index(segment) for segment in some]
    assert positions[0] < 0.2 * len(segments) and max(positions) > 0.6 * len(segments)
    assert some != train_tokenizer.sample_text([str(corpus)], ["text"], 400_000, 2)


def test_errors_leave_nothing_behind(corpus, tmp_path, capsys):
    output = tmp_path / "tokenizer.model"
    small = tmp_path / "small.txt"
    small.write_text("a little text\n")
    assert run(small, output, "--vocab-size", "4096") == 2
    assert "cannot make --vocab-size 4096 of this text" in capsys.readouterr().err
    assert run(corpus, output, "--json-keys", "absent") == 2
    assert 'no key "absent"' in capsys.readouterr().err
    assert not output.exists()
    output.write_bytes(b"precious")
    assert run(corpus, output) == 2
    assert "exists: give another name, or --overwrite" in capsys.readouterr().err
    assert output.read_bytes() == b"precious"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--vocab-size", "0"), "argument --vocab-size: 0 is out of range; give 261 to"),
        (("--workers", "0"), "argument --workers: 0 is out of range; give 1 to 256"),
        (("--workers", "100000"), "argument --workers: 100000 is out of range; give 1 to 256"),
        (("--max-bytes", "-1"), "argument --max-bytes: -1 is out of range"),
        (("--seed", "-1"), "argument --seed: -1 is out of range; give 0 to 4294967295"),
        (("--vocab-size", "262"), "whose bytes and characters alone are"),
        (("--vocab-size", "4096"), "tokens at most: lower it to that, or give more text"),
    ],
)
def test_bad_flags_are_one_line_that_names_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    (tmp_path / "small.txt").write_text("a little text\n" * 20)
    try:
        status = run(tmp_path / "small.txt", tmp_path / "x.model", *flags)
    except SystemExit as error:
        status = error.code
    error_text = capsys.readouterr().err
    assert status == 2 and message in error_text and error_text.count("\n") == 1
    assert not (tmp_path / "x.model").exists()


def test_an_output_that_cannot_be_written_is_found_before_the_input_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    assert run(tmp_path / "absent.txt", tmp_path / "folder", "--overwrite") == 2
    assert f"--output {tmp_path}/folder is a folder; give the path of a file" in capsys.readouterr().err
