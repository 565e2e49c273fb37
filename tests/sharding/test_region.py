"""The map from a rank's part of a parameter to the whole tensor."""

from __future__ import annotations

import pytest
import torch

from fp8_megatron.sharding.region import Region


@pytest.mark.parametrize(
    ("shape", "axis", "pieces", "rank", "size", "matrices"),
    [
        ((7, 5), None, 1, 0, 1, (0, 1)),
        ((6, 5), 0, 1, 1, 3, (0, 1)),
        ((6, 5), 0, 2, 1, 2, (0, 1)),
        ((6, 5), 1, 1, 2, 3, (0, 1)),
        ((12,), 0, 2, 1, 2, (0, 1)),
        ((9,), None, 1, 0, 2, (0, 1)),
        ((3, 4, 5), None, 1, 0, 1, (0, 1)),
        ((3, 4, 5), 0, 1, 1, 3, (0, 1)),
        ((3, 4, 5), 1, 1, 1, 2, (0, 1)),
        ((3, 4, 5), 1, 2, 1, 2, (0, 1)),
        ((3, 4, 5), 2, 1, 0, 2, (0, 1)),
        ((3, 4, 5), None, 1, 0, 1, (1, 3)),
        ((3, 4, 5), 1, 2, 1, 2, (1, 3)),
        ((3, 4, 5), 2, 1, 0, 2, (1, 3)),
    ],
)
@pytest.mark.parametrize("stacked", [(), ((2, 3),), ((2, 3), (4, 8))], ids=["plain", "layers", "stacks"])
def test_every_element_has_its_place(
    shape: tuple[int, ...],
    axis: int | None,
    pieces: int,
    rank: int,
    size: int,
    stacked: tuple[tuple[int, int], ...],
    matrices: tuple[int, int],
) -> None:
    """Against indexing the whole tensor: element i of the rank's part goes where `part_of` takes it from."""
    region = Region(shape, axis, pieces, rank, size, stacked=stacked, matrices=matrices)
    depth = len(stacked)
    assert region.global_shape == (*(count for _, count in stacked), *region.whole_shape)
    whole = torch.arange(torch.Size(region.whole_shape).numel()).view(region.whole_shape)
    mine = whole.chunk(matrices[1])[matrices[0]]
    mine = mine if axis is None else torch.cat(mine.chunk(size * pieces, dim=axis)[rank::size], dim=axis)
    assert torch.equal(region.part_of(whole), mine) and mine.shape == shape
    flat = mine.flatten()
    numel = flat.numel()
    for length in (1, 4, 8, numel, numel + 3):
        found = torch.full((numel,), -1)
        for start in range(0, numel, length):
            parts = list(region.rectangles(start, length))
            # Parts of rows at both ends, rows up to the end of a matrix at both ends, and whole matrices in between.
            assert len(parts) <= 2 * len(shape) - 1 + pieces - 1 or (axis == 1 and pieces == 2)
            for part in parts:
                assert (
                    part.offset[:depth] == tuple(index for index, _ in stacked) and part.sizes[:depth] == (1,) * depth
                )
                ends = zip(part.offset[depth:], part.sizes[depth:], strict=True)
                box = whole[tuple(slice(a, a + n) for a, n in ends)]
                assert (found[part.start : part.start + part.numel] == -1).all()
                found[part.start : part.start + part.numel] = box.flatten()
        assert torch.equal(found, flat), length
    cut = region.cut
    if cut is not None:
        places = [cut.first + i // cut.width * cut.stride + i % cut.width for i in range(numel)]
        assert torch.equal(whole.flatten()[places], flat)


@pytest.mark.parametrize("rank", range(4))
def test_parts_may_be_uneven(rank: int) -> None:
    """As torch's Shard cuts: 9 rows over 4 ranks are 3, 3, 3 and none."""
    whole = torch.arange(45).view(9, 5)
    chunks = whole.chunk(4, dim=0)
    mine = chunks[rank] if rank < len(chunks) else whole[:0]
    region = Region(tuple(mine.shape), 0, rank=rank, size=4, axis_size=9)
    assert not region.is_even and region.global_shape == (9, 5)
    assert torch.equal(region.part_of(whole), mine)
