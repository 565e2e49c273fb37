#!/usr/bin/env python3
"""Parquet and Arrow files, as public corpora are published, as JSON lines: one document a row.

    python tools/parquet_to_jsonl.py --input part-0.parquet part-1.parquet --output corpus.jsonl --json-keys text

An input may also be a folder of such files, as `datasets` saves them, or a pattern in quotes.

Rows are read in groups, so memory does not grow with the files. Other columns are left out, and so are rows without
text. `fp8-megatron preprocess` reads the output; a name that ends in .gz is compressed.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

if importlib.util.find_spec("fp8_megatron") is None:  # a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fp8_megatron.commands.arguments import Parser, nonempty, output_file
from fp8_megatron.commands.program import exit_status
from fp8_megatron.data.documents import COLUMN_SUFFIXES, input_files
from fp8_megatron.errors import UserError
from fp8_megatron.outputs import writing_to

_ROWS = 1024
#: gzip's fastest level: the file is read once.
_GZIP_LEVEL = 1


def rows(path: Path, keys: Sequence[str]) -> Iterator[dict[str, str | None]]:
    """The rows of a file with the columns `keys` alone.

    Raises:
        UserError: it cannot be read, a column is missing or holds no text, or pyarrow is not installed.
    """
    try:
        from pyarrow import ArrowException, types
    except ImportError as error:
        raise UserError(f"input {path} is Parquet or Arrow: pip install pyarrow") from error
    try:
        with _opened(path) as (schema, batches):
            columns = {field.name: field.type for field in schema}
            for key in keys:
                if key not in columns:
                    raise UserError(f'{path}: no column "{key}" (it has {sorted(columns)}; see --json-keys)')
                if not (types.is_string(columns[key]) or types.is_large_string(columns[key])):
                    raise UserError(f'{path}: column "{key}" is {columns[key]}, expected strings')
            for batch in batches(list(keys)):
                yield from batch.to_pylist()
    except (ArrowException, OSError) as error:
        raise UserError(f"input {path} cannot be read: {str(error).splitlines()[0]}") from error


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Callable[[list[str]], Iterator[Any]]]]:
    """A file's schema, and its record batches with some columns. Arrow files are streams, as `datasets` writes them, or
    have the file format."""
    from pyarrow import ArrowInvalid, ipc, memory_map, parquet

    if path.suffix != ".arrow":
        with parquet.ParquetFile(path) as file:
            yield file.schema_arrow, lambda keys: file.iter_batches(batch_size=_ROWS, columns=keys)
        return
    with memory_map(str(path)) as source:
        try:
            stream = ipc.open_stream(source)
        except ArrowInvalid:
            reader = ipc.open_file(source)
            numbers = range(reader.num_record_batches)
            yield reader.schema, lambda keys: (reader.get_batch(number).select(keys) for number in numbers)
        else:
            yield stream.schema, lambda keys: (batch.select(keys) for batch in stream)


def write_lines(inputs: Sequence[Path], keys: Sequence[str], output: Path) -> tuple[int, int]:
    """Write all rows to `output`, which appears when it is complete. Returns (documents, rows left out)."""
    output.parent.mkdir(parents=True, exist_ok=True)
    aside = output.with_name(f"{output.name}.partial")
    num_written = num_empty = 0
    opened: Callable[[], Any] = partial(gzip.open, aside, "wb", _GZIP_LEVEL)
    if output.suffix != ".gz":
        opened = partial(open, aside, "wb")
    try:
        with writing_to(output, "--output"):
            with opened() as stream:
                for row in chain.from_iterable(rows(path, keys) for path in inputs):
                    if not all(row.values()):
                        num_empty += 1
                        continue
                    stream.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
                    num_written += 1
            aside.replace(output)
    finally:
        aside.unlink(missing_ok=True)
    return num_written, num_empty


def main(words: Sequence[str] | None = None) -> int:
    """Exit status."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--input", nargs="+", required=True, type=nonempty, metavar="FILE", help=".parquet or .arrow, or folders"
    )
    parser.add_argument("--output", required=True, type=output_file, metavar="FILE", help=".jsonl or .jsonl.gz")
    parser.add_argument("--json-keys", nargs="+", default=["text"], type=nonempty, metavar="KEY", help="columns (text)")
    own = parser.parse_args(words)
    inputs = [Path(name) for name in input_files(own.input, of_folders=COLUMN_SUFFIXES)]
    for path in inputs:
        if not path.is_file():
            raise UserError(f"input {path} does not exist")
    num_written, num_empty = write_lines(inputs, own.json_keys, own.output)
    if num_written == 0:
        raise UserError(f"{', '.join(own.input)}: no row has text")
    print(f"{own.output}: {num_written:,} documents, {num_empty:,} rows without text left out")
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
