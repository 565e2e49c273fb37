"""Numbers of blocks. Triton's own functions of these names serve kernels too, and cost the host 3 µs a call."""

from __future__ import annotations


def cdiv(n: int, block: int) -> int:
    """⌈n / block⌉."""
    return -(-n // block)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below `n` ≥ 1."""
    return 1 << (n - 1).bit_length()


def round_up(n: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `n`."""
    return cdiv(n, multiple) * multiple
