"""Text to tokens: JSON lines or plain text in, Megatron's PREFIX_KEY_document.bin/.idx out.

    fp8-megatron preprocess --input corpus.jsonl.xz --tokenizer-model tokenizer.model \\
        --output-prefix data/corpus --append-eod --workers 8

Each line with a JSON object is one document (--json-keys names the keys of its text). A plain-text file (.txt, .md)
is one document; with --split-on-blank-lines, each paragraph is one. Files get their names when they are complete.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from ..config.schema import DataConfig, TokenizerType
from ..data.documents import check_inputs, input_files, is_plain_text, read_batches
from ..data.text_encoding import EncodedBatch, TextEncoding, encode_all, load_splitter, load_tokenizer
from ..data.token_writer import PartitionedWriter, token_dtype
from ..data.tokenizer_settings import TOKENIZER_TYPES, TokenizerOptions
from ..errors import UserError
from ..outputs import check_output_file, writing_to
from .arguments import Parser, file_prefix, nonempty, whole
from .program import exit_status

#: Text in a batch, at most and at least, if no document is longer.
_MOST_BATCH_BYTES, _LEAST_BATCH_BYTES = 1 << 19, 1 << 15
_SHOWN_ERRORS = 5
#: Each partition keeps a file open for each JSON key.
MAX_PARTITIONS = 256


class ProgressReport:
    """A progress bar on a terminal; elsewhere a line every `log_interval` documents."""

    def __init__(self, total_bytes: int, log_interval: int):
        console = Console(stderr=True)
        self.num_documents = 0
        self.num_tokens = 0
        self.text_bytes = 0
        self.start = time.monotonic()
        self._log_interval = log_interval
        self._total_bytes = total_bytes
        self._shows_bar = console.is_terminal
        columns = (BarColumn(), DownloadColumn(), TextColumn("{task.fields[rates]}"), TimeRemainingColumn())
        self.bar = Progress(*columns, console=console, disable=not self._shows_bar)
        self._task = self.bar.add_task("", total=total_bytes, rates="")

    def add(self, batch: EncodedBatch) -> None:
        """Count a batch and show the rates so far."""
        before = self.num_documents // self._log_interval
        self.num_documents += batch.num_documents
        self.num_tokens += sum(len(documents.ids) for documents in batch.tokens.values())
        self.text_bytes += batch.text_bytes
        self.bar.update(self._task, completed=batch.bytes_consumed, rates=self.rates())
        if not self._shows_bar and self.num_documents // self._log_interval > before:
            elapsed = time.monotonic() - self.start
            left = elapsed * (self._total_bytes / max(batch.bytes_consumed, 1) - 1)
            print(f"{self.num_documents:,} documents, {self.rates()}, {max(left, 0):.0f} s left", file=sys.stderr)

    def rates(self) -> str:
        """Documents, megabytes of decompressed input, and tokens per second."""
        seconds = max(time.monotonic() - self.start, 1e-9)
        return (
            f"{self.num_documents / seconds:,.0f} documents/s, {self.text_bytes / seconds / 1e6:.2f} MB/s, "
            f"{self.num_tokens / seconds:,.0f} tokens/s"
        )


def preprocess(arguments: argparse.Namespace, stop: threading.Event) -> int:
    """Read, tokenise and write. After a ValueError or OSError (also raised if `stop` is set) no file remains."""
    encoding = TextEncoding(
        tokenizer_type=tokenizer_type_of(arguments),
        tokenizer_model=arguments.tokenizer_model,
        vocab_size=arguments.vocab_size,
        options=TokenizerOptions.of(arguments),
        json_keys=tuple(arguments.json_keys),
        append_eod=arguments.append_eod,
        skip_errors=arguments.skip_errors,
        split_sentences=arguments.split_sentences,
        keep_newlines=arguments.keep_newlines,
        language=arguments.lang or "english",
    )
    num_workers = _bounded(arguments.workers)
    arguments.input = input_files(arguments.input)
    _check_no_flag_is_ignored(arguments)
    num_bytes = check_inputs(arguments.input)
    report = ProgressReport(num_bytes, arguments.log_interval)
    prefixes = _output_prefixes(arguments.output_prefix, encoding, arguments.overwrite)
    dtype = token_dtype(load_tokenizer(encoding).vocab_size)
    load_splitter(encoding)
    num_partitions = 1 if arguments.keep_sequential_samples else arguments.partitions
    # Of a short input every worker gets several batches, so that all end at about the same time.
    batch_bytes = max(_LEAST_BATCH_BYTES, min(_MOST_BATCH_BYTES, num_bytes // (16 * num_workers)))
    batches = read_batches(
        arguments.input, split_on_blank_lines=arguments.split_on_blank_lines, batch_bytes=batch_bytes
    )
    errors: list[str] = []
    num_empty = num_errors = 0
    with ExitStack() as stack:
        writers = {
            key: stack.enter_context(PartitionedWriter(prefix, dtype, num_partitions))
            for key, prefix in prefixes.items()
        }
        stack.enter_context(report.bar)
        for batch in encode_all(encoding, batches, num_workers, batch_bytes=batch_bytes):
            for key, documents in batch.tokens.items():
                writers[key].add(documents)
            num_empty += batch.num_empty
            num_errors += len(batch.errors)
            errors += batch.errors[: _SHOWN_ERRORS - len(errors)]
            report.add(batch)
            if stop.is_set():
                raise InterruptedError("stopped by SIGTERM: nothing is written")
        _check_not_empty(writers, num_errors, num_empty)
        for writer in writers.values():
            writer.commit()
    seconds = time.monotonic() - report.start
    for writer in writers.values():
        print(f"{writer.prefix}: {writer.num_documents:,} documents, {writer.num_tokens:,} tokens of {dtype.__name__}")
    print(f"{seconds:.1f} s: {report.rates()}")
    if num_empty:
        print(f"empty documents, kept without tokens: {num_empty:,}")
    if num_errors:
        print(f"malformed documents, left out: {num_errors:,}; the first: " + "; ".join(errors))
    return 0


def _output_prefixes(output_prefix: str, encoding: TextEncoding, overwrite: bool) -> dict[str, str]:
    """The prefix of each JSON key's dataset. Makes its folder.

    Raises:
        ValueError: the dataset exists, or cannot be written.
    """
    json_keys = encoding.json_keys
    if repeated := [key for key in json_keys if json_keys.count(key) > 1]:
        raise UserError(f"--json-keys names {repeated[0]!r} twice; name each key once")
    if unfit := [key for key in json_keys if "/" in key]:
        raise UserError(f"--json-keys {unfit[0]}: a slash cannot be part of the output's name; rename that key")
    prefixes = {key: f"{output_prefix}_{key}_{encoding.level}" for key in json_keys}
    for prefix in prefixes.values():
        for path in (Path(f"{prefix}.bin"), Path(f"{prefix}.idx")):
            if path.exists() and not overwrite:
                raise ValueError(f"{path} exists: give another --output-prefix, or --overwrite")
            check_output_file(path, "--output-prefix")
    with writing_to(Path(output_prefix), "--output-prefix"):
        Path(output_prefix).parent.mkdir(parents=True, exist_ok=True)
    return prefixes


def _check_no_flag_is_ignored(arguments: argparse.Namespace) -> None:
    kind = tokenizer_type_of(arguments)
    if kind in ("NullTokenizer", "GPT2BPETokenizer") and arguments.tokenizer_model is not None:
        raise UserError(f"--tokenizer-model {arguments.tokenizer_model} is not read by a {kind}; leave it out")
    if arguments.keep_newlines and not arguments.split_sentences:
        raise UserError("--keep-newlines is about --split-sentences, which is not given; give both or neither")
    if arguments.lang is not None and not arguments.split_sentences:
        raise UserError(f"--lang {arguments.lang} is about --split-sentences, which is not given; give both or neither")
    if arguments.split_on_blank_lines and not any(map(is_plain_text, arguments.input)):
        raise UserError("--split-on-blank-lines cuts plain text, and --input has JSON lines alone; leave it out")


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _bounded(num_workers: int) -> int:
    """At most one worker a core. The output does not depend on their number."""
    if num_workers > num_cores():
        print(f"--workers {num_workers}: this process has {num_cores()} cores, so {num_cores()} run", file=sys.stderr)
    return min(num_workers, num_cores())


def _check_not_empty(writers: dict[str, PartitionedWriter], num_errors: int, num_empty: int) -> None:
    for key, writer in writers.items():
        if writer.num_tokens == 0:
            raise ValueError(
                f'no text under "{key}" in the input ({num_errors} malformed and {num_empty} empty documents): '
                f"nothing is written; check --input and --json-keys"
            )


def parse_arguments(words: Sequence[str] | None = None, prog: str | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(prog=prog, description=__doc__)
    parser.add_argument(
        "--input", nargs="+", required=True, type=nonempty, metavar="FILE", help=".jsonl or .txt[.gz|.xz|.bz2|.zst]"
    )
    parser.add_argument(
        "--output-prefix", required=True, type=file_prefix, help="path of the output, without _KEY_document.bin/.idx"
    )
    parser.add_argument(
        "--json-keys", nargs="+", default=["text"], type=nonempty, metavar="KEY", help="keys with text (text)"
    )
    parser.add_argument("--split-on-blank-lines", action="store_true", help="plain text: one document a paragraph")
    add_tokenizer_arguments(parser)
    parser.add_argument("--split-sentences", action="store_true", help="cut documents into sentences with NLTK")
    parser.add_argument("--keep-newlines", action="store_true", help="sentences keep the white space behind them")
    parser.add_argument("--lang", type=nonempty, help="of --split-sentences (english)")
    parser.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    parser.add_argument(
        "--workers", type=whole(), default=num_cores(), help="processes, at most one a core (one a core)"
    )
    parser.add_argument("--log-interval", type=whole(), default=1000, help="documents between progress lines (1000)")
    parser.add_argument(
        "--partitions",
        type=whole(most=MAX_PARTITIONS),
        default=1,
        help="deal documents out to this many parts, one by one, and join the parts: Megatron's order with partitions",
    )
    parser.add_argument("--keep-sequential-samples", action="store_true", help="keep their order with --partitions too")
    parser.add_argument("--dataset-impl", choices=("mmap",), default="mmap", help="the format; there is one")
    parser.add_argument("--skip-errors", action="store_true", help="count and leave out malformed documents")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None, prog: str = "preprocess_data.py") -> int:
    """Exit status: 0, 2 after an error message, or 130 after Ctrl-C."""
    arguments = parse_arguments(words, prog)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # there is already one process per core
    # The handler only sets a flag: Python swallows exceptions of a handler while a process is being forked.
    stop = threading.Event()
    previous = signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        return exit_status(partial(preprocess, arguments, stop), ValueError, OSError)
    except KeyboardInterrupt:
        print("interrupted: nothing is written", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)


def tokenizer_type_of(arguments: argparse.Namespace) -> TokenizerType:
    """The kind of tokenizer, with the default filled in as in training."""
    kind: TokenizerType | None = arguments.tokenizer_type
    files = {"vocab_file": arguments.vocab_file, "merge_file": arguments.merge_file}
    return DataConfig(tokenizer_type=kind, **files).tokenizer_kind


def add_tokenizer_arguments(parser: Parser) -> None:
    """--tokenizer-type and what goes with it."""
    parser.add_argument(
        "--tokenizer-type",
        choices=TOKENIZER_TYPES,
        help="as in training (GPT2BPETokenizer with --vocab-file or --merge-file, else SentencePieceTokenizer)",
    )
    parser.add_argument(
        "--tokenizer-model",
        type=nonempty,
        help="SentencePiece .model, tiktoken .json, Hugging Face tokenizer folder or name on the hub",
    )
    parser.add_argument("--vocab-file", type=nonempty, help="of a GPT2BPETokenizer: gpt2-vocab.json")
    parser.add_argument("--merge-file", type=nonempty, help="of a GPT2BPETokenizer: gpt2-merges.txt")
    parser.add_argument("--vocab-size", type=whole(least=2), help="of a NullTokenizer or a TikTokenizer")
    parser.add_argument("--tiktoken-pattern", choices=("v1", "v2"), default="v2", help="of a TikTokenizer (v2)")
    parser.add_argument(
        "--tiktoken-num-special-tokens", type=whole(), default=1000, help="of a TikTokenizer: ids before the file's"
    )
    parser.add_argument(
        "--tokenizer-special-tokens", nargs="+", default=[], type=nonempty, help="tokens that are never cut"
    )
    parser.add_argument(
        "--tokenizer-hf-no-include-special-tokens",
        action="store_true",
        help="a HuggingFaceTokenizer adds no tokens around a text, such as a Llama's BOS",
    )
    parser.add_argument(
        "--null-tokenizer-eod-id", type=whole(least=0), help="of a NullTokenizer: what ends a document (the last id)"
    )


if __name__ == "__main__":
    sys.exit(main())
