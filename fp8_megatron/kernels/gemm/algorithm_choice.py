"""Which of several algorithms for one GEMM is the fastest. All of them write the same bits.

cuBLASLt's heuristic is up to 30% off where accumulation is fast, as in forward (docs/notebook.md).
Timing chooses better. It changes no result, because an algorithm that writes other bits is left out. cuBLASLt's differ
in their tiles alone, not in the order in which a sum is added up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

#: Launches between two events, and how often each algorithm is timed in turn.
_LAUNCHES, _ROUNDS = 3, 5
#: The GPU sleeps for so many cycles (about 10 ms) while the host queues all launches: so they run without a gap.
_SLEEP_CYCLES = 20_000_000
#: An algorithm must be faster than the first one by this factor. Timings of one algorithm differ by about as much.
_LEAST_GAIN = 1.02


def fastest(count: int, launch: Callable[[int], bool], out: Tensor, addend: Tensor | None = None) -> int:
    """The index of the fastest of `count` algorithms that write what the first one writes. Waits for the stream.

    0 if all rows of `out` are alike, or are those of `addend`, as with a weight or an input that begins as zeros:
    algorithms that add up in another order write them too.

    Args:
        launch: queues the algorithm of an index on the current stream; False: it does not run.
        out: contiguous [M, N], at a multiple of 8 bytes, as are its rows: what each launch writes. Write it again
            afterwards.
        addend: as `out`; what the GEMM adds to its product, or None.
    """
    if count <= 1:
        return 0
    with no_dispatch():  # whoever looks on sees one GEMM
        runs = []
        digests = []
        for index in range(count):
            if launch(index):
                runs.append(index)
                digests.append(_digest(out))
        if runs[:1] != [0]:
            return 0
        tells, *is_equal = _on_host(torch.cat([_tells(out, digests[0], addend), _are_equal(digests)]))
        if not tells:
            return 0
        candidates = [index for index, equal in zip(runs, is_equal, strict=True) if equal]
        return candidates[chosen(_timed(candidates, launch))]


def chosen(times: Sequence[Sequence[float]]) -> int:
    """The row of the algorithm to take: the fastest if it beats the first row clearly, else 0.

    Args:
        times: for each algorithm, its times in the same rounds. Rounds are compared one by one, as clocks change.
    """
    gains = [median(first / own for first, own in zip(times[0], row, strict=True)) for row in times]
    best = max(range(len(gains)), key=gains.__getitem__)
    return best if gains[best] >= _LEAST_GAIN else 0


def _tells(out: Tensor, digest: Tensor, addend: Tensor | None) -> Tensor:
    """Whether the product's own bits are in the digest of `out`: bool [1]."""
    rows = digest[-out.shape[0] :]
    tells = (rows != rows[:1]).any()
    if addend is not None:
        tells = tells & (_digest(addend) != digest).any()
    return tells[None]


def _are_equal(digests: list[Tensor]) -> Tensor:
    """Which are equal to the first one: bool [n]."""
    return (torch.stack(digests) == digests[0]).all(dim=1)


def _digest(out: Tensor) -> Tensor:
    """Sums of the bits of each row and of each column of eight bytes: int64 [M + N'], wrapping around."""
    bits = out.view(torch.int64)
    return torch.cat([bits.sum(dim=0), bits.sum(dim=1)])


def _on_host(marks: Tensor) -> list[bool]:
    """The values of `marks`, bool [n]. Torch's warnings of code that waits do not see it: it happens once."""
    if not marks.is_cuda:
        return [bool(mark) for mark in marks]
    host = torch.empty(marks.shape, dtype=marks.dtype, device="cpu", pin_memory=True)
    host.copy_(marks, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    copied.synchronize()
    return [bool(mark) for mark in host]


def _timed(candidates: Sequence[int], launch: Callable[[int], bool]) -> list[list[float]]:
    """Milliseconds of each candidate in each round."""
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    torch.cuda._sleep(_SLEEP_CYCLES)
    for _ in range(_ROUNDS):
        for index in candidates:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(_LAUNCHES):
                launch(index)
            end.record()
            events.append((start, end))
    # Not the device: another stream may wait for a rank that waits for this one.
    events[-1][1].synchronize()
    times = [start.elapsed_time(end) for start, end in events]
    return [times[position :: len(candidates)] for position in range(len(candidates))]
