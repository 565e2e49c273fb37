"""The device a rank runs on, and what megatron-core needs to run on a CPU.

megatron-core names CUDA in places that a CPU run passes (``schedules.py`` allocates with ``device="cuda"``). Nothing
is patched at import: `runtime` is entered by the trainer, maps those places to the CPU for its duration and puts
everything back. On CUDA it does nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
from megatron.core.tensor_parallel import random as mcore_random
from torch.overrides import TorchFunctionMode

#: Compute capability of the first GPUs with FP8 tensor cores (Ada); Hopper is (9, 0).
_FIRST_FP8_CAPABILITY = (8, 9)


class UnsupportedDeviceError(ValueError):
    """This device cannot run the requested precision."""


def prepare_cuda_environment(*, needs_launch_order: bool, records_graphs: bool = False) -> str | None:
    """Set what CUDA reads once, when it starts; a variable that the user has set stays as it is.

    - ``CUDA_DEVICE_MAX_CONNECTIONS``: with one queue (Megatron's advice) a collective that waits for another one holds
      up every kernel launched after it: a fifth of a step of data-parallel training. Tensor parallelism over NCCL
      relies on that order to start its collectives before the GEMM that hides them, and gets one; else 32.
    - ``PYTORCH_CUDA_ALLOC_CONF``: segments that grow, so that blocks of different sizes do not fragment memory.
    - ``NCCL_GRAPH_REGISTER``: off where collectives are recorded into graphs. NCCL registers their buffers meanwhile,
      which hangs where these lie in such segments (pytorch/pytorch#158029; measured with NCCL 2.28.9).

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
    return int(os.environ.get("LOCAL_RANK", "0"))


def node_size() -> int:
    """Ranks of this node, as torchrun sets them (1 outside torchrun)."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def world_size() -> int:
    """Ranks of the run, as torchrun sets them (1 outside torchrun)."""
    return int(os.environ.get("WORLD_SIZE", "1"))


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
    """Refuse FP8 on a GPU whose tensor cores do not have it; a CPU runs the reference kernels.

    Args:
        capability: the GPU's compute capability; read from the device when None.

    Raises:
        UnsupportedDeviceError: with what does run there.
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
    """Refuse CUDA graphs where there is no CUDA.

    Raises:
        UnsupportedDeviceError: with the fix.
    """
    if device.type != "cuda":
        raise UnsupportedDeviceError("--cuda-graph-impl local needs a GPU, and there is none here; drop it")


def distributed_backend(device: torch.device) -> str:
    """Backend of ``torch.distributed`` for a device."""
    return "nccl" if device.type == "cuda" else "gloo"


_bytes_beside_allocator = 0
_earlier_peak_gib = 0.0


def count_memory_beside_allocator(nbytes: int) -> None:
    """Add what lasting memory takes beside what torch's allocator counts."""
    global _bytes_beside_allocator
    _bytes_beside_allocator += nbytes


def peak_used_share(device: torch.device) -> float:
    """The most of a GPU's memory that was in use: by torch's allocator at its peak, and by all else (CUDA and NCCL
    themselves, buffers that ranks share, other processes) now."""
    free, total = torch.cuda.mem_get_info(device)
    beside_allocator = total - free - torch.cuda.memory_reserved(device)
    return (beside_allocator + torch.cuda.max_memory_reserved(device)) / total


def begin_another_peak(device: torch.device) -> None:
    """Bytes that are counted beside the allocator from here on add to a later peak, not to what was held before."""
    global _earlier_peak_gib
    _earlier_peak_gib = peak_memory_gib(device)
    torch.cuda.reset_peak_memory_stats(device)


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory this process has held, GiB: on a GPU the allocator's peak, buffers shared with other ranks and what
    CUDA graphs keep; on a CPU the resident set."""
    if device.type == "cuda":
        return max(_earlier_peak_gib, (torch.cuda.max_memory_allocated(device) + _bytes_beside_allocator) / 2**30)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


_MATMULS = (torch.matmul, torch.Tensor.matmul)
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class _CudaOnCpu(TorchFunctionMode):
    """Sends ``device="cuda"`` and ``.cuda()`` to the CPU, and multiplies 16-bit matrices in FP32 there.

    A CPU without BF16 instructions takes three times as long for a BF16 product as for an FP32 one. Operands and
    result stay 16-bit and the sum is FP32 either way, as on a GPU.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.Tensor.cuda:
            return args[0]
        if func in _MATMULS and len(args) == 2 and args[0].dtype == args[1].dtype and args[0].dtype in _SIXTEEN_BITS:
            return (args[0].float() @ args[1].float()).to(args[0].dtype)
        if kwargs:
            device = kwargs.get("device")
            if device is not None and str(device).startswith("cuda"):
                kwargs = {**kwargs, "device": "cpu"}
            return func(*args, **kwargs)
        return func(*args)


class CpuRngTracker:
    """megatron-core's CUDA RNG tracker, on the CPU's generator: named states, forked for a region."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}

    def is_initialized(self) -> bool:
        """Whether any state has been added."""
        return bool(self.states_)

    def reset(self) -> None:
        """Forget all states."""
        self.states_ = {}

    def get_states(self) -> dict[str, torch.Tensor]:
        """The named generator states."""
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Replace the named generator states."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add a state seeded with `seed`."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.states_[name] = torch.get_rng_state()

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw from the named state inside the block."""
        outside = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outside)


@contextlib.contextmanager
def runtime(device: torch.device) -> Iterator[None]:
    """Everything megatron-core needs to run on `device`; undone at the end of the block."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        yield
        return
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in (
            (torch.cuda, "current_device", lambda: torch.device("cpu")),
            (mcore_random, "_CUDA_RNG_STATE_TRACKER", CpuRngTracker()),
            (mcore_random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True),
            (mcore_random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
            (mcore_random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, replacement)
        stack.enter_context(_CudaOnCpu())
        yield


def seed_everything(
    seed: int, device: torch.device, *, tensor_parallel_rank: int, pipeline_rank: int, records_graphs: bool = False
) -> None:
    """Seed dropout: the default generator alike over a tensor-parallel group, the tracker's state apart.

    Initial weights do not come from here (see `models.initialization`), so these seeds never change them.

    Args:
        records_graphs: make the tracker's states ones that CUDA graphs draw from; the numbers are the same.
    """
    seed = seed + 100 * pipeline_rank
    torch.manual_seed(seed)
    if device.type == "cuda":
        mcore_random.model_parallel_cuda_manual_seed(
            seed,
            use_cudagraphable_rng=records_graphs,
            tp_rank=tensor_parallel_rank,
            ep_rank=0,
            etp_rank=0,
            force_reset_rng=True,
        )
    else:
        tracker = mcore_random.get_cuda_rng_tracker()
        tracker.reset()
        tracker.add("model-parallel-rng", seed + 2718 + tensor_parallel_rank)
