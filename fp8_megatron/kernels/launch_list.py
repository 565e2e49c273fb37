"""A function's launches, kernels and GEMMs, queued by one call (`csrc/launch_list.c`).

Python takes the host longer than the launches themselves: the names, shapes and settings of a linear layer are looked
up anew in each call, and come out the same. `LaunchLists.run` looks on while a function runs: which memory it
allocates, what it launches, and which of its inputs and of that memory each launch reads and writes. Later calls with
the same key allocate alike, and queue alike. The results are the same, bit for bit, because the launches are.

A function becomes a list only if all that it does is seen here. It allocates with `memory.empty`, launches with
`PreparedLaunch` and `cublaslt.matmul`, and reads and writes its inputs and that memory. Anything else leaves it to
Python: an operation of torch above all, and the first call of a kernel, while Triton compiles it.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

logger = logging.getLogger(__name__)

#: Tensors, or None where there is none.
Tensors = tuple[Tensor | None, ...]
#: A list: ``replay(inputs)`` gives the outputs, or None if Python must do it.
Replay = Callable[[Tensors], Tensors | None]
#: Given a dtype and a shape, what makes a new contiguous tensor of them.
Allocator = Callable[[torch.dtype, tuple[int, ...]], Callable[[], Tensor]]

#: A symbolic link in a checkout.
_SOURCE = Path(__file__).parents[1] / "csrc" / "launch_list.c"
#: Calls of a key that are looked at. The first one compiles kernels, and memory may once lie badly.
_MOST_TRIES = 3
#: Keys that are known. A run with more of them starts anew, so memory does not grow.
_MOST_KNOWN = 4096
#: The list's own limit.
_MOST_SLOTS = 64
#: Memory for less than this may stay until the end of a list, although Python would give it back before.
_SMALL_BYTES = 1 << 20
#: What is allocated together starts at multiples of this, as what torch allocates.
_PART_ALIGNMENT = 512
#: Addresses of a kernel's operands are multiples of this, and those of a GEMM of `MATMUL_ALIGNMENT`: so it chose its
#: algorithm.
KERNEL_ALIGNMENT, MATMUL_ALIGNMENT = 16, 256
#: What changes no memory.
_VIEWS = frozenset(
    {
        torch.ops.aten.view.default,
        torch.ops.aten.detach.default,
        torch.ops.aten.alias.default,
        torch.ops.aten.t.default,
        torch.ops.aten.view.dtype,
    }
)


class _Symbols(NamedTuple):
    """Addresses of the functions that queue; where a stream's workspace is; whether hooks see each launch."""

    launch_kernel: int
    matmul: int
    set_attribute: int
    workspace: Callable[[int, int], Tensor]
    is_watched: Callable[[], bool]


