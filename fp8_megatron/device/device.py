"""The device a rank runs on: its selection, its capabilities, and the environment that CUDA reads at start."""

from __future__ import annotations

import os

import torch

from ..errors import UserError
from . import variables

#: Compute capability of the first GPUs with FP8 tensor cores (Ada); Hopper is (9, 0).
_FIRST_FP8_CAPABILITY = (8, 9)


class UnsupportedDeviceError(UserError):
    """This device cannot run the requested precision."""


def prepare_cuda_environment(*, needs_launch_order: bool, records_graphs: bool = False) -> str | None:
    """Set the variables that CUDA reads once, at start. Variables that the user has set are kept.

    - ``CUDA_DEVICE_MAX_CONNECTIONS``: with one queue (Megatron's advice), a collective that waits for another one
      delays every kernel launched after it: a fifth of a step of data-parallel training. Tensor parallelism over NCCL
      relies on that order to start its collectives before the GEMM that hides them, and gets 1; otherwise 32.
    - ``PYTORCH_CUDA_ALLOC_CONF``: expandable segments, so that blocks of different sizes do not fragment memory.
    - ``NCCL_GRAPH_REGISTER``: off where collectives are recorded into graphs. During recording NCCL registers their
      buffers, which hangs if they lie in expandable segments (pytorch/pytorch#158029; measured with NCCL 2.28.9).

    Args:
        needs_launch_order: see `transport.needs_launch_order`.
        records_graphs: whether steps become CUDA graphs.

    Returns:
        A warning for the user, or None.
    """
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    warnings = []
    if records_graphs and os.environ.setdefault("NCCL_GRAPH_REGISTER", "0") != "0":
        value = os.environ["NCCL_GRAPH_REGISTER"]
        warnings.append(f"NCCL_GRAPH_REGISTER is {value}: a recorded step may hang at its first launch; leave it unset")
    fitting = "1" if needs_launch_order else "32"
    chosen = os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", fitting)
    if chosen == "1" and fitting != "1":
        warnings.append(
            "CUDA_DEVICE_MAX_CONNECTIONS is 1: collectives will hold up kernels behind them; leave it unset, unless "
            "tensor parallelism goes through NCCL"
        )
    return "\n".join(warnings) or None


def local_rank() -> int:
    """This process's rank on its node, as torchrun sets it (0 outside torchrun)."""
    return variables.number("LOCAL_RANK", 0)


def node_size() -> int:
    """Ranks of this node, as torchrun sets them (1 outside torchrun)."""
    return variables.number("LOCAL_WORLD_SIZE", 1)


def world_size() -> int:
    """Ranks of the run, as torchrun sets them (1 outside torchrun)."""
    return variables.number("WORLD_SIZE", 1)


def select_device() -> torch.device:
    """The GPU of this local rank where CUDA is available, else the CPU.

    Raises:
        UnsupportedDeviceError: fewer GPUs than local ranks.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    rank, count = local_rank(), torch.cuda.device_count()
    if rank >= count:
        raise UnsupportedDeviceError(
            f"LOCAL_RANK({rank}) has no GPU: this node has {count}; start torchrun with --nproc-per-node {count}"
        )
    return torch.device("cuda", rank)


def check_fp8_support(device: torch.device, capability: tuple[int, int] | None = None) -> None:
    """Refuse FP8 on a GPU whose tensor cores lack it. A CPU runs the reference kernels.

    Args:
        capability: the GPU's compute capability; read from the device when None.

    Raises:
        UnsupportedDeviceError: the message names the precisions that do run.
    """
    if device.type != "cuda":
        return
    capability = capability or torch.cuda.get_device_capability(device)
    if capability < _FIRST_FP8_CAPABILITY:
        name = torch.cuda.get_device_name(device) if torch.cuda.is_available() else "this GPU"
        runs = "--precision bf16" if capability >= (8, 0) else "nothing here: BF16 needs compute capability 8.0"
        raise UnsupportedDeviceError(
            f"--precision fp8 needs compute capability 8.9 or newer (Ada, Hopper, Blackwell); {name} has "
            f"{capability[0]}.{capability[1]}. What runs on it: {runs}"
        )


def check_cuda_graph_support(device: torch.device) -> None:
    """Refuse CUDA graphs without CUDA.

    Raises:
        UnsupportedDeviceError: the message names the fix.
    """
    if device.type != "cuda":
        raise UnsupportedDeviceError("--cuda-graph-impl local needs a GPU, and there is none here; drop it")


def distributed_backend(device: torch.device) -> str:
    """Backend of ``torch.distributed`` for a device."""
    return "nccl" if device.type == "cuda" else "gloo"
