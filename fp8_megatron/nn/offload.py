"""What layers keep for backward, moved to the host between their forward and their backward.

A layer's tensors leave while the next layer runs, and come back while the layer behind it runs its backward. Storages
are copied whole and once, although several functions save views of one. Small storages, parameters, and what the caller
names stay on the device.

One side stream copies, and the host never waits. The order of events, which makes reuse of memory safe without
``record_stream``:

- A layer's forward ends: the side stream waits for the compute stream, then copies the layer to the host.
- The next layer's forward ends: the compute stream waits for those copies. Only then is the device memory given back,
  so what reuses it runs after them. A rank holds two layers, whatever the host's lead over the device.
- A layer's backward begins: memory for the layer in front is taken from the compute stream, the side stream waits for
  that stream, which has used the memory before, and copies the layer back. The compute stream waits for those copies
  when the backward of the layer in front begins. Until then the memory is held.
- Host memory is given back when a layer has no reader. The next copy into it follows the last copy from it
  on the same side stream.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

#: Storages of fewer bytes stay: norm statistics and scales.
MIN_BYTES = 2**16
#: Host memory is allocated and reused in pages of this size. torch rounds pinned memory up to a power of two.
PAGE_BYTES = 2**24


class HostPages:
    """Pages of host memory, pinned for a GPU. Each is allocated once and reused.

    A page may be given back while the side stream still reads it: the next copy into it follows on the same stream.

    Attributes:
        nbytes: bytes of all pages, free or not.
    """

    def __init__(self, device: torch.device) -> None:
        self._pins = device.type == "cuda"
        # The meta device stands for a GPU whose memory is counted. Nothing is copied from it.
        self._is_counted = device.type == "meta"
        self._free: list[Tensor] = []
        self.nbytes = 0

    def take(self, num_bytes: int) -> list[Tensor]:
        """Pages, uint8 [PAGE_BYTES] each, for so many bytes."""
        count = -(-num_bytes // PAGE_BYTES)
        missing = max(0, count - len(self._free))
        self.nbytes += missing * PAGE_BYTES
        if self._is_counted:
            return []
        self._free += [torch.empty(PAGE_BYTES, dtype=torch.uint8, pin_memory=self._pins) for _ in range(missing)]
        return [self._free.pop() for _ in range(count)]

    def give(self, pages: list[Tensor]) -> None:
        """Take pages back."""
        self._free += pages


class CopyStream(Protocol):
    """Where copies run, one after another."""

    def launch(self, copies: Callable[[], None]) -> Any:
        """Run `copies` after all work so far; returns their end."""

    def wait(self, end: Any) -> None:
        """Let later work follow the copies that end there."""


class _SideStream:
    """A CUDA stream beside the compute stream, for which the host never waits."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def launch(self, copies: Callable[[], None]) -> torch.cuda.Event:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copies()
        return self._stream.record_event()

    def wait(self, end: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(end)


class _AtOnce:
    """A device without streams."""

    def launch(self, copies: Callable[[], None]) -> None:
        copies()

    def wait(self, end: None) -> None:
        pass


class _Layer:
    """What one layer keeps of one micro-batch.

    Attributes:
        before: the layer in front of it; None for the first.
        leaves: its storages go to the host.
        stored: its storages, while somebody may still read them.
        departure: the end of the copies to the host.
        has_begun: its backward has begun.
    """

    __slots__ = ("__weakref__", "_host", "_pages", "before", "departure", "has_begun", "leaves", "stored")

    def __init__(self, host: HostPages, before: _Layer | None, *, leaves: bool) -> None:
        self._host, self._pages = host, list[Tensor]()
        self.before, self.leaves, self.has_begun = before, leaves, False
        self.stored: list[weakref.ref[_Stored]] = []
        self.departure: Any = None

    def __del__(self) -> None:
        self._host.give(self._pages)

    def alive(self) -> Iterator[_Stored]:
        """The storages that a function still keeps."""
        return (stored for ref in self.stored if (stored := ref()) is not None)

    def copies_to_host(self) -> Callable[[], None]:
        """Copy every storage to the host, when called."""
        first, stored = 0, list(self.alive())
        parts: list[tuple[Tensor, Tensor]] = []
        for one in stored:
            one.first_byte = first
            first += one.num_bytes
        self._pages = self._host.take(first)
        for one in stored:
            assert one.on_device is not None
            parts += self._parts(one, one.on_device)
        return partial(_copy, parts)

    def copies_from_host(self, stored: Iterable[_Stored]) -> Callable[[], None]:
        """Copy storages back to their new memory, when called."""
        parts: list[tuple[Tensor, Tensor]] = []
        for one in stored:
            assert one.on_device is not None
            parts += self._parts(one, one.on_device)
        return partial(_copy, [(values, page) for page, values in parts])

    def _parts(self, stored: _Stored, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Runs of bytes within one page, and the part of `values` that belongs there."""
        done = 0
        while self._pages and done < stored.num_bytes:
            page, place = divmod(stored.first_byte + done, PAGE_BYTES)
            count = min(PAGE_BYTES - place, stored.num_bytes - done)
            yield self._pages[page][place : place + count], values[done : done + count]
            done += count


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy the second of each pair into the first."""
    for target, values in pairs:
        target.copy_(values, non_blocking=True)


class _Stored:
    """The bytes of one storage: uint8 on the device, or None while the host alone has them."""

    __slots__ = ("__weakref__", "first_byte", "layer", "num_bytes", "on_device")

    def __init__(self, layer: _Layer, storage: torch.UntypedStorage) -> None:
        self.layer, self.num_bytes, self.first_byte = layer, storage.nbytes(), 0
        values = torch.empty(0, dtype=torch.uint8, device=storage.device)
        self.on_device: Tensor | None = values.set_(storage, 0, (self.num_bytes,), (1,))


class _Saved(NamedTuple):
    """A tensor of a layer that leaves: its place in its storage."""

    stored: _Stored
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class _OnDevice(NamedTuple):
    """A tensor that stays on the device."""

    value: Tensor
    layer: _Layer


class ActivationOffload:
    """Moves what layers keep for backward to the host. Model chunks of a rank share one.

    Its order of calls in a forward: `running` around all layers, and inside `enter_layer` before each of them. Backward
    follows by itself, layer by layer, last first.

    Args:
        device: of the activations.
        stream: where copies run; None: a stream of a CUDA device, else at once.

    Attributes:
        host: the host's memory.
    """

    def __init__(self, device: torch.device, stream: CopyStream | None = None) -> None:
        self._device, self.host = device, HostPages(device)
        self._stream = stream or (_SideStream(device) if device.type == "cuda" else _AtOnce())
        self._layer: _Layer | None = None
        #: On its way to the host; its device memory is still held.
        self._leaving: _Layer | None = None
        #: On its way back, and its memory, which must not be reused before the copies end.
        self._arriving: tuple[Any, list[Tensor]] | None = None
        self._known: dict[int, _Stored] = {}
        self._resident: set[int] = set()

    @contextmanager
    def running(self, resident: Iterable[Tensor]) -> Iterator[None]:
        """A forward over layers.

        Args:
            resident: tensors whose storages stay on the device, as somebody else keeps them.
        """
        self._resident = {_storage_key(tensor) for tensor in resident if type(tensor) is Tensor or _is_plain(tensor)}
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._close()
            self._layer = None

    def enter_layer(self, *, leaves: bool) -> None:
        """What is saved from here on belongs to the next layer.

        Args:
            leaves: it goes to the host.
        """
        before = self._layer
        self._close()
        self._layer = _Layer(self.host, before, leaves=leaves)

    def _close(self) -> None:
        """End the open layer's forward: send what it keeps, and free what the layer before has sent."""
        if self._layer is None:
            return
        if self._leaving is not None:
            self._free(self._leaving)
            self._leaving = None
        self._known.clear()
        if self._layer.leaves:
            self._layer.departure = self._stream.launch(self._layer.copies_to_host())
            self._leaving = self._layer

    def _free(self, layer: _Layer) -> None:
        """Give up the device memory of a layer that has left."""
        self._stream.wait(layer.departure)
        for stored in layer.alive():
            stored.on_device = None

    def _pack(self, tensor: Tensor) -> Any:
        layer = self._layer
        # A detached tensor: a function that holds its own output forms a cycle, which nobody frees.
        if layer is None or type(tensor) is not Tensor:
            return tensor.detach() if type(tensor) is Tensor else tensor
        storage = tensor.untyped_storage()
        key = storage._cdata
        if not layer.leaves or storage.nbytes() < MIN_BYTES or key in self._resident:
            return _OnDevice(tensor.detach(), layer)
        stored = self._known.get(key)
        if stored is None:
            stored = self._known[key] = _Stored(layer, storage)
            layer.stored.append(weakref.ref(stored))
        return _Saved(stored, tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    def _unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        layer = saved.layer if isinstance(saved, _OnDevice) else saved.stored.layer
        if not layer.has_begun:
            layer.has_begun = True
            self._await()
            if layer.before is not None and layer.before.leaves:
                self._fetch(layer.before)
        if isinstance(saved, _OnDevice):
            return saved.value
        stored = saved.stored
        if stored.on_device is None:  # of a layer whose successor has no backward, or none yet
            self._fetch(layer)
            self._await()
        assert stored.on_device is not None
        values = torch.empty(0, dtype=saved.dtype, device=stored.on_device.device)
        return values.set_(stored.on_device.untyped_storage(), saved.offset, saved.size, saved.stride)

    def _fetch(self, layer: _Layer) -> None:
        """Start to copy a layer back."""
        self._await()
        missing = [stored for stored in layer.alive() if stored.on_device is None]
        memory = [torch.empty(stored.num_bytes, dtype=torch.uint8, device=self._device) for stored in missing]
        for stored, values in zip(missing, memory, strict=True):
            stored.on_device = values
        self._arriving = self._stream.launch(layer.copies_from_host(missing)), memory

    def _await(self) -> None:
        """Let the compute stream wait until what is on its way back has arrived."""
        if self._arriving is not None:
            self._stream.wait(self._arriving[0])
            self._arriving = None


def _is_plain(tensor: Tensor) -> bool:
    """Whether a parameter has a storage of its own, not those of tensors that it wraps."""
    return isinstance(tensor, torch.nn.Parameter) and type(tensor.data) is Tensor


def _storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
