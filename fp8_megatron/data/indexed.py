"""The index of a token dataset (Megatron's .bin/.idx pair): written here, and checked before training. Errors name the
file, the fault and the fix. Imports no torch.

The .idx file is: 9 bytes magic, uint64 version, uint8 dtype code, uint64 sequences n, uint64 document boundaries d;
then int32[n] lengths in tokens, int64[n] byte offsets into .bin, int64[d] boundaries in sequences (the first 0, the
last n), and in multimodal datasets int8[n] modes. The .bin file contains only the tokens.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import UserError
from .token_files import PREPROCESS_AGAIN, token_file_pair

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
#: The index's code of each dtype of tokens.
_CODES: dict[str, int] = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
_OTHER_CODES = {6: "float64", 7: "float32"}
#: .bin files up to this size are searched whole for token ids outside the vocabulary. Larger ones are sampled.
FULL_SCAN_BYTES = 64 << 20
_NUM_SLICES = 32
_SLICE_TOKENS = 1 << 18
_CHUNK = 1 << 20


@dataclass(frozen=True, eq=False)
class IndexedSummary:
    """Contents of a token dataset."""

    prefix: str
    dtype: np.dtype
    num_documents: int
    num_tokens: int
    #: Tokens of each sequence, int32, mapped from the file.
    sequence_lengths: np.ndarray
    #: Where documents start and the last one ends, in sequences, int64 [documents + 1], mapped from the file.
    document_boundaries: np.ndarray
    #: Whether the index has a mode for each sequence, as those of multimodal datasets.
    has_modes: bool


def check_indexed_dataset(prefix: str, vocab_size: int | None = None) -> IndexedSummary:
    """Check that ``prefix.bin`` and ``prefix.idx`` belong together and fit the vocabulary.

    Reads all of .idx, and all of .bin up to 64 MB; of a larger .bin, 32 slices of 256k tokens.

    Args:
        prefix: path without extension.
        vocab_size: upper bound of token ids (exclusive). None: do not check token ids.

    Raises:
        UserError: the first fault that was found.
    """
    bin_path, idx_path = token_file_pair(prefix)
    dtype, num_sequences, num_boundaries = _read_header(idx_path)
    lengths = np.memmap(idx_path, np.int32, "r", _HEADER.size, (num_sequences,))
    offsets = np.memmap(idx_path, np.int64, "r", _HEADER.size + lengths.nbytes, (num_sequences,))
    boundaries = np.memmap(idx_path, np.int64, "r", _HEADER.size + lengths.nbytes + offsets.nbytes, (num_boundaries,))
    num_tokens = _check_sequences(idx_path, lengths, offsets, dtype)
    _check_boundaries(idx_path, boundaries, num_sequences)
    expected = num_tokens * dtype.itemsize
    actual = bin_path.stat().st_size
    if actual != expected:
        raise UserError(
            f"{bin_path} has {actual} bytes, but {idx_path.name} describes {num_tokens} tokens of {dtype.name} = "
            f"{expected} bytes: the two are from different runs, or {bin_path.name} was cut short; copy both again, "
            f"or {PREPROCESS_AGAIN}"
        )
    if vocab_size is not None:
        _check_token_ids(bin_path, dtype, vocab_size)
    has_modes = idx_path.stat().st_size > _HEADER.size + 12 * num_sequences + 8 * num_boundaries
    return IndexedSummary(prefix, dtype, num_boundaries - 1, num_tokens, lengths, boundaries, has_modes)


def write_index(path: Path, dtype: np.dtype, lengths: np.ndarray, document_ends: np.ndarray) -> None:
    """Write an .idx file, with the bytes of megatron-core's `IndexedDatasetBuilder`.

    Args:
        dtype: of the tokens.
        lengths: tokens of each sequence, int32 [sequences].
        document_ends: the end of each document in sequences, int64 [documents].
    """
    starts = np.zeros(len(lengths), dtype=np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=starts[1:])
    with open(path, "wb") as file:
        file.write(_HEADER.pack(_MAGIC, 1, _CODES[dtype.name], len(lengths), len(document_ends) + 1))
        for part in (lengths.astype(np.int32), starts * dtype.itemsize, np.zeros(1, np.int64), document_ends):
            file.write(np.ascontiguousarray(part).data)


def may_have_ends(summary: IndexedSummary, eod: int) -> bool:
    """Whether the token that ends a document is among the first 64 MB of a dataset's tokens or is its last one.

    Also true of a single document, whose end is the dataset's.
    """
    tokens = np.memmap(f"{summary.prefix}.bin", summary.dtype, "r")
    first = tokens[: FULL_SCAN_BYTES // summary.dtype.itemsize]
    return summary.num_documents == 1 or bool(tokens[-1] == eod) or bool((first == eod).any())


def _read_header(idx_path: Path) -> tuple[np.dtype, int, int]:
    """(dtype of tokens, number of sequences, number of document boundaries). Checks the file's size."""
    size = idx_path.stat().st_size
    with open(idx_path, "rb") as stream:
        head = stream.read(_HEADER.size)
    if not head.startswith(_MAGIC):
        raise UserError(
            f"{idx_path} is not a Megatron index: it starts with {head[:9]!r}, expected {_MAGIC!r}; "
            f"{PREPROCESS_AGAIN} (files of fairseq or of other tools are not read)"
        )
    if size < _HEADER.size:
        raise UserError(
            f"{idx_path} is truncated: {size} bytes, its header alone is {_HEADER.size}; {PREPROCESS_AGAIN}"
        )
    _, version, code, num_sequences, num_boundaries = _HEADER.unpack(head)
    if version != 1:
        raise UserError(f"{idx_path} has format version {version}, expected 1; {PREPROCESS_AGAIN}")
    dtype = next((np.dtype(name) for name, own in _CODES.items() if own == code), None)
    if dtype is None:
        found = _OTHER_CODES.get(code, f"code {code}")
        raise UserError(f"{idx_path} declares tokens of {found}, expected an integer type; {PREPROCESS_AGAIN}")
    expected = _HEADER.size + 12 * num_sequences + 8 * num_boundaries
    if size not in (expected, expected + num_sequences):
        state = "truncated" if size < expected else "too long"
        raise UserError(
            f"{idx_path} is {state}: {size} bytes, but its header ({num_sequences} sequences, {num_boundaries} "
            f"document boundaries) makes {expected}; copy it again, or {PREPROCESS_AGAIN}"
        )
    if num_sequences == 0 or num_boundaries < 2:
        raise UserError(
            f"{idx_path} describes no documents ({num_sequences} sequences, {num_boundaries} document boundaries): "
            f"the preprocessed text was empty; {PREPROCESS_AGAIN} on text"
        )
    return dtype, num_sequences, num_boundaries


