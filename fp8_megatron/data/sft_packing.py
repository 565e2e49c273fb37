"""Which conversations share a sample."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np


def pack_best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Items in packs: from the longest to the shortest, each goes where it leaves the least room.

    Best-fit decreasing: at most 11/9 of the fewest packs, and one more (Johnson et al., SIAM J. Comput. 3, 1974).

    Args:
        lengths: int [n], each at most `capacity`. Equal lengths are taken in their order.
        capacity: the length of a pack.

    Returns:
        The items of each pack, the longest first.
    """
    assert len(lengths) == 0 or int(lengths.max()) <= capacity
    packs: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # by their room
    rooms: list[int] = []  # the keys of `with_room`, sorted
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        place = bisect_left(rooms, length)
        if place == len(rooms):
            pack, room = len(packs), capacity
            packs.append([])
        else:
            room = rooms[place]
            pack = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[place]
        packs[pack].append(item)
        left = room - length
        if left not in with_room:
            with_room[left] = []
            insort(rooms, left)
        with_room[left].append(pack)
    return packs
