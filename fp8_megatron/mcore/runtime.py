"""Runs megatron-core on a device: redirects its CUDA calls on a CPU, and seeds random states.

megatron-core names CUDA on code paths that a CPU run takes (``schedules.py`` allocates with ``device="cuda"``). Nothing
is patched at import. On a CPU, `runtime` maps these calls to the CPU inside its block and restores them afterwards; on
the meta device, whose tensors have shapes and no values, to that. On CUDA it only selects the device.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence

import torch
from megatron.core.tensor_parallel import random as mcore_random
from torch import Tensor
from torch.overrides import TorchFunctionMode

_MATMULS = (torch.matmul, torch.Tensor.matmul, torch.bmm, torch.addmm, torch.baddbmm, torch._grouped_mm)
_SIXTEEN_BITS = ({torch.bfloat16}, {torch.float16})
#: Before the names of megatron-core's own generators, of which a run of several tensor-parallel ranks has several.
_TRACKED = "tracker/"


class _CudaElsewhere(TorchFunctionMode):
    """Sends ``device="cuda"`` and ``.cuda()`` to another device, and multiplies 16-bit matrices in FP32 on a CPU.

    A CPU without BF16 instructions takes 3 to 40 times as long for a BF16 product as for an FP32 one. In both cases
    operands and result are 16-bit and the sum is FP32, as on a GPU.

    torch turns a mode off while it runs what the mode was asked for, and ``torch.autograd.backward`` is asked for, too.
    So backward is run by the engine here, with the mode on. So is the backward inside the backward of a recomputed
    layer or of a chunk (``torch.autograd.grad``): its products have the bits of those of a layer that kept its
    activations.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._in_fp32 = _MATMULS if device.type == "cpu" else ()

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.Tensor.cuda:
            return args[0]
        if func in self._in_fp32 and {getattr(operand, "dtype", None) for operand in args} in _SIXTEEN_BITS:
            given = kwargs or {}
            if given.get("out") is None and given.get("out_dtype") is None:
                return func(*(operand.float() for operand in args), **given).to(args[0].dtype)
        if func is torch.autograd.backward and self._in_fp32:
            pairs = _plain_backward(**inspect.signature(func).bind(*args, **(kwargs or {})).arguments)
            if pairs is not None:
                with self:
                    return _run_backward(*pairs)
        if func is torch.autograd.grad and self._in_fp32:
            given = inspect.signature(func).bind(*args, **(kwargs or {})).arguments
            inputs = given.pop("inputs")
            given.pop("only_inputs", None)  # deprecated, and always on
            pairs = _plain_backward(given.pop("outputs"), given.pop("grad_outputs", None), **given)
            if pairs is not None:
                with self:
                    return _run_backward(*pairs, inputs)
        if kwargs:
            device = kwargs.get("device")
            if device is not None and str(device).startswith("cuda"):
                kwargs = {**kwargs, "device": self._device}
            return func(*args, **kwargs)
        return func(*args)


def _plain_backward(
    tensors: Sequence[object], grad_tensors: object = None, **others: object
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None:
    """(tensors, gradients) of a backward that runs once, with no other argument given. Else None."""
    given = grad_tensors if isinstance(grad_tensors, Sequence) else [grad_tensors] * len(tensors)
    if any(others.values()) or not len(tensors) == len(given) > 0 or (len(given) > 1 and given is not grad_tensors):
        return None
    found: list[tuple[Tensor, Tensor]] = []
    for tensor, gradient in zip(tensors, given, strict=True):
        if not isinstance(tensor, Tensor):
            return None
        if gradient is None and tensor.numel() == 1:
            gradient = torch.ones_like(tensor)
        if not isinstance(gradient, Tensor):
            return None
        found.append((tensor, gradient))
    return tuple(tensor for tensor, _ in found), tuple(gradient for _, gradient in found)


def _run_backward(
    tensors: tuple[Tensor, ...], gradients: tuple[Tensor, ...], inputs: tuple[Tensor, ...] = ()
) -> tuple[Tensor, ...]:
    """What ``torch.autograd.backward`` does; with `inputs`, what ``torch.autograd.grad`` does."""
    run: Callable[..., tuple[Tensor, ...]] = torch.autograd.Variable._execution_engine.run_backward
    return run(tensors, gradients, False, False, inputs, allow_unreachable=not inputs, accumulate_grad=not inputs)


class CpuRngTracker:
    """megatron-core's CUDA RNG tracker on the CPU's generator: named states; `fork` uses one inside a block."""

    def __init__(self) -> None:
        self.states_: dict[str, Tensor] = {}

    def is_initialized(self) -> bool:
        """Whether any state has been added."""
        return bool(self.states_)

    def reset(self) -> None:
        """Forget all states."""
        self.states_ = {}

    def get_states(self) -> dict[str, Tensor]:
        """The named generator states."""
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
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
    """Set up what megatron-core needs to run on `device`, and undo it at the end of the block."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        yield
        return
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in (
            (torch.cuda, "current_device", lambda: device),
            (mcore_random, "_CUDA_RNG_STATE_TRACKER", CpuRngTracker()),
            (mcore_random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True),
            (mcore_random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
            (mcore_random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, replacement)
        stack.enter_context(_CudaElsewhere(device))
        yield


def seed_everything(
    seed: int, device: torch.device, *, tensor_parallel_rank: int, pipeline_rank: int, records_graphs: bool = False
) -> None:
    """Seed dropout. All tensor-parallel ranks seed the default generator alike; each seeds its tracker's state apart.

    These seeds do not affect initial weights (see `mcore.initialization`).

    Args:
        records_graphs: make the tracker's states usable by CUDA graphs; the numbers are the same.
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


def rng_states(device: torch.device) -> dict[str, Tensor]:
    """States of the generators that training draws from."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    tracked = mcore_random.get_cuda_rng_tracker().get_states().items()
    return states | {f"{_TRACKED}{name}": mcore_random.convert_cuda_rng_state(state) for name, state in tracked}


def set_rng_states(states: dict[str, Tensor], device: torch.device) -> bool:
    """Restore the result of `rng_states`. Returns False and sets nothing if the states are from a CPU and this is a
    GPU, or the reverse: generators of one cannot take the other's states.

    Raises:
        ValueError: a state is missing or has another length.
    """
    if ("cuda" in states) != (device.type == "cuda"):
        return False
    for name, current in rng_states(device).items():
        if name not in states:
            raise ValueError(f"rng/{name} is missing")
        if states[name].shape != current.shape:
            raise ValueError(f"rng/{name} has {states[name].numel()} bytes, not {current.numel()}")
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    tracker = mcore_random.get_cuda_rng_tracker()
    of_graphs = mcore_random.is_graph_safe_cuda_rng_tracker(tracker)
    tracked = {name.removeprefix(_TRACKED): state for name, state in states.items() if name.startswith(_TRACKED)}
    tracker.set_states({name: mcore_random.convert_cuda_rng_state(one, of_graphs) for name, one in tracked.items()})
    return True
