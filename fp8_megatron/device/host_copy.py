"""Values of a device, read late: the host never waits for the work that it has just queued."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from .memory import cpu_copy


class Mark:
    """A point in a device's work: on a GPU, when the stream reaches it; on a CPU, the time of the call."""

    def __init__(self, device: torch.device) -> None:
        self._time = time.monotonic()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def wait(self) -> None:
        """Wait until the device has reached this point. Work that was queued later may still run."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        """Seconds of device time between two marks. Both must have been reached."""
        if self._event is not None and earlier._event is not None:
            return earlier._event.elapsed_time(self._event) / 1e3
        return self._time - earlier._time


class HostCopy:
    """Values that are being copied from a device to the host.

    Attributes:
        ended: the point in the device's work behind the copy.
    """

    def __init__(self, values: Tensor) -> None:
        self._host = cpu_copy(values)
        self.ended = Mark(values.device)

    def read(self) -> list[float]:
        """Wait for the copy, but not for work that was queued behind it."""
        self.ended.wait()
        values: list[float] = self._host.tolist()
        return values
