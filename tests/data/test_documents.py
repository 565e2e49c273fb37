import bz2
import gzip
import json
import lzma
import sys
import zlib
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from fp8_megatron.data.documents import check_inputs, input_files, parse_batch, read_batches
from fp8_megatron.errors import UserError


def read(*paths: Path, keys=("text",), batch_bytes: int = 64, skip_errors: bool = False, **options: bool):
    """(texts of the first key, places, errors) over all batches."""
    texts, places, errors = [], [], []
    for batch in read_batches([str(path) for path in paths], batch_bytes=batch_bytes, **options):
        parsed = parse_batch(batch, keys, skip_errors=skip_errors)
        texts += parsed.texts[keys[0]]
        places += [place.rsplit("/", 1)[1] for place in parsed.places]
        errors += parsed.errors
    return texts, places, errors


def write_lines(path: Path, texts: list[str]) -> Path:
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    return path


@pytest.mark.parametrize("batch_bytes", [1, 37, 1 << 20])
def test_json_lines_come_whole_and_in_order_whatever_the_batch(tmp_path, batch_bytes):
    texts = [f"document {index}\nof {'é' * index} lines" for index in range(40)]
    path = write_lines(tmp_path / "corpus.jsonl", texts)
    read_texts, places, _ = read(path, path, batch_bytes=batch_bytes)
    assert read_texts == texts * 2
    assert places == [f"corpus.jsonl:{line}" for line in range(1, 41)] * 2


@pytest.mark.parametrize(
    ("suffix", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress)]
)
def test_compressed_files_read_as_plain_ones_and_damage_is_named(tmp_path, suffix, compress):
    texts = [f"document {index} " * 40 for index in range(40)]
    plain = write_lines(tmp_path / "corpus.jsonl", texts).read_bytes()
    path = tmp_path / f"corpus.jsonl{suffix}"
    path.write_bytes(compress(plain))
    assert read(path)[0] == texts
    path.write_bytes(compress(plain)[:-20])
    with pytest.raises(ValueError, match=rf"corpus\.jsonl\{suffix} cannot be decompressed .*truncated"):
        read(path)
    path.write_bytes(plain)
    with pytest.raises(ValueError, match=rf"corpus\.jsonl\{suffix} cannot be decompressed .*not \{suffix}"):
        read(path)


def test_zstandard(tmp_path, monkeypatch):
    path = tmp_path / "corpus.jsonl.zst"
    path.write_bytes(b"anything")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "zstandard", None)
        with pytest.raises(ValueError, match="pip install zstandard"):
            read(path)
    zstandard = pytest.importorskip("zstandard")
    with pytest.raises(ValueError, match="cannot be decompressed"):
        read(path)
    texts = [f"document {index} " * 40 for index in range(40)]
    path.write_bytes(zstandard.compress(write_lines(tmp_path / "corpus.jsonl", texts).read_bytes()))
    assert read(path)[0] == texts


@pytest.fixture(params=["zstandard", "stand-in"])
def compress_frame(request, monkeypatch):
    """Compresses bytes to one frame; the stand-in under zstandard's name is zlib, whose decompressors look alike."""
    if request.param == "zstandard":
        return pytest.importorskip("zstandard").compress
    decompressor = SimpleNamespace(decompressobj=zlib.decompressobj)
    module = SimpleNamespace(ZstdDecompressor=lambda: decompressor, ZstdError=zlib.error)
    monkeypatch.setitem(sys.modules, "zstandard", module)
    return zlib.compress


@pytest.mark.parametrize("batch_bytes", [64, 1 << 20])
def test_all_frames_of_zstandard_are_read_and_truncation_is_named(tmp_path, compress_frame, batch_bytes):
    """Frames without text, of one piece and of several (random digits compress to half)."""
    random = Random(0)
    texts = [random.randbytes(200).hex() for _ in range(40)]
    plain = write_lines(tmp_path / "corpus.jsonl", texts).read_bytes()
    cuts = [0, 0, 1000, 1001, 9000, len(plain)]
    frames = [compress_frame(plain[start:end]) for start, end in pairwise(cuts)]
    path = tmp_path / "corpus.jsonl.zst"
    path.write_bytes(b"".join(frames))
    assert read(path, batch_bytes=batch_bytes)[0] == texts
    for kept in (
        b"".join(frames)[:-1],
        b"".join(frames)[:-4000],
        b"".join(frames[:-1]) + frames[-1][:1],
        frames[0][:2],
    ):
        path.write_bytes(kept)
        with pytest.raises(ValueError, match=r"corpus\.jsonl\.zst cannot be decompressed .*truncated"):
            read(path, batch_bytes=batch_bytes, skip_errors=True)


