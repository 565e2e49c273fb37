"""Cut a CUDA library to the machine code of one architecture, so that it travels small:

    python -m benchmarks.peers.keep_arch libtransformer_engine.so 90

A container of kernels keeps its place and what it has for the architecture. The rest of it becomes zeros, which
compress to nothing. A container without machine code for the architecture stays whole. The layout is that which
``fatbinary`` writes and ``cuobjdump`` reads.
"""

from __future__ import annotations

import argparse
import mmap
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fp8_megatron.commands.program import exit_status

_CONTAINER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes that follow
_MAGIC = 0xBA55ED50
#: kind, version, bytes of this header, bytes of the payload, compressed bytes, options, minor, major, architecture
_ENTRY = struct.Struct("<HHIQIIHHI")
_MACHINE_CODE = 2


class Entry(NamedTuple):
    """One payload of a container with its header: where it lies, and for which architecture (90: sm_90 and sm_90a)."""

    kind: int
    arch: int
    start: int
    size: int


def containers(image: mmap.mmap | bytes) -> Iterator[tuple[int, list[Entry]]]:
    """(offset, entries) of each container of kernels in a library.

    Raises:
        ValueError: an entry reaches beyond its container, so the layout is another one.
    """
    magic = struct.pack("<I", _MAGIC)
    at = image.find(magic)
    while at >= 0:
        _, version, header, size = _CONTAINER.unpack_from(image, at)
        if version != 1 or header != _CONTAINER.size or at + header + size > len(image):
            at = image.find(magic, at + 4)  # these four bytes in something else
            continue
        entries, place, end = [], at + header, at + header + size
        while place + _ENTRY.size <= end:
            kind, _, own, payload, *_, arch = _ENTRY.unpack_from(image, place)
            if own < _ENTRY.size or place + own + payload > end:
                raise ValueError(f"offset {place}: no entry of a container of kernels; the layout is another one")
            entries.append(Entry(kind, arch, place, own + payload))
            place += own + payload
        yield at, entries
        at = image.find(magic, end)


def keep_arch(path: Path, arch: int) -> Counter[int]:
    """Take what is for other architectures out of `path`, in place.

    Returns:
        Bytes that were there, by architecture.
    """
    found: Counter[int] = Counter()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as image:
        for at, entries in list(containers(image)):
            for entry in entries:
                found[entry.arch] += entry.size
            kept = [entry for entry in entries if entry.kind == _MACHINE_CODE and entry.arch == arch]
            if kept:
                body = b"".join(image[entry.start : entry.start + entry.size] for entry in kept)
                image[at : at + _CONTAINER.size] = _CONTAINER.pack(_MAGIC, 1, _CONTAINER.size, len(body))
                start, end = at + _CONTAINER.size, entries[-1].start + entries[-1].size
                image[start:end] = body.ljust(end - start, b"\0")
    return found


def main() -> int:
    """Cut the library and say what it had."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("library", type=Path)
    parser.add_argument("arch", type=int, help="90 for sm_90")
    args = parser.parse_args()
    for arch, size in sorted(keep_arch(args.library, args.arch).items()):
        print(f"sm_{arch}: {size / 1e6:.1f} MB{' kept' if arch == args.arch else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
