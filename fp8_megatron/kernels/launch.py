"""Launches of Triton kernels without Triton's argument binder, which takes the host several times as long as a launch.

The binder finds out, at every launch, which compiled kernel the arguments take: it looks at dtypes, at the alignment of
addresses, and at numbers that are 1 or multiples of 16. `PreparedLaunch` holds the numbers, and asks the binder once
for each list of its tensors' dtypes. Later launches call the compiled kernel with the same conventions as
`JITFunction.run`. These are internals of Triton, so they are used in versions whose source has been read
(`_VERSIONS`), and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction

#: Versions in which `JITFunction.run` ends with the call that `PreparedLaunch` makes.
_VERSIONS = ((3, 5), (3, 6), (3, 7), (3, 8), (3, 9))
#: Those in which the compiled function behind `CudaLauncher` takes what `_compiled` gives it.
_VERSIONS_OF_FUNCTION = ((3, 5), (3, 6))
#: Addresses are multiples of this, as the compiled kernel takes them to be.
_ALIGNMENT = 16
#: Prepared launches that a kernel's callers keep, one for each shape.
MOST_SHAPES = 4096


class _Compiled(NamedTuple):
    """A compiled kernel: ``run(width, height, 1, stream, *fixed, *arguments)`` launches it."""

    run: Callable[..., None]
    fixed: tuple[Any, ...]


class PreparedLaunch:
    """A launch of a Triton kernel that lacks only its tensors, the kernel's first parameters. It is called with them.

    The first launch of each list of dtypes is Triton's own. So is every launch

    - with an address that is not a multiple of 16 bytes, or a tensor that is not on the current GPU;
    - while a profiler has hooks on launches;
    - in a version of Triton that is not listed in `_VERSIONS`, or under its interpreter.

    Args:
        kernel: the result of `triton.jit`.
        grid: of one or two dimensions.
        numbers: all other parameters, by position.
        options: as Triton takes them, ``num_warps`` and others.
    """

    __slots__ = ("_grid", "_hooks", "_kernel", "_known", "_numbers", "_options", "_size")

    def __init__(self, kernel: Any, grid: tuple[int, ...], *numbers: Any, **options: Any) -> None:
        self._kernel, self._grid, self._numbers, self._options = kernel, grid, numbers, options
        self._size = (grid[0], grid[1] if len(grid) > 1 else 1, 1)
        self._hooks: list[Any] = getattr(kernel, "pre_run_hooks", [])
        self._known: dict[tuple[object, ...], _Compiled] = {}

    def __call__(self, *tensors: Tensor) -> None:
        device = torch._C._cuda_getDevice()
        key = (device, *[tensor.dtype for tensor in tensors])
        compiled = self._known.get(key)
        if compiled is None or self._hooks or _has_hooks():
            self._launch_first(key, tensors)
            return
        values, addresses, is_here = [], 0, True
        for tensor in tensors:
            address = tensor.data_ptr()
            values.append(address)
            addresses |= address
            is_here &= tensor.get_device() == device
        if addresses % _ALIGNMENT or not is_here:
            self._launch_first(key, tensors)
            return
        run, fixed = compiled
        run(*self._size, torch._C._cuda_getCurrentRawStream(device), *fixed, *values, *self._numbers)

    def _launch_first(self, key: tuple[object, ...], tensors: tuple[Tensor, ...]) -> None:
        """Triton's launch. What it compiled is kept if all later launches of these dtypes may take it."""
        kernel = self._kernel[self._grid](*tensors, *self._numbers, **self._options)
        is_known = _version() in _VERSIONS and isinstance(self._kernel, JITFunction) and kernel is not None
        if is_known and not any(tensor.data_ptr() % _ALIGNMENT for tensor in tensors):
            self._known[key] = _compiled(kernel)


def _compiled(kernel: Any) -> _Compiled:
    """A compiled kernel, without the Python that Triton has in front of its launch where that does nothing: without
    scratch memory.
    """
    run = kernel.run
    rest = (kernel.packed_metadata, None, None, None)  # no metadata for hooks, and no hooks
    has_function = _version() in _VERSIONS_OF_FUNCTION and type(run).__name__ == "CudaLauncher"
    if has_function and run.global_scratch_size == run.profile_scratch_size == 0:
        options = (run.launch_cooperative_grid, run.launch_pdl, None, None)
        return _Compiled(run.launch, (kernel.function, *options, *rest))
    return _Compiled(run, (kernel.function, *rest))


def _has_hooks() -> bool:
    """Whether somebody's hooks see each launch of Triton."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    try:
        return bool(enter.calls or leave.calls)
    except AttributeError:  # somebody has put a function in the place of Triton's chains
        return True


def _version() -> tuple[int, ...]:
    """Triton's, without its patch level."""
    return tuple(int(number) for number in triton.__version__.split(".")[:2])