class Recording:
    """What a function does, seen from the kernels.

    Attributes:
        fault: why no list can be made of it; None so far.
    """

    def __init__(self, inputs: Tensors, device: int) -> None:
        self.fault: str | None = None
        self.device = device
        self._thread = threading.get_ident()
        self._slots: dict[int, int] = {}
        self._alignments: list[int] = []
        self._steps: list[Callable[[Any], None]] = []
        self._kept: list[object] = []
        self._made: list[weakref.ref[Tensor]] = []
        self._allocations: list[_Allocation] = []
        self._released: set[int] = set()
        for tensor in inputs:
            address = 0 if tensor is None else tensor.data_ptr()
            if address in self._slots:
                self.fail("two inputs are one")
            self._new_slot(address)

    @property
    def is_of_this_thread(self) -> bool:
        """Whether the caller is the function that is recorded."""
        return threading.get_ident() == self._thread

    def fail(self, fault: str) -> None:
        """Something happened that a list does not hold."""
        self.fault = self.fault or fault

    def slot(self, address: int, alignment: int) -> int:
        """The slot of a launch's operand; −1 for no memory."""
        if not address:
            return -1
        slot = self._slots.get(address, -1)
        if slot < 0:
            self.fail("an operand is neither an input nor allocated here")
        elif address % alignment:
            self.fail(f"an operand is not aligned to {alignment} bytes")
        else:
            self._alignments[slot] = max(self._alignments[slot], alignment)
        return slot

    def allocated(self, tensor: Tensor, allocator: Allocator) -> None:
        """`tensor` was allocated; `allocator` does it again."""
        gone = {place for place, made in enumerate(self._made) if made() is None} - self._released
        self._released |= gone
        self._made.append(weakref.ref(tensor))
        self._allocations.append(_Allocation(allocator, tensor.dtype, tuple(tensor.shape), tensor.nbytes, gone))
        self._new_slot(tensor.data_ptr())

    def add(self, step: Callable[[Any], None], kept: object) -> None:
        """A launch, which `step` adds to a list; `kept` is what it needs to stay."""
        self._steps.append(step)
        self._kept.append(kept)

    def finish(
        self, inputs: Tensors, outputs: Tensors, shape: tuple[int, ...] | None, symbols: _Symbols
    ) -> Replay | None:
        """The list, if the function was seen whole and gives back inputs and what it allocated.

        Args:
            shape: of the first output, instead of its own.
        """
        made: list[Tensor | None] = [tensor() for tensor in self._made]
        places = [_place(output, [*inputs, *made]) for output in outputs]
        if None in places:
            self.fail("an output is neither an input nor allocated here")
        shapes = [allocation.shape for allocation in self._allocations]
        if shape is not None and outputs[0] is not None and places[0] is not None:
            if places[0] < len(inputs):
                self.fail("the first output is to have another shape, and is an input")
            else:
                shapes[places[0] - len(inputs)] = shape
        if len(self._alignments) >= _MOST_SLOTS or not self._steps:
            self.fail(f"{len(self._steps)} launches with {len(self._alignments)} operands")
        if self.fault is not None:
            logger.debug("no launch list: %s", self.fault)
            return None
        module = _module()
        assert module is not None
        returned = {place - len(inputs) for place in places if place is not None and place >= len(inputs)}
        allocations = _placed(self._allocations, shapes, returned)
        alignments = (*self._alignments, *(1 for _ in allocations[len(shapes) :]))
        launches = module.LaunchList(symbols.launch_kernel, symbols.matmul, symbols.set_attribute, alignments)
        for step in self._steps:
            step(launches)
        questions = (
            torch._C._cuda_getDevice,
            torch._C._cuda_getCurrentRawStream,
            symbols.is_watched,
            symbols.workspace,
        )
        launches.surround(self.device, questions, len(inputs), allocations, tuple(places), self._kept)
        replay: Replay = launches.replay
        return replay

    def _new_slot(self, address: int) -> None:
        # Memory that was released may be allocated again: the newest slot is meant.
        if address:
            self._slots[address] = len(self._alignments)
        self._alignments.append(1)


class _Allocation(NamedTuple):
    """A tensor that a function allocates, and the places of those that it has given back since the one before."""

    allocator: Allocator
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    gone: set[int]


def _placed(
    allocations: Sequence[_Allocation], shapes: Sequence[tuple[int, ...]], returned: set[int]
) -> tuple[tuple[Any, Any], ...]:
    """What a list allocates (`surround` in the C file). Memory that is not returned is allocated together, at the end:
    an allocation takes the host as long as a launch.

    The peak stays. So what Python gives back before it allocates much that is returned stays alone, and later memory
    lies where earlier was given back.

    Args:
        returned: places of tensors that the function returns.
    """
    end = len(allocations)
    gone_at = {place: at for at, allocation in enumerate(allocations) for place in allocation.gone}
    alone = set(returned)
    for place, allocation in enumerate(allocations):
        given_back = gone_at.get(place, end)
        returned_later = sum(allocations[other].nbytes for other in returned if other >= given_back)
        if given_back < end and min(allocation.nbytes, returned_later) >= _SMALL_BYTES:
            alone.add(place)
    together = [place for place in range(end) if place not in alone]
    if len(together) < 2:
        alone, together = set(range(end)), []
    offsets: dict[int, int] = {}
    size = 0
    for place in sorted(together, key=lambda one: -allocations[one].nbytes):  # large ones first: few gaps
        until, nbytes, start = gone_at.get(place, end), _rounded(allocations[place].nbytes), 0
        beside = [one for one in offsets if one < until and place < gone_at.get(one, end)]
        for offset, taken in sorted((offsets[one], _rounded(allocations[one].nbytes)) for one in beside):
            if offset - start >= nbytes:
                break
            start = max(start, offset + taken)
        offsets[place] = start
        size = max(size, start + nbytes)
    made: list[tuple[Any, Any]] = []
    given_back_now: set[int] = set()
    for place, allocation in enumerate(allocations):
        given_back_now |= allocation.gone & alone
        if place in offsets:
            made.append((offsets[place], end))
        else:
            made.append((allocation.allocator(allocation.dtype, shapes[place]), tuple(sorted(given_back_now))))
            given_back_now = set()
    if together:
        made.append((allocations[together[0]].allocator(torch.uint8, (size,)), tuple(sorted(given_back_now))))
    return tuple(made)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _PART_ALIGNMENT) * _PART_ALIGNMENT


