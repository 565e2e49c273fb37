"""Documents in text files (JSON lines or plain text, compressed or not), and their sentences.

Reading and parsing are separate: one process decompresses raw bytes (`read_batches`), and many parse
them (`parse_batch`).
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from glob import glob, has_magic
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal

from ..errors import UserError

JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
TEXT_SUFFIXES = (".txt", ".text", ".md")
#: Files of tools/parquet_to_jsonl.py.
COLUMN_SUFFIXES = (".parquet", ".arrow")
COMPRESSED_SUFFIXES = (".gz", ".xz", ".bz2", ".zst")

#: Keys of an object that an error lists.
_SHOWN_KEYS = 8
_UTF8_BOM = b"\xef\xbb\xbf"
#: Compressed bytes decompressed at once. Limits memory: 4 bytes of Zstandard can give 128 KiB, so a chunk 64 MiB.
_ZSTD_CHUNK_BYTES = 1 << 11
#: Lines of white space alone, as `bytes.strip` knows it, and the end of the line before them.
_BLANK_LINE = re.compile(rb"(?:\A|\n)(?:[ \t\r\v\f]*\n)+")

TextLayout = Literal["json_lines", "whole_file", "paragraphs"]


@dataclass(frozen=True)
class RawBatch:
    """Whole lines of one file, not yet parsed."""

    path: str
    layout: TextLayout
    #: Line number of the first line of `content`, from 1.
    first_line: int
    content: bytes
    #: Bytes on disk (compressed) consumed so far, over all files.
    bytes_consumed: int


@dataclass
class ParsedBatch:
    """Documents of one batch: for each JSON key its texts, and for each document its ``file:line``.

    A document that is a list of sentences in its file is a list of strings here.
    """

    texts: dict[str, list[str | list[str]]]
    places: list[str] = field(default_factory=list)
    #: The error of each skipped document.
    errors: list[str] = field(default_factory=list)


def input_files(words: Sequence[str], *, of_folders: Sequence[str] = ()) -> list[str]:
    """The files that words of --input name, in order: patterns (``'data/*.jsonl'``) that the shell has left, and, with
    suffixes `of_folders`, the files of a folder that have one.

    Raises:
        UserError: a pattern or a folder has no file.
    """
    found: list[str] = []
    for word in words:
        path, files = Path(word), [word]
        if path.is_dir() and of_folders:
            files = sorted(str(file) for file in path.rglob("*") if file.suffix in of_folders)
        elif not path.exists() and has_magic(word):
            files = sorted(glob(word, recursive=True))
        if not files:
            raise UserError(f"input {word} has no file: check the path{'' if has_magic(word) else ' of the folder'}")
        found += files
    return found


def check_inputs(paths: Sequence[str]) -> int:
    """Bytes on disk of all inputs. Raises UserError if one is missing, empty, a folder or of an unknown kind."""
    total = 0
    for name in paths:
        path = Path(name)
        if path.is_dir():
            raise UserError(f"input {name} is a folder: give files, e.g. {name}/*.jsonl")
        if not path.is_file():
            raise UserError(f"input {name} does not exist")
        if path.stat().st_size == 0:
            raise UserError(f"input {name} is empty (0 bytes): leave it out, or write it again")
        _text_suffix(name)
        total += path.stat().st_size
    return total


def is_plain_text(name: str) -> bool:
    """Whether a file's name is that of plain text, not of JSON lines."""
    return _text_suffix(name) in TEXT_SUFFIXES


def read_batches(
    paths: Sequence[str], *, split_on_blank_lines: bool = False, batch_bytes: int = 1 << 19
) -> Iterator[RawBatch]:
    """The lines of all files in order, about `batch_bytes` of text at a time. Documents are never split.

    A plain-text file is one document; with `split_on_blank_lines`, each paragraph is one.

    Raises:
        UserError: a file that cannot be decompressed.
    """
    finished_bytes = 0
    for name in paths:
        is_json = _text_suffix(name) in JSON_SUFFIXES
        layout: TextLayout = "json_lines" if is_json else "paragraphs" if split_on_blank_lines else "whole_file"
        line = 1
        with open(name, "rb") as raw, _decompressed(name, raw) as stream:
            while content := _next_lines(stream, layout, batch_bytes):
                first_line, line = line, line + content.count(b"\n")
                if first_line == 1:
                    content = content.removeprefix(_UTF8_BOM)
                yield RawBatch(name, layout, first_line, content, finished_bytes + raw.tell())
        finished_bytes += Path(name).stat().st_size


