"""How csrc/norm_backward_quantize.cu is cut for a shape: threads, rows at once, and a block's shared memory."""

from __future__ import annotations

from dataclasses import dataclass

#: Columns of a thread, best first, and the threads of a block that have registers for three sums per column. 32 is for
#: long rows that still need no more than 128 threads.
_COLUMNS_A_THREAD = {16: 512, 24: 256, 8: 512}
_MANY_COLUMNS, _MANY_COLUMNS_THREADS, _LONG_ROW = 32, 256, 2048
_MOST_GROUPS = 4
_TRANSPOSED_ROWS = 32
_FEWEST_STAGES, _MOST_STAGES = 2, 6
_BARRIER_BYTES = _SLOT_BYTES = 8
#: Column sums: for the norm's weight, for its bias, of the result.
NUM_SUMS = 3


@dataclass(frozen=True)
class KernelPlan:
    """The kernel's macros that follow from the shape; see csrc for what they mean.

    Attributes:
        shared_bytes: a block's shared memory.
    """

    columns: int
    parts: int
    transposed: bool
    row_threads: int
    groups: int
    tile_rows: int
    stages: int
    shared_bytes: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.row_threads * self.groups

    def macros(self, *, rms: bool, has_bias: bool, has_residual: bool) -> dict[str, int]:
        """All macros of the kernel."""
        return {
            "COLUMNS": self.columns,
            "PARTS": self.parts,
            "TRANSPOSED": self.transposed,
            "ROW_THREADS": self.row_threads,
            "GROUPS": self.groups,
            "TILE_ROWS": self.tile_rows,
            "STAGES": self.stages,
            "IS_RMS": rms,
            "HAS_BIAS": has_bias,
            "HAS_RESIDUAL": has_residual,
        }


def plan(columns: int, parts: int, *, transposed: bool, shared_bytes: int) -> KernelPlan | None:
    """The plan for rows of `columns` elements, a number of summands of the gradient, and a block's shared memory.

    None if the kernel does not take the shape. It needs whole vectors of 8 columns per thread, whole warps per row, and
    shared memory for two rows ahead beside the tile.
    """
    shape = _threads(columns)
    if shape is None or (transposed and columns % 128):
        return None
    threads, groups = shape
    tile_rows, tile_bytes = (_TRANSPOSED_ROWS, _TRANSPOSED_ROWS * columns) if transposed else (groups, 0)
    slots = 2 * groups * (threads // 32) * _SLOT_BYTES
    sums = (groups - 1) * NUM_SUMS * columns * 4
    for stages in range(_MOST_STAGES, _FEWEST_STAGES - 1, -1):
        rows = groups * stages * ((parts + 1) * 2 * columns + _BARRIER_BYTES)
        taken = max(tile_bytes + rows + slots, sums)
        if taken <= shared_bytes:
            return KernelPlan(columns, parts, transposed, threads, groups, tile_rows, stages, taken)
    return None


def _threads(columns: int) -> tuple[int, int] | None:
    """Threads of a row, and rows at once."""
    choices = list(_COLUMNS_A_THREAD.items())
    if _LONG_ROW < columns <= _MANY_COLUMNS * _MANY_COLUMNS_THREADS // 2:
        choices.insert(0, (_MANY_COLUMNS, _MANY_COLUMNS_THREADS))
    for columns_a_thread, most in choices:
        threads, rest = divmod(columns, columns_a_thread)
        if rest == 0 and threads % 32 == 0 and 0 < threads <= most:
            groups = 1
            while 2 * groups <= _MOST_GROUPS and 2 * groups * threads <= most:
                groups *= 2
            return threads, groups
    return None
