#!/usr/bin/env python3
"""Build a corpus that every machine has: sources and texts of the running Python's standard library, as JSON lines.

    python tools/build_quickstart_corpus.py --output corpus.jsonl --max-mb 8

The corpus is for trying out training, not for a useful model. Its order is a seeded shuffle; the same Python gives the
same file.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

if importlib.util.find_spec("fp8_megatron") is None:  # a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fp8_megatron.commands.arguments import Parser, output_file, real, seed
from fp8_megatron.commands.program import exit_status
from fp8_megatron.data.library_corpus import build


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