def parse_batch(batch: RawBatch, json_keys: Sequence[str], *, skip_errors: bool = False) -> ParsedBatch:
    """The texts of a batch. A plain-text document has one text, under the first key.

    Raises:
        UserError: a malformed document; the message names ``file:line``. With `skip_errors` it is skipped and listed.
    """
    keys = json_keys if batch.layout == "json_lines" else json_keys[:1]
    parsed = ParsedBatch(texts={key: [] for key in keys})
    for line, content in documents_of(batch):
        try:
            texts: list[str | list[str]]
            if batch.layout == "json_lines":
                texts = _json_texts(content, keys)
            else:
                texts = [content.decode("utf-8")]
            for text in texts:
                "".join(text).encode("utf-8")  # JSON may contain lone surrogates, which no tokenizer accepts
        except (ValueError, RecursionError) as error:
            message = f"{batch.path}:{line}: {_reason(error)}"
            if not skip_errors:
                raise UserError(f"{message}. Correct it, or leave such documents out with --skip-errors") from error
            parsed.errors.append(message)
            continue
        parsed.places.append(f"{batch.path}:{line}")
        for key, text in zip(keys, texts, strict=True):
            parsed.texts[key].append(text)
    return parsed


def documents_of(batch: RawBatch) -> Iterator[tuple[int, bytes]]:
    """(line number, bytes) of each document in a batch. Blank lines are skipped."""
    if batch.layout == "whole_file":
        yield batch.first_line, batch.content
        return
    if batch.layout == "json_lines":
        for offset, content in enumerate(batch.content.split(b"\n")):
            if content.strip():
                yield batch.first_line + offset, content
        return
    line, position = batch.first_line, 0
    for gap in [*_BLANK_LINE.finditer(batch.content), None]:
        end = gap.start() if gap else len(batch.content)
        paragraph = batch.content[position:end]
        if paragraph.strip():
            yield line + paragraph[: len(paragraph) - len(paragraph.lstrip())].count(b"\n"), paragraph.strip(b"\r\n")
        if gap:
            line += batch.content.count(b"\n", position, gap.end())
            position = gap.end()


def _json_texts(line: bytes, keys: Sequence[str]) -> list[str | list[str]]:
    document = json.loads(line)
    if not isinstance(document, dict):
        raise UserError(f"expected a JSON object on every line, found {type(document).__name__}")
    texts: list[str | list[str]] = []
    for key in keys:
        if key not in document:
            found = ", ".join(map(repr, list(document)[:_SHOWN_KEYS])) + (", …" if len(document) > _SHOWN_KEYS else "")
            raise UserError(f'no key "{key}" (it has {found or "none"}; see --json-keys)')
        if isinstance(document[key], list):
            if not all(isinstance(sentence, str) for sentence in document[key]):
                raise UserError(f'"{key}" is a list of other things than strings')
        elif not isinstance(document[key], str):
            raise UserError(f'"{key}" is {type(document[key]).__name__}, expected a string or a list of sentences')
        texts.append(document[key])
    return texts


