"""Text that every machine has: sources and texts of the running Python's standard library, as JSON lines.

It is for trying out training. Its order is a seeded shuffle; the same Python gives the same file.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

from ..outputs import write_output

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
    """Write the corpus of the library at `root`. Returns (documents, bytes of text); the latter is at most `max_bytes`.

    Raises:
        ValueError: there is no text.
    """
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
            f"no text of at most {max_bytes} bytes found in {root}: raise the limit (--max-mb), or install "
            "Python with its sources"
        )
    write_output(output, ("\n".join(lines) + "\n").encode(), "--output")
    return len(lines), num_bytes
