"""Train a SentencePiece tokenizer that reproduces every text exactly, including white space and code.

    fp8-megatron tokenize --input corpus.jsonl --vocab-size 4096 --output tokenizer.model

Newline, tab and each digit are separate tokens. Runs of spaces are learned. Characters outside the vocabulary become
bytes. The only character that changes is U+2581 (▁), SentencePiece's sign for a space. The same input and flags give
the same file, byte for byte.
"""

from __future__ import annotations

import argparse
import heapq
import io
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path

import sentencepiece

from ..data.documents import check_inputs, input_files, parse_batch, read_batches
from ..outputs import check_output_file, write_output
from .arguments import Parser, file_prefix, nonempty, seed, whole
from .program import exit_status

#: Text is sampled in runs of whole lines of about this many characters.
_SEGMENT = 16_384
#: The unknown token, end of document, newline, tab, all bytes, and one character.
MIN_VOCAB_SIZE = 261
#: A SentencePiece model keeps its pieces in memory many times over while it learns.
MAX_VOCAB_SIZE = 10_000_000
#: SentencePiece starts every thread that it is told to.
MAX_THREADS = 256
_BETWEEN_SENTENCES = re.compile(r"[\n\t\x00]+")


def sample_text(paths: Sequence[str], json_keys: Sequence[str], max_bytes: int, seed: int) -> list[str]:
    """At most `max_bytes` of the text of all files: all of it, or segments drawn uniformly, in file order."""
    generator = random.Random(seed)
    kept: list[tuple[float, int, str]] = []  # heap whose first item has the largest draw and is dropped first
    total = 0
    number = count()
    for batch in read_batches(paths):
        for texts in parse_batch(batch, json_keys).texts.values():
            for segment in _segments([text if isinstance(text, str) else "\n".join(text) for text in texts]):
                heapq.heappush(kept, (-generator.random(), next(number), segment))
                total += len(segment.encode())
                while total > max_bytes:
                    total -= len(heapq.heappop(kept)[2].encode())
    return [segment for _, _, segment in sorted(kept, key=lambda entry: entry[1])]


def _segments(texts: Sequence[str]) -> Iterator[str]:
    for text in texts:
        start = 0
        while start < len(text):
            newline = text.find("\n", start + _SEGMENT, start + 2 * _SEGMENT)
            end = newline + 1 if newline >= 0 else start + 2 * _SEGMENT
            yield text[start:end]
            start = end


def train(segments: Sequence[str], *, vocab_size: int, model_type: str, num_threads: int) -> bytes:
    """Train and return the serialised model.

    Raises:
        ValueError: there is too little text for `vocab_size`.
    """
    model = io.BytesIO()
    sentences = (part for segment in segments for part in _BETWEEN_SENTENCES.split(segment) if part)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences,
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            max_sentence_length=8 * _SEGMENT,
            num_threads=num_threads,
            train_extremely_large_corpus=False,
            minloglevel=2,
            # Ids: unknown (unused, because bytes cover all text), end of document, newline, tab, bytes, pieces.
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            user_defined_symbols=["\n", "\t"],
            byte_fallback=True,
            character_coverage=0.9995,
            split_digits=True,
            # No normalisation: text must survive the round trip.
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
        )
    except RuntimeError as error:
        raise ValueError(_problem(vocab_size, " ".join(str(error).split()))) from error
    return model.getvalue()


def _problem(vocab_size: int, message: str) -> str:
    """What to do after SentencePiece's error `message`."""
    too_large, too_small = (
        re.search(pattern, message) for pattern in (r"value <= (\d+)", r"required_chars\. \d+ vs (\d+)")
    )
    if too_large is not None:
        return (
            f"cannot make --vocab-size {vocab_size} of this text, which gives {too_large[1]} tokens at most: lower it "
            f"to that, or give more text"
        )
    if too_small is not None:
        return (
            f"cannot make --vocab-size {vocab_size} of this text, whose bytes and characters alone are {too_small[1]} "
            f"tokens: raise it to more than that"
        )
    return f"SentencePiece cannot learn from this text ({message}): give other --input"


def run(arguments: argparse.Namespace) -> int:
    """Sample, train, check the round trip, write."""
    output = Path(arguments.output or f"{arguments.output_prefix}.model")
    if output.exists() and not arguments.overwrite:
        raise ValueError(f"{output} exists: give another name, or --overwrite")
    check_output_file(output, "--output")
    arguments.input = input_files(arguments.input)
    check_inputs(arguments.input)
    start = time.monotonic()
    segments = sample_text(arguments.input, arguments.json_keys, arguments.max_bytes, arguments.seed)
    if not segments:
        raise ValueError("no text in the input: check --input and --json-keys")
    model = train(
        segments, vocab_size=arguments.vocab_size, model_type=arguments.model_type, num_threads=arguments.workers
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    num_bytes = sum(len(segment.encode()) for segment in segments)
    sample = segments[:: max(1, len(segments) // 64)]
    num_tokens = sum(map(len, processor.encode(sample)))
    write_output(output, model, "--output")
    print(
        f"{output}: {processor.vocab_size()} {arguments.model_type} tokens from {num_bytes / 1e6:.1f} MB of text in "
        f"{time.monotonic() - start:.1f} s; {sum(len(text.encode()) for text in sample) / num_tokens:.2f} bytes a token"
    )
    return 0


def parse_arguments(words: Sequence[str] | None = None, prog: str | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(prog=prog, description=__doc__)
    parser.add_argument(
        "--input", nargs="+", required=True, type=nonempty, metavar="FILE", help=".jsonl or .txt[.gz|.xz|.bz2|.zst]"
    )
    output = parser.add_mutually_exclusive_group(required=True)
    output.add_argument("--output", type=nonempty, help="the .model file to write")
    output.add_argument("--output-prefix", type=file_prefix, help="the same without .model")
    parser.add_argument(
        "--json-keys", nargs="+", default=["text"], type=nonempty, metavar="KEY", help="keys with text (text)"
    )
    parser.add_argument(
        "--vocab-size", type=whole(least=MIN_VOCAB_SIZE, most=MAX_VOCAB_SIZE), default=32_000, help="tokens (32000)"
    )
    parser.add_argument("--model-type", choices=("bpe", "unigram"), default="bpe", help="bpe, or unigram (slower)")
    parser.add_argument(
        "--max-bytes", type=whole(), default=10_000_000, help="text to learn from, drawn evenly (10000000)"
    )
    parser.add_argument("--seed", type=seed, default=1234, help="of that draw")
    parser.add_argument(
        "--workers", type=whole(most=MAX_THREADS), default=2, help="threads; a unigram model depends on them (2)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing model")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None, prog: str = "train_tokenizer.py") -> int:
    """Exit status: 0, or 2 after an error message."""
    return exit_status(partial(run, parse_arguments(words, prog)), ValueError, OSError)


if __name__ == "__main__":
    sys.exit(main())