def _reason(error: ValueError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "it nests lists or objects too deeply to be read"
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON ({error.msg} at column {error.colno})"
    if isinstance(error, UnicodeDecodeError | UnicodeEncodeError):
        return f"not UTF-8 ({error.reason})"
    return str(error)


def _next_lines(stream: IO[bytes], layout: TextLayout, batch_bytes: int) -> bytes:
    if layout == "whole_file":
        return stream.read()
    parts = [stream.read(batch_bytes)]
    if not parts[0].endswith(b"\n"):
        parts.append(stream.readline())
    if layout == "paragraphs":
        while (line := stream.readline()).strip():
            parts.append(line)
        parts.append(line)
    return b"".join(parts)


def _text_suffix(name: str) -> str:
    """The suffix before a compression suffix: ``.jsonl`` of ``corpus.jsonl.xz``."""
    path = Path(name)
    suffix = Path(path.stem).suffix if path.suffix in COMPRESSED_SUFFIXES else path.suffix
    if suffix in COLUMN_SUFFIXES:
        raise UserError(
            f"input {name} has columns: python tools/parquet_to_jsonl.py --input {name} --output corpus.jsonl makes "
            f"JSON lines of it"
        )
    if suffix not in JSON_SUFFIXES + TEXT_SUFFIXES:
        raise UserError(
            f"input {name} is of an unknown kind ({suffix or 'no suffix'}): give {', '.join(JSON_SUFFIXES)} for JSON "
            f"lines or {', '.join(TEXT_SUFFIXES)} for plain text, with or without {', '.join(COMPRESSED_SUFFIXES)}"
        )
    return suffix


@contextmanager
def _decompressed(name: str, raw: BinaryIO) -> Iterator[IO[bytes]]:
    """The text of an open file. Errors of its decompressor become UserErrors."""
    suffix = Path(name).suffix
    stream: Any = raw  # the decompressors have no common type
    damage: tuple[type[Exception], ...] = ()
    if suffix == ".gz":
        stream, damage = gzip.open(raw), (EOFError, gzip.BadGzipFile, zlib.error)  # noqa: SIM115
    elif suffix == ".xz":
        stream, damage = lzma.open(raw), (EOFError, lzma.LZMAError)  # noqa: SIM115
    elif suffix == ".bz2":
        stream, damage = bz2.open(raw), (EOFError, OSError)  # noqa: SIM115
    elif suffix == ".zst":
        try:
            zstandard = import_module("zstandard")
        except ImportError as error:
            raise UserError(f"input {name} is Zstandard: pip install zstandard") from error
        reader = _ZstandardReader(raw, zstandard.ZstdDecompressor())
        stream, damage = io.BufferedReader(reader), (EOFError, zstandard.ZstdError)
    try:
        yield stream
    except damage as error:
        raise UserError(f"input {name} cannot be decompressed ({error}): it is truncated or not {suffix}") from error


class _ZstandardReader(io.RawIOBase):
    """The text of all frames of a Zstandard file.

    zstandard's own reader does not report a file that ends inside a frame.

    Raises:
        EOFError: the file ends inside a frame.
    """

    def __init__(self, raw: BinaryIO, decompressor: Any):
        self._text, self._chunks = memoryview(b""), _zstandard_chunks(raw, decompressor)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._text:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._text = memoryview(chunk)
        size = min(len(buffer), len(self._text))
        buffer[:size], self._text = self._text[:size], self._text[size:]
        return size


def _zstandard_chunks(raw: BinaryIO, decompressor: Any) -> Iterator[bytes]:
    """Parts of the text; some may be empty."""
    compressed, frame = b"", None
    while compressed := compressed or raw.read(_ZSTD_CHUNK_BYTES):
        frame = frame or decompressor.decompressobj()
        yield frame.decompress(compressed)
        compressed = frame.unused_data
        if frame.eof:
            frame = None
    if frame is not None:
        raise EOFError("the last frame has no end")


#: Characters that are cut at once, as in Megatron's tool: a sentence ends there at the latest.
_MOST_CHARACTERS = 1_000_000


class SentenceSplitter:
    """Cuts texts of one language with NLTK's Punkt (Kiss and Strunk, 2006, doi 10.1162/coli.2006.32.4.485).

    Args:
        language: of Punkt's models, such as english.
        keep_newlines: each sentence keeps the white space behind it. Otherwise the white space between is left out.

    Raises:
        UserError: NLTK or its model of the language is not installed.
    """

    def __init__(self, language: str, *, keep_newlines: bool):
        try:
            from nltk.tokenize.punkt import PunktTokenizer
        except ImportError as error:
            raise UserError("--split-sentences needs NLTK: pip install nltk") from error
        try:
            self._punkt: Any = PunktTokenizer(language)
        except (LookupError, ValueError) as error:
            raise UserError(
                f"--split-sentences: NLTK has no model of --lang {language} here: python -m nltk.downloader punkt_tab "
                f"where there is a network, and NLTK_DATA for another folder"
            ) from error
        self._keeps_newlines = keep_newlines

    def split(self, text: str) -> list[str]:
        """The sentences of a text, in order."""
        parts = (text[start : start + _MOST_CHARACTERS] for start in range(0, len(text), _MOST_CHARACTERS))
        return [sentence for part in parts for sentence in self._sentences(part)]

    def _sentences(self, text: str) -> list[str]:
        spans = list(self._punkt.span_tokenize(text))
        if self._keeps_newlines and spans:
            starts = [start for start, _ in spans]
            spans = list(pairwise([*starts, len(text.rstrip())]))
        return [text[start:end] for start, end in spans]
