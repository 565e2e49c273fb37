"""Runs code that names CUDA and NCCL on a CPU and gloo, unchanged: a pytest plugin and a runner of scripts.

    python -m cuda_on_cpu script.py arguments…

It stands apart from `tests.harness`, because the code that it runs has a package `tests` of its own.
"""

from __future__ import annotations

import functools
import runpy
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.overrides import TorchFunctionMode

#: How many GPUs a script sees; as many processes as it starts for them.
NUM_DEVICES = 2


def _elsewhere(device: Any) -> Any:
    """The CPU in place of a GPU, given by name, number or object."""
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    if isinstance(device, bool):
        return device
    return "cpu" if isinstance(device, int) or str(device).startswith("cuda") else device


class _CudaIsTheCpu(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.to:
            args = (args[0], *(_elsewhere(a) if isinstance(a, (str, int, torch.device)) else a for a in args[1:]))
        if kwargs.get("device") is not None:
            kwargs["device"] = _elsewhere(kwargs["device"])
        return func(*args, **kwargs)


class _Autocast(torch.autocast):
    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(_elsewhere(device_type), *args, **kwargs)


class _Event:
    """A CUDA event on a CPU: nothing to wait for."""

    def __init__(self, **_: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        """Nothing."""

    def elapsed_time(self, _: Any) -> float:
        """No time."""
        return 0.0


def install() -> None:
    """Map CUDA to the CPU and NCCL to gloo for the rest of the process."""
    init_process_group = dist.init_process_group
    module_to = torch.nn.Module.to
    data_parallel_init = torch.nn.parallel.DistributedDataParallel.__init__

    def init_on_gloo(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        init_process_group("gloo", *args, **kwargs)

    def to_cpu(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        return module_to(
            self, *(_elsewhere(a) if isinstance(a, (str, int, torch.device)) else a for a in args), **kwargs
        )

    def without_devices(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **kwargs: Any
    ) -> None:
        data_parallel_init(self, module, **kwargs)

    dist.init_process_group = init_on_gloo
    torch.nn.Module.to = to_cpu  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *_: self  # type: ignore[method-assign]
    torch.nn.parallel.DistributedDataParallel.__init__ = without_devices  # type: ignore[method-assign]
    torch.autocast = _Autocast  # type: ignore[misc]
    torch.cuda.set_device = lambda *_: None
    # Forked processes know what is mapped here.
    torch.multiprocessing.spawn = functools.partial(torch.multiprocessing.start_processes, start_method="fork")
    torch.cuda.device_count = lambda: NUM_DEVICES
    torch.cuda.Event = _Event  # type: ignore[misc,assignment]
    _CudaIsTheCpu().__enter__()


def pytest_configure() -> None:
    """As a plugin: install it before tests are collected, with MS-AMP's methods of tensors."""
    install()
    from msamp import tensor_methods

    tensor_methods.install()


if __name__ == "__main__":
    install()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
