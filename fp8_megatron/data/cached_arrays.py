"""Arrays in a cache: written whole, with checksums that are compared once, and mapped by every rank. Imports no torch.

The checksum is that of checkpoints, CRC-32: it finds damage, not forgery. Nothing that is read is executed.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ..errors import UserError
from ..outputs import writing_to
from .temporary_files import temporary_folder

logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 22


def make_files(folder: Path, names: Sequence[str], sums: str, write: Callable[[Path], object]) -> None:
    """Have the files of a cache hold what `write` makes. For one rank; it reads all of them.

    Files that agree with their checksums stay. Otherwise all are made in a temporary folder, and those that differ are
    replaced. So a cache without checksums is compared with what it should be. This holds also where the cache is
    read-only and stays without. Two runs that both miss a file write the same.

    Args:
        folder: of the cache.
        names: of the files.
        sums: name of the file of their checksums.
        write: writes all of the files into another folder.

    Raises:
        UserError: the folder cannot be written.
    """
    found = {name: _checksum(folder / name) for name in names}
    recorded = _recorded(folder / sums)
    if found == recorded:
        return
    if recorded is None and all(found.values()):
        logger.info("%s has no checksums of %s: they are made again and compared", folder, ", ".join(names))
        if not os.access(folder, os.W_OK) and _made_elsewhere(names, write) == found:
            return
    for name in names:
        if recorded is not None and found[name] not in ("", recorded.get(name)):
            logger.warning("making %s again: it is damaged", folder / name)
    with writing_to(folder, "--data-cache-path"), temporary_folder(folder) as temporary:
        write(temporary)
        made = {name: _checksum(temporary / name) for name in names}
        for name in names:
            now = _checksum(folder / name)
            if now == made[name]:
                continue  # other hosts may have mapped it
            if now and recorded is None:
                logger.warning("making %s again: it is damaged", folder / name)
            os.replace(temporary / name, folder / name)
        (temporary / sums).write_text(json.dumps(made, indent=1), encoding="utf-8")
        os.replace(temporary / sums, folder / sums)


def _made_elsewhere(names: Sequence[str], write: Callable[[Path], object]) -> dict[str, str]:
    """The checksums of what `write` makes, which is not kept."""
    with tempfile.TemporaryDirectory() as made, writing_to(Path(made), "the temporary folder"):
        write(Path(made))
        return {name: _checksum(Path(made) / name) for name in names}


def map_arrays(folder: Path, names: Sequence[str], what: str) -> list[np.ndarray]:
    """The arrays of `make_files`, mapped. Every rank calls it after rank 0 has made them.

    Args:
        what: what they are, for the error.

    Raises:
        UserError: this host does not see them.
    """
    try:
        return [np.load(folder / name, mmap_mode="r", allow_pickle=False) for name in names]
    except FileNotFoundError:
        raise UserError(
            f"rank 0 wrote {what} to {folder}, which this host does not see; give --data-cache-path a folder that all "
            f"hosts share"
        ) from None


def _recorded(path: Path) -> dict[str, str] | None:
    """The checksums of a file; None if there are none that can be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _checksum(path: Path) -> str:
    """CRC-32 of a file; empty if it is not there."""
    checksum = 0
    buffer = memoryview(bytearray(_READ_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            while num_read := file.readinto(buffer):
                checksum = zlib.crc32(buffer[:num_read], checksum)
    except FileNotFoundError:
        return ""
    return f"{checksum:08x}"