def _check_sequences(idx_path: Path, lengths: np.ndarray, offsets: np.ndarray, dtype: np.dtype) -> int:
    """The number of tokens, after checking that the byte offsets are the running sum of the lengths."""
    num_tokens = 0
    for start in range(0, len(lengths), _CHUNK):
        length = np.asarray(lengths[start : start + _CHUNK], dtype=np.int64)
        if (length < 0).any():
            index = int(np.argmax(length < 0))
            raise UserError(
                f"{idx_path} is damaged: sequence {start + index} has {length[index]} tokens; "
                f"copy it again, or {PREPROCESS_AGAIN}"
            )
        ends = num_tokens + np.cumsum(length)
        expected = np.concatenate(([num_tokens], ends[:-1])) * dtype.itemsize
        wrong = np.asarray(offsets[start : start + _CHUNK]) != expected
        if wrong.any():
            index = int(np.argmax(wrong))
            raise UserError(
                f"{idx_path} is damaged: sequence {start + index} is said to start at byte {offsets[start + index]}, "
                f"but the lengths before it make {expected[index]}; copy it again, or {PREPROCESS_AGAIN}"
            )
        num_tokens = int(ends[-1])
    if num_tokens == 0:
        raise UserError(f"{idx_path} describes {len(lengths)} sequences but no tokens; {PREPROCESS_AGAIN} on text")
    return num_tokens


def _check_boundaries(idx_path: Path, boundaries: np.ndarray, num_sequences: int) -> None:
    if boundaries[0] != 0 or boundaries[-1] != num_sequences or (np.diff(boundaries) < 0).any():
        raise UserError(
            f"{idx_path} is damaged: its document boundaries go from {boundaries[0]} to {boundaries[-1]}, expected "
            f"0 to {num_sequences} (sequences) without a step back; copy it again, or {PREPROCESS_AGAIN}"
        )


def _check_token_ids(bin_path: Path, dtype: np.dtype, vocab_size: int) -> None:
    tokens = np.memmap(bin_path, dtype, "r")
    if tokens.nbytes <= FULL_SCAN_BYTES:
        starts, width = np.arange(0, len(tokens), _CHUNK), _CHUNK
    else:
        starts, width = np.linspace(0, len(tokens) - _SLICE_TOKENS, _NUM_SLICES, dtype=np.int64), _SLICE_TOKENS
    for start in starts:
        part = tokens[start : start + width]
        lowest, highest = int(part.min()), int(part.max())
        if highest >= vocab_size:
            raise UserError(
                f"token id {highest} in {bin_path} but the model's vocabulary is {vocab_size}: "
                f"preprocess with the same tokenizer, or set --vocab-size"
            )
        if lowest < 0:
            raise UserError(f"token id {lowest} in {bin_path} is negative: the file is damaged; {PREPROCESS_AGAIN}")
