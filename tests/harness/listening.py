"""What processes listen at, as Linux tells it."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

_LISTENS = "0A"


def listening(*processes: int) -> set[tuple[str, int]]:
    """(address, port) of every TCP socket that these processes listen at; without one, this process."""
    return {place for process in processes or (os.getpid(),) for place in _of_process(process)}


def beyond_loopback(*processes: int) -> set[tuple[str, int]]:
    """Those of `listening` that another machine may reach."""
    return {place for place in listening(*processes) if not ipaddress.ip_address(place[0]).is_loopback}


def _of_process(process: int) -> list[tuple[str, int]]:
    inodes = set()
    with suppress(FileNotFoundError):
        for link in Path(f"/proc/{process}/fd").iterdir():
            with suppress(FileNotFoundError):
                inodes.add(os.readlink(link))
    places = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with suppress(FileNotFoundError):
            for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and f"socket:[{fields[9]}]" in inodes:
                    places.append(_place(fields[1], family))
    return places


def _place(word: str, family: socket.AddressFamily) -> tuple[str, int]:
    """An entry such as ``0100007F:1F90``: words of 32 bits in this machine's order of bytes, and the port."""
    address, port = word.split(":")
    words = [int(address[i : i + 8], 16) for i in range(0, len(address), 8)]
    return socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words)), int(port, 16)
