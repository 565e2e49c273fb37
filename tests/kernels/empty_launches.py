"""Run by test_prepared_launch.py: launches that do nothing and write down their arguments, without a GPU."""

# The parameters of a Triton kernel have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from benchmarks import layer_overhead
from fp8_megatron.kernels.launch import Launcher

launches: list[tuple[Any, ...]] = []


class Recorder:
    """In place of the launcher of a compiled kernel."""

    def __init__(self, source: object, metadata: object) -> None:
        del source, metadata

    def __call__(self, *arguments: Any) -> None:
        write_down(arguments[:5], arguments[9:])


class CudaLauncher(Recorder):
    """By its name Triton's, whose Python only allocates scratch memory and calls a compiled function."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = False, True

    def __call__(self, *arguments: Any) -> None:
        self.launch(*arguments[:5], self.launch_cooperative_grid, self.launch_pdl, None, None, *arguments[5:])

    def launch(self, *arguments: Any) -> None:
        write_down(arguments[:9], arguments[13:])


def write_down(head: tuple[Any, ...], arguments: tuple[Any, ...]) -> None:
    """Grid, stream, function and what stands before metadata and hooks; the kernel's arguments. Triton passes tensors,
    and a `Launcher` their addresses.
    """
    launches.append((head, tuple(value.data_ptr() if isinstance(value, Tensor) else value for value in arguments)))


@triton.jit
def _add(x, out, n, factor, TILE: tl.constexpr, DOUBLE: tl.constexpr):
    offsets = tl.program_id(0) * TILE + tl.arange(0, TILE)
    value = tl.load(x + offsets, mask=offsets < n, other=0.0).to(tl.float32) + factor
    if DOUBLE:
        value *= 2
    tl.store(out + offsets, value, mask=offsets < n)


def main() -> None:
    """A prepared launch passes what Triton's own passes, and asks Triton only where it must."""
    layer_overhead._NoLauncher = {"Recorder": Recorder, "CudaLauncher": CudaLauncher}[sys.argv[1]]  # type: ignore[assignment,misc]
    layer_overhead.leave_launches_out()
    launcher = Launcher(_add)
    asked = 0
    run = launcher.kernel.run

    def counted(*arguments, **options):
        nonlocal asked
        asked += 1
        return run(*arguments, **options)

    launcher.kernel.run = counted
    prepared = launcher.prepared((8, 2), 1000, 3.0, 128, True, num_warps=4)

    def check(x: Tensor, *, asks: int) -> None:
        out = torch.empty(1000)
        before = asked
        launches.clear()
        prepared(x, out)
        assert asked - before == asks, (asked - before, asks)
        _add[(8, 2)](x, out, 1000, 3.0, 128, True, num_warps=4)  # asks once more
        own, tritons = launches
        assert own == tritons, (own, tritons)

    x = torch.randn(1001)
    check(x[:1000], asks=1)
    check(x[:1000], asks=0)
    check(torch.randn(1000), asks=0)
    check(x[1:], asks=1)  # 4 bytes behind a multiple of 16
    check(x[:1000], asks=0)
    check(torch.randn(1000).bfloat16(), asks=1)
    check(torch.randn(1000).bfloat16(), asks=0)
    seen: list[Any] = []
    knobs.runtime.launch_enter_hook.add(seen.append)
    check(x[:1000], asks=1)
    assert len(seen) in (0, 2), seen  # by Triton's launcher, which is replaced here


if __name__ == "__main__":
    main()
