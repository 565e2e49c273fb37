"""Launches of Triton kernels without Triton's argument binder, which takes the host several times as long as a launch.

The binder finds out, at every launch, which compiled kernel the arguments take: it looks at dtypes, at the alignment of
addresses, and at numbers that are 1 or multiples of 16. `Launcher` asks it once for each list of arguments that differ
in more than addresses. Later launches call the compiled kernel with the same conventions as `JITFunction.run`. These
are internals of Triton, so they are used in versions whose source has been read (`_VERSIONS`), and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction

#: Versions in which `JITFunction.run` ends with the call that `Launcher` makes.
_VERSIONS = ((3, 5), (3, 6), (3, 7), (3, 8), (3, 9))
#: Those in which the compiled function behind `CudaLauncher` takes what `_compiled` gives it.
_VERSIONS_OF_FUNCTION = ((3, 5), (3, 6))
#: Addresses are multiples of this, as the compiled kernel takes them to be.
_ALIGNMENT = 16
#: Lists of arguments that a launcher knows. A run with more of them starts anew, so memory does not grow.
_MOST_KNOWN = 4096
#: Prepared launches that a kernel's callers keep, one for each shape.
MOST_SHAPES = 4096


class _Compiled(NamedTuple):
    """A compiled kernel: ``run(width, height, 1, stream, *fixed, *arguments)`` launches it."""

    run: Callable[..., None]
    fixed: tuple[Any, ...]


class _Layout(NamedTuple):
    """Which of a kernel's parameters are tensors; of the others, the function that takes them from the arguments."""

    places: tuple[int, ...]
    tensors: Callable[[tuple[Any, ...]], tuple[Tensor, ...]]
    numbers: Callable[[tuple[Any, ...]], Any]


class Launcher:
    """A Triton kernel with the launch syntax of `triton.jit`: ``kernel[grid](*args, num_warps=…)``.

    The first launch of each list of arguments is Triton's own. So is every launch

    - with an address that is not a multiple of 16 bytes, or a tensor that is not on the current GPU;
    - that does not give all parameters by position, or has a grid of three dimensions;
    - while a profiler has hooks on launches;
    - in a version of Triton that is not listed in `_VERSIONS`, or under its interpreter.

    Tensors and numbers come in any order. One parameter takes arguments of one type in all launches: to Python 1, 1.0
    and True are equal. Each number is part of the list, so a kernel with a number that changes from launch to launch
    gains nothing.

    Args:
        kernel: the result of `triton.jit`.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._knows_triton = _version() in _VERSIONS and isinstance(kernel, JITFunction)
        self._hooks: list[Any] = getattr(kernel, "pre_run_hooks", [])
        self._layout: _Layout | None = None
        self._known: dict[tuple[object, ...], _Compiled] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return partial(self._launch, grid)

    def prepared(self, grid: tuple[int, ...], *numbers: Any, **options: Any) -> PreparedLaunch:
        """A launch that lacks only its tensors. The kernel's first parameters are tensors, and `numbers` are the rest.

        To keep it for the next launch with these numbers saves the host a third of a launch.
        """
        return PreparedLaunch(self, grid, numbers, options)

    def known(self, *args: Any, **options: Any) -> _Compiled | None:
        """The compiled kernel of these arguments, if a launch may take it without asking Triton."""
        return None if self._layout is None else self._known.get(_key(self._layout, args, options))

    @property
    def is_watched(self) -> bool:
        """Whether somebody's hooks see each launch."""
        return bool(self._hooks) or _has_hooks()

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
        layout = self._layout
        if layout is None:
            return self._launch_first(grid, args, options)
        tensors, device = layout.tensors(args), torch._C._cuda_getDevice()
        key = (device, layout.numbers(args), *[tensor.dtype for tensor in tensors], *options.items())
        compiled = self._known.get(key)
        if compiled is None or self.is_watched:
            return self._launch_first(grid, args, options)
        values, addresses = list(args), 0
        for place, tensor in zip(layout.places, tensors):  # noqa: B905 (strict costs as much as the address)
            values[place] = address = tensor.data_ptr()
            addresses |= address
            if tensor.get_device() != device:
                return self.kernel[grid](*args, **options)
        if addresses % _ALIGNMENT:
            return self.kernel[grid](*args, **options)
        run, fixed = compiled
        height = grid[1] if len(grid) > 1 else 1
        run(grid[0], height, 1, torch._C._cuda_getCurrentRawStream(device), *fixed, *values)
        return None

    def _launch_first(self, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Triton's launch. What it compiled is kept if all later launches of these arguments may take it."""
        kernel = self.kernel[grid](*args, **options)
        places = tuple(place for place, arg in enumerate(args) if isinstance(arg, Tensor))
        is_usual = (
            self._knows_triton
            and kernel is not None
            and len(args) == len(self.kernel.params)
            and len(grid) <= 2
            and 2 <= len(places) < len(args)  # `itemgetter` of one place gives no tuple
            and all(isinstance(arg, (Tensor, int, float, str, triton.language.dtype, type(None))) for arg in args)
            and not any(args[place].data_ptr() % _ALIGNMENT for place in places)
        )
        if not is_usual:
            return kernel
        if self._layout is None:
            others = [place for place in range(len(args)) if place not in places]
            self._layout = _Layout(places, itemgetter(*places), itemgetter(*others))
        if self._layout.places != places:
            name = self.kernel.__name__
            raise TypeError(f"{name} was launched with tensors at {self._layout.places} and now at {places}")
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[_key(self._layout, args, options)] = _compiled(kernel)
        return kernel


class PreparedLaunch:
    """A launch of a `Launcher` with a given grid and given numbers; it is called with the tensors.

    Whatever is unusual is the launcher's: the first launch, misaligned addresses, another GPU's tensors, hooks.
    """

    __slots__ = ("_grid", "_known", "_launcher", "_numbers", "_options", "_size")

    def __init__(
        self, launcher: Launcher, grid: tuple[int, ...], numbers: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        self._launcher, self._grid, self._numbers, self._options = launcher, grid, numbers, options
        self._size = (grid[0], grid[1] if len(grid) > 1 else 1, 1)
        self._known: dict[tuple[object, ...], _Compiled | None] = {}

    def __call__(self, *tensors: Tensor) -> None:
        device = torch._C._cuda_getDevice()
        key = (device, *[tensor.dtype for tensor in tensors])
        compiled = self._known.get(key)
        if compiled is None or self._launcher.is_watched:
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
        """The launcher's launch. What it compiled is kept."""
        args = (*tensors, *self._numbers)
        self._launcher[self._grid](*args, **self._options)
        self._known[key] = self._launcher.known(*args, **self._options)


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


def _key(layout: _Layout, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[object, ...]:
    """What a list of arguments is known by; `Launcher._launch` writes it out."""
    dtypes = [tensor.dtype for tensor in layout.tensors(args)]
    return (torch._C._cuda_getDevice(), layout.numbers(args), *dtypes, *options.items())


def _version() -> tuple[int, ...]:
    """Triton's, without its patch level."""
    return tuple(int(number) for number in triton.__version__.split(".")[:2])
