import struct
from pathlib import Path

import numpy as np
import pytest

from fp8_megatron.data import indexed
from fp8_megatron.data.indexed import check_indexed_dataset

DOCUMENTS = [[1, 2, 3], [4], [5, 6, 7, 8]]
HEADER_BYTES = 34
LENGTHS, OFFSETS, BOUNDARIES = HEADER_BYTES, HEADER_BYTES + 3 * 4, HEADER_BYTES + 3 * 4 + 3 * 8


@pytest.fixture
def prefix(write_tokens) -> str:
    return write_tokens("corpus", DOCUMENTS)


def patch(path: str, position: int, content: bytes) -> None:
    raw = bytearray(Path(path).read_bytes())
    raw[position : position + len(content)] = content
    Path(path).write_bytes(raw)


def fails(prefix: str, message: str, vocab_size: int | None = 100) -> None:
    with pytest.raises(ValueError, match=message):
        check_indexed_dataset(prefix, vocab_size)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_a_good_pair_is_summarised(write_tokens, dtype):
    summary = check_indexed_dataset(write_tokens("good", DOCUMENTS, dtype), vocab_size=9)
    assert (summary.num_documents, summary.num_tokens, summary.dtype) == (3, 8, np.dtype(dtype))


def test_extension_given(prefix):
    fails(f"{prefix}.bin", r"ends with \.bin, .*drop the extension: .*corpus$")
    fails(f"{prefix}.idx", r"ends with \.idx, .*drop the extension: .*corpus$")


def test_missing_files(prefix, tmp_path):
    fails(prefix.removesuffix("us"), r"corp\.bin and corp\.idx not found in .*did you mean .*/corpus\?")
    fails(str(tmp_path / "other"), r"other\.bin and other\.idx not found.*tools/preprocess_data\.py")
    (tmp_path / "text.jsonl").write_text("{}")
    fails(str(tmp_path / "text.jsonl"), r"turn text into tokens with tools/preprocess_data\.py")
    Path(f"{prefix}.bin").unlink()
    fails(prefix, r"no dataset at .*: corpus\.bin not found")


@pytest.mark.parametrize("extension", [".bin", ".idx"])
def test_empty_file(prefix, extension):
    Path(prefix + extension).write_bytes(b"")
    fails(prefix, rf"corpus\{extension} is empty \(0 bytes\)")


def test_bad_header(prefix):
    patch(f"{prefix}.idx", 0, b"TNTIDX\x00\x00")
    fails(prefix, r"corpus\.idx is not a Megatron index: it starts with b'TNTIDX.*expected b'MMIDIDX")


def test_bad_version_and_dtype(prefix):
    patch(f"{prefix}.idx", 9, struct.pack("<Q", 2))
    fails(prefix, "format version 2, expected 1")
    patch(f"{prefix}.idx", 9, struct.pack("<Q", 1))
    patch(f"{prefix}.idx", 17, b"\x07")
    fails(prefix, "declares tokens of float32, expected an integer type")
    patch(f"{prefix}.idx", 17, b"\x63")
    fails(prefix, "declares tokens of code 99")


@pytest.mark.parametrize("kept", [20, HEADER_BYTES + 5, -1])
def test_truncated_index(prefix, kept):
    path = Path(f"{prefix}.idx")
    path.write_bytes(path.read_bytes()[:kept])
    fails(prefix, r"corpus\.idx is truncated: \d+ bytes, ")


def test_index_with_something_after_it(prefix):
    path = Path(f"{prefix}.idx")
    path.write_bytes(path.read_bytes() * 2)
    fails(prefix, r"corpus\.idx is too long: 204 bytes, .*3 sequences, 4 document boundaries\) makes 102")


@pytest.mark.parametrize("change", [-2, -1, 2])
def test_tokens_do_not_match_the_index(prefix, change):
    path = Path(f"{prefix}.bin")
    raw = path.read_bytes()
    path.write_bytes(raw[:change] if change < 0 else raw + bytes(change))
    fails(prefix, rf"corpus\.bin has {16 + change} bytes, but corpus\.idx describes 8 tokens of uint16 = 16 bytes")


def test_damaged_lengths_offsets_and_boundaries(prefix):
    good = Path(f"{prefix}.idx").read_bytes()
    for position, content, message in [
        (LENGTHS + 4, struct.pack("<i", -5), "sequence 1 has -5 tokens"),
        (LENGTHS, struct.pack("<i", 4), "sequence 1 is said to start at byte 6, but the lengths before it make 8"),
        (OFFSETS + 16, struct.pack("<q", 1 << 40), "sequence 2 is said to start at byte 1099511627776, .* make 8"),
        (BOUNDARIES + 24, struct.pack("<q", 2), "document boundaries go from 0 to 2, expected 0 to 3"),
        (BOUNDARIES + 8, struct.pack("<q", 3), "without a step back"),
    ]:
        Path(f"{prefix}.idx").write_bytes(good)
        patch(f"{prefix}.idx", position, content)
        fails(prefix, message)


def test_offsets_are_checked_across_chunks(prefix, monkeypatch):
    monkeypatch.setattr(indexed, "_CHUNK", 2)
    assert check_indexed_dataset(prefix, 9).num_tokens == 8
    patch(f"{prefix}.idx", OFFSETS + 16, struct.pack("<q", 10))
    fails(prefix, "sequence 2 is said to start at byte 10")


def test_no_documents_or_no_tokens(write_tokens):
    nothing = write_tokens("nothing", [])
    Path(f"{nothing}.bin").write_bytes(b"\x00\x00")
    fails(nothing, "describes no documents")
    blank = write_tokens("blank", [[], []])
    Path(f"{blank}.bin").write_bytes(b"\x00\x00")
    fails(blank, "describes 2 sequences but no tokens")


def test_token_ids_outside_the_vocabulary(write_tokens, prefix):
    fails(
        prefix,
        r"token id 8 in .*corpus\.bin but the model's vocabulary is 8: preprocess with the same tokenizer, "
        r"or set --vocab-size",
        vocab_size=8,
    )
    check_indexed_dataset(prefix, vocab_size=None)
    fails(write_tokens("negative", [[3, -2, 1]], np.int32), "token id -2 in .* is negative")


def test_large_files_are_sampled_at_both_ends_and_between(write_tokens, monkeypatch):
    monkeypatch.setattr(indexed, "FULL_SCAN_BYTES", 1000)
    monkeypatch.setattr(indexed, "_SLICE_TOKENS", 10)
    tokens = np.ones(10_000, dtype=np.int64)
    for position in (0, 9_999, 9_990):
        tokens[:] = 1
        tokens[position] = 500
        fails(write_tokens("large", [tokens.tolist()]), "token id 500", vocab_size=500)
