"""Damages of files, drawn by seed: as disks, transfers, editors and mistakes make them."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

#: Values that stand in a damaged JSON file in place of another.
_WRONG_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1.5, 10**30, float("nan"), float("inf")),
    *("", "x", "128", "\ud800", "../x", [], {}, [None], {"a": 1}),
)
_HUGE = (2**63 - 1, 2**64 - 1, 2**62, 2**40, 2**31, 0)


def damaged(content: bytes, draw: random.Random, others: Sequence[bytes]) -> tuple[str, bytes]:
    """Damage a file in one way.

    Args:
        others: contents of files of other kinds, one of which may take its place.

    Returns:
        The damage in words, and the new content, which differs from the old one.
    """
    for _ in range(100):
        name = draw.choice(sorted(_DAMAGES))
        changed = _DAMAGES[name](content, draw, others)
        if changed != content:
            return name, changed
    return "empty", b""


def _place(content: bytes, draw: random.Random) -> int:
    """A place in the file; in every other case near the start, where headers are."""
    return draw.randrange(max(1, min(len(content), 96) if draw.random() < 0.5 else len(content)))


def _truncated(content: bytes, draw: random.Random, _: Sequence[bytes]) -> bytes:
    return content[: draw.randrange(len(content) + 1)]


def _empty(*_: object) -> bytes:
    return b""


def _flipped_bits(content: bytes, draw: random.Random, _: Sequence[bytes]) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 4, 64)) if changed else 0):
        changed[_place(content, draw)] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _zeros(content: bytes, draw: random.Random, _: Sequence[bytes]) -> bytes:
    start, length = _place(content, draw), draw.choice((1, 8, 64, 4096))
    return content[:start] + bytes(len(content[start : start + length])) + content[start + length :]


def _noise(content: bytes, draw: random.Random, _: Sequence[bytes]) -> bytes:
    start, length = _place(content, draw), draw.choice((1, 8, 64, 4096))
    return content[:start] + draw.randbytes(len(content[start : start + length])) + content[start + length :]


def _inserted(content: bytes, draw: random.Random, _: Sequence[bytes]) -> bytes:
    start = _place(content, draw)
    return content[:start] + draw.randbytes(draw.choice((1, 8, 300))) + content[start:]


def _cut_out(content: bytes, draw: random.Random, _: Sequence[bytes]) -> bytes:
    start = _place(content, draw)
    return content[:start] + content[start + draw.choice((1, 8, 300)) :]


def _huge_field(content: bytes, draw: random.Random, _: Sequence[bytes]) -> bytes:
    start, value = _place(content, draw), draw.choice(_HUGE)
    field = struct.pack("<Q", value) if draw.random() < 0.7 else struct.pack("<I", value % 2**32)
    return content[:start] + field + content[start + len(field) :]


def _random_bytes(_: bytes, draw: random.Random, __: Sequence[bytes]) -> bytes:
    return draw.randbytes(draw.choice((1, 9, 100, 5000)))


def _other_file(_: bytes, draw: random.Random, others: Sequence[bytes]) -> bytes:
    return draw.choice(others)


def _deep(content: bytes, draw: random.Random, _: Sequence[bytes]) -> bytes:
    start = _place(content, draw)
    return content[:start] + draw.choice((b"[", b'{"a":', b"- ")) * 100_000 + content[start:]


def _wrong_value(content: bytes, draw: random.Random, _: Sequence[bytes]) -> bytes:
    """Another value at a random place of a JSON file, or of one line of JSON lines. Other files stay."""
    lines = content.split(b"\n")
    try:
        document, index = json.loads(content), None
    except ValueError:
        index = draw.randrange(len(lines))
        try:
            document = json.loads(lines[index])
        except ValueError:
            return content
    text = json.dumps(_with_wrong_value(document, draw)).encode()
    return text if index is None else b"\n".join([*lines[:index], text, *lines[index + 1 :]])


def _with_wrong_value(document: Any, draw: random.Random) -> Any:
    if not isinstance(document, dict | list) or not document or draw.random() < 0.1:
        return draw.choice(_WRONG_VALUES)
    if isinstance(document, list):
        index = draw.randrange(len(document))
        return [*document[:index], _with_wrong_value(document[index], draw), *document[index + 1 :]]
    key = draw.choice(sorted(document))
    if draw.random() < 0.1:
        return {name: value for name, value in document.items() if name != key}
    return {**document, key: _with_wrong_value(document[key], draw)}


_DAMAGES: dict[str, Callable[[bytes, random.Random, Sequence[bytes]], bytes]] = {
    "truncated": _truncated,
    "empty": _empty,
    "flipped bits": _flipped_bits,
    "zeros": _zeros,
    "noise": _noise,
    "inserted bytes": _inserted,
    "bytes cut out": _cut_out,
    "huge field": _huge_field,
    "random bytes": _random_bytes,
    "another file": _other_file,
    "deep nesting": _deep,
    "a wrong value": _wrong_value,
    "another wrong value": _wrong_value,
}
