#!/usr/bin/env python3
"""Build a corpus that every machine has: sources and texts of the running Python's standard library, as JSON lines.

    python tools/build_quickstart_corpus.py --output corpus.jsonl --max-mb 8

The corpus is for trying out training, not for a useful model. Its order is a seeded shuffle; the same Python gives the
same file.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import random
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

if importlib.util.find_spec("fp8_megatron") is None:  # a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fp8_megatron.commands.arguments import Parser, output_file, real, seed
from fp8_megatron.commands.program import exit_status
from fp8_megatron.outputs import write_output

_SUFFIXES = (".py", ".txt", ".rst")
#: Folders of test data, generated tables, build settings and installed packages.
_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages", "config", "ensurepip", "encodings"}
)
_MIN_BYTES = 200
_MAX_BYTES = 400_000
#: Minimal share of letters among visible characters. Prose and code have 0.7 and more; tables of numbers have less.
_MIN_LETTER_SHARE = 0.55


def library_documents(root: Path) -> Iterator[tuple[str, str]]:
    """(path below `root`, text) of every useful file, sorted by path, each text once."""
    paths = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS and not name.startswith("config-")]
        paths += [
            Path(folder, name) for name in files if name.endswith(_SUFFIXES) and not name.startswith("_sysconfigdata")
        ]
    seen = set()
    for path in sorted(paths, key=lambda path: path.relative_to(root).as_posix()):
        try:
            raw = path.read_bytes()
            text = raw.decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        digest = hashlib.sha256(raw).digest()
        if digest in seen or not _MIN_BYTES <= len(raw) <= _MAX_BYTES or not _is_language(text):
            continue
        seen.add(digest)
        yield path.relative_to(root).as_posix(), text


def _is_language(text: str) -> bool:
    visible = "".join(text.split())
    return "\x00" not in text and sum(map(str.isalpha, visible)) >= _MIN_LETTER_SHARE * len(visible)


def build(root: Path, output: Path, max_bytes: int, seed: int) -> tuple[int, int]:
    """Write the corpus. Returns (documents, bytes of text); the latter is at most `max_bytes`."""
    documents = list(library_documents(root))
    random.Random(seed).shuffle(documents)
    lines = []
    num_bytes = 0
    for source, text in documents:
        size = len(text.encode())
        if num_bytes + size > max_bytes:
            continue
        num_bytes += size
        lines.append(json.dumps({"text": text, "source": source}, ensure_ascii=False))
    if not lines:
        raise ValueError(
            f"no text of at most {max_bytes} bytes found in {root}: raise --max-mb, or install Python with its sources"
        )
    write_output(output, ("\n".join(lines) + "\n").encode(), "--output")
    return len(lines), num_bytes


def main(words: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 after an error message."""
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--output", type=output_file, required=True, help="the .jsonl file to write (replaced if it exists)"
    )
    parser.add_argument("--max-mb", type=real(above=0, most=1e9), default=8.0, help="megabytes of text at most (8)")
    parser.add_argument("--seed", type=seed, default=1234, help="of the shuffle")
    arguments = parser.parse_args(words)
    root = Path(sysconfig.get_paths()["stdlib"])
    try:
        num_documents, num_bytes = build(root, arguments.output, int(arguments.max_mb * 1e6), arguments.seed)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.output}: {num_documents} documents, {num_bytes / 1e6:.2f} MB of text from {root}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
