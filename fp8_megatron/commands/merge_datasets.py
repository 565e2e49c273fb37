"""Join token files: every .bin/.idx pair of a folder, in the order of their names, into one pair.

    fp8-megatron merge --input data/parts --output-prefix data/corpus_text_document

Document and sequence boundaries stay. All pairs need one dtype, so preprocess them with one tokenizer. Files get their
names when they are complete.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..data.indexed import check_indexed_dataset
from ..data.token_writer import DatasetWriter
from ..errors import UserError
from ..outputs import check_output_file, writing_to
from .arguments import Parser, file_prefix, path
from .program import exit_status

if TYPE_CHECKING:
    import numpy as np

    from ..data.indexed import IndexedSummary


def merge(arguments: argparse.Namespace) -> int:
    """Check all pairs, then join them. After an error no file remains.

    Raises:
        UserError: the folder has no pairs, a pair is damaged, multimodal or of another dtype, or the output exists.
    """
    prefix: str = arguments.output_prefix
    outputs = [Path(f"{prefix}{extension}") for extension in (".bin", ".idx")]
    prefixes = [name for name in _prefixes(arguments.input) if Path(name).resolve() != Path(prefix).resolve()]
    for output in outputs:
        if output.exists() and not arguments.overwrite:
            raise UserError(f"{output} exists: give another --output-prefix, or --overwrite")
        check_output_file(output, "--output-prefix")
    if not prefixes:
        raise UserError(f"--input {arguments.input} has no .bin/.idx pairs to join: give the folder that holds them")
    summaries = [check_indexed_dataset(name) for name in prefixes]
    first = summaries[0]
    other = next((summary for summary in summaries if summary.dtype != first.dtype), None)
    if other is not None:
        raise UserError(
            f"{other.prefix} has tokens of {other.dtype}, {first.prefix} of {first.dtype}: they are of vocabularies of "
            f"other sizes; preprocess all with one tokenizer"
        )
    multimodal = next((summary for summary in summaries if summary.has_modes), None)
    if multimodal is not None:
        raise UserError(
            f"{multimodal.prefix}.idx is that of a multimodal dataset, whose modes would be lost: join text alone, or "
            f"use Megatron's merge_datasets.py --multimodal"
        )
    with writing_to(outputs[0], "--output-prefix"):
        outputs[0].parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        writer = stack.enter_context(DatasetWriter(prefix, first.dtype.type))
        for summary in summaries:
            writer.append_tokens(Path(f"{summary.prefix}.bin"), summary.sequence_lengths, _document_ends(summary))
        writer.commit()
    print(
        f"{prefix}: {writer.num_documents:,} documents, {writer.num_tokens:,} tokens of {first.dtype} from "
        f"{len(summaries)} pairs"
    )
    return 0


def _prefixes(folder: Path) -> list[str]:
    """The prefixes of all pairs of a folder, sorted.

    Raises:
        UserError: it is no folder, or one of a pair is missing.
    """
    if not folder.is_dir():
        raise UserError(f"--input {folder} is no folder: give the one that holds the .bin/.idx pairs")
    extensions: dict[str, set[str]] = {}
    for file in folder.iterdir():
        if file.is_file() and file.suffix in (".bin", ".idx"):
            extensions.setdefault(str(file.with_suffix("")), set()).add(file.suffix)
    for prefix, found in sorted(extensions.items()):
        missing = {".bin", ".idx"} - found
        if missing:
            raise UserError(f"{prefix} has no {missing.pop()}: copy it too, or move its {found.pop()} away")
    return sorted(extensions)


def _document_ends(summary: IndexedSummary) -> np.ndarray:
    """The end of each document in sequences, int64 [documents]."""
    return summary.document_boundaries[1:].astype("int64")


def parse_arguments(words: Sequence[str] | None = None, prog: str | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(prog=prog, description=__doc__)
    parser.add_argument("--input", required=True, type=path, metavar="FOLDER", help="the folder of the pairs")
    parser.add_argument("--output-prefix", required=True, type=file_prefix, help="path of the output without .bin/.idx")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None, prog: str = "merge_datasets.py") -> int:
    """Exit status: 0, or 2 after an error message."""
    return exit_status(partial(merge, parse_arguments(words, prog)), ValueError, OSError)


if __name__ == "__main__":
    sys.exit(main())