def test_a_skippable_frame_of_zstandard_is_no_text(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    skippable = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"index"
    path = tmp_path / "corpus.jsonl.zst"
    path.write_bytes(zstandard.compress(b'{"text": "one"}\n') + skippable + zstandard.compress(b'{"text": "two"}\n'))
    assert read(path)[0] == ["one", "two"]


def test_plain_text_is_one_document_or_one_a_paragraph(tmp_path):
    path = tmp_path / "book.txt"
    text = "\n\nFirst\nparagraph.\n \t\n\n  Second, indented.\r\n\r\nThird.\n"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read(path) == ([text], ["book.txt:1"], [])
    for batch_bytes in (1, 10, 1000):
        texts, places, _ = read(path, batch_bytes=batch_bytes, split_on_blank_lines=True)
        assert texts == ["First\nparagraph.", "  Second, indented.", "Third."]
        assert places == ["book.txt:3", "book.txt:7", "book.txt:9"]


def test_paragraphs_do_not_depend_on_where_a_batch_ends(tmp_path):
    """Blank lines of all white space, form feeds of old texts too, begin the file and a batch."""
    draw, path = Random(0), tmp_path / "book.txt"
    for _ in range(100):
        words = draw.choices(["one", "two", " ", "\t", "\n", "\r\n", " \n", "\n\f\n", "\n\n", "\v"], k=30)
        path.write_bytes("".join(words).encode())
        expected = read(path, batch_bytes=1000, split_on_blank_lines=True)
        assert all("\n\n" not in text and text.split("\n")[0].strip() for text in expected[0])
        for batch_bytes in (1, 3, 16):
            assert read(path, batch_bytes=batch_bytes, split_on_blank_lines=True) == expected, words


def test_several_keys_and_blank_lines(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text('\n{"a": "one", "b": "uno"}\n\n  \n{"b": "due", "a": "two", "c": 3}\n')
    (batch,) = read_batches([str(path)])
    parsed = parse_batch(batch, ("a", "b"))
    assert parsed.texts == {"a": ["one", "two"], "b": ["uno", "due"]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut', r"not JSON \(Unterminated string"),
        ('["text"]', "expected a JSON object on every line, found list"),
        ('{"content": "x", "id": 1}', r'no key "text" \(it has \'content\', \'id\'; see --json-keys\)'),
        ('{"text": null}', '"text" is NoneType, expected a string'),
        ('{"text": "\\ud800"}', r"not UTF-8 \(surrogates not allowed\)"),
        (b'{"text": ' + b"[" * 100_000, "it nests lists or objects too deeply to be read"),
        (b'{"text": "x", "number": ' + b"1" * 5000 + b"}", "Exceeds the limit"),
        (json.dumps({f"k{i}": 0 for i in range(1000)}), r"no key \"text\" .it has 'k0', .*'k7', …; see --json-keys"),
        (b'{"text": "\xff"}', r"not UTF-8 \(invalid start byte\)"),
    ],
)
def test_a_malformed_line_is_named_or_skipped(tmp_path, line, message):
    path = tmp_path / "corpus.jsonl"
    line = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(b'{"text": "before"}\n' * 10 + line + b'\n{"text": "after"}\n')
    with pytest.raises(ValueError, match=rf"corpus\.jsonl:11: {message}.*--skip-errors"):
        read(path)
    texts, _, errors = read(path, skip_errors=True)
    assert texts == ["before"] * 10 + ["after"]
    assert len(errors) == 1 and "corpus.jsonl:11: " in errors[0]


def test_patterns_that_the_shell_has_left_are_read(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "[c].jsonl", "a.txt"):
        (tmp_path / name).write_text("{}")
    named = [str(tmp_path / "[c].jsonl"), str(tmp_path / "?.jsonl"), str(tmp_path / "absent.jsonl")]
    assert input_files(named) == [named[0], str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"), named[2]]
    with pytest.raises(UserError, match=r"\*\.md has no file: check the path"):
        input_files([str(tmp_path / "*.md")])


def test_unusable_inputs_fail_before_reading(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    odd = tmp_path / "corpus.parquet"
    odd.write_bytes(b"x")
    (tmp_path / "a.csv").write_bytes(b"x")
    for path, message in [
        (empty, r"empty\.jsonl is empty"),
        (odd, r"corpus\.parquet has columns: python tools/parquet_to_jsonl\.py --input .* makes JSON lines of it"),
        (tmp_path / "a.csv", r"unknown kind \(\.csv\): give \.jsonl"),
        (tmp_path, "is a folder: give files"),
        (tmp_path / "absent.jsonl", "does not exist"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_inputs([str(path)])