def _place(output: Tensor | None, tensors: Sequence[Tensor | None]) -> int | None:
    """The place of this very tensor in `tensors`; −1 for no tensor; None if it is not there."""
    if output is None:
        return -1
    return next((place for place, tensor in enumerate(tensors) if tensor is output), None)


class LaunchLists:
    """The lists of a module's functions, by key.

    Attributes:
        num_refused: calls that their list left to Python: an operand lies badly, another GPU is current, or hooks look
            on.
    """

    def __init__(self) -> None:
        self.num_refused = 0
        #: The lists; a number counts the calls that were looked at without one.
        self._known: dict[Hashable, Replay | int] = {}

    @staticmethod
    def take(x: Tensor) -> bool:
        """Whether lists can be made where `x` is: on GPUs."""
        return x.get_device() >= first_device

    def run(
        self,
        key: Hashable,
        inputs: Tensors,
        function: Callable[[], Tensors],
        shape: tuple[int, ...] | None = None,
    ) -> Tensors:
        """What `function` returns, computed by its list from the second or third call of `key` on.

        Args:
            key: everything that decides what the function does, but the addresses of its inputs; their shapes, dtypes
                and settings. Inputs are contiguous.
            inputs: all tensors that the function reads and writes, but those that it allocates itself.
            function: takes nothing and returns inputs and new tensors. It has no effect beside its launches.
            shape: what the first output, a new contiguous tensor of as many elements, is to have instead of its own.
                A view would cost the host more.
        """
        key = (key, shape)
        known = self._known.get(key, 0)
        if not isinstance(known, int):
            outputs = known(inputs)
            if outputs is not None:
                return outputs
            self.num_refused += 1
            return _with_shape(function(), shape)
        if known < _MOST_TRIES:
            return self._record(key, inputs, function, shape, known)
        return _with_shape(function(), shape)

    @property
    def num_lists(self) -> int:
        """How many keys have a list."""
        return sum(not isinstance(known, int) for known in self._known.values())

    def _record(
        self,
        key: Hashable,
        inputs: Tensors,
        function: Callable[[], Tensors],
        shape: tuple[int, ...] | None,
        tries: int,
    ) -> Tensors:
        global running
        symbols = _symbols()
        if symbols is None or running is not None:
            return _with_shape(function(), shape)
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[key] = tries + 1
        running = recording = Recording(inputs, torch._C._cuda_getDevice())
        try:
            with _Operations(recording):
                outputs = function()
        finally:
            running = None
        replay = recording.finish(inputs, outputs, shape, symbols)
        if replay is not None:
            self._known[key] = replay
        return _with_shape(outputs, shape)


def _with_shape(outputs: Tensors, shape: tuple[int, ...] | None) -> Tensors:
    """The first output gets `shape`. It is no view: autograd forbids to write to one that a function returns."""
    if shape is not None and outputs[0] is not None and outputs[0].shape != shape:
        outputs[0].resize_(shape)
    return outputs


class _Operations(TorchDispatchMode):
    """Sees operations of torch, which a list does not hold."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _VIEWS:
            self._recording.fail(f"{func} is an operation of torch")
        return func(*args, **(kwargs or {}))


#: The lowest number of a device with lists; below it are CPUs.
first_device = 0
#: The recording that runs, of any thread. Kernels look here first, because a call would cost the host more.
running: Recording | None = None


def recording() -> Recording | None:
    """What the caller does is recorded here, if it is recorded."""
    return running if running is not None and running.is_of_this_thread else None


@cache
def _module() -> Any:
    """The compiled csrc/launch_list.c; None if it cannot be compiled here."""
    from .launch import compiles_lists

    if not compiles_lists():
        return None
    from triton.runtime.build import compile_module_from_src

    try:
        return compile_module_from_src(_SOURCE.read_text(), "fp8_megatron_launch_list")
    except Exception as error:  # of a compiler, in many forms: everything works without
        logger.warning("layers of other models are launched one kernel at a time: %s: %s", _SOURCE.name, error)
        return None


@cache
def _symbols() -> _Symbols | None:
    """None if lists cannot be made here."""
    from . import extension, launch
    from .gemm import cublaslt

    if not cublaslt.is_available() or _module() is None:
        return None
    functions = (extension.launch_kernel_address(), *cublaslt.addresses())
    return _Symbols(*functions, cublaslt.workspace, launch.has_hooks)


def allocates(allocator: Allocator, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """New memory of `shape`, while something is recorded."""
    watching = recording()
    allocate = allocator(dtype, shape)
    if watching is None:
        return allocate()
    with no_dispatch():  # a torch operation on a CPU
        tensor = allocate()
    watching.allocated(tensor, allocator)
    return tensor
