"""MS-AMP's names that are not provided: asking for one is an error with the reason and what to use instead."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

WEIGHTS = "FP8 weights are torch.nn.Parameters of FP8Linear, which is a torch.nn.Linear"
MODEL_STATE = "a model's scales belong to its layers; fp8_megatron.any_model.report says which are in FP8"
HOOKS = "weights are torch.nn.Parameters; use torch.Tensor.register_post_accumulate_grad_hook"
TENSOR_DIST = "the optimizer reduces gradients in FP8 and sends weights; torch.distributed sends other tensors"
_FSDP = "torch's fully_shard takes the place of FSDP1's flat parameters; use msamp.fsdp.FP8FullyShardedDataParallel"
_TE = "Transformer Engine stays as it is; msamp.te.TeReplacer turns its modules into FP8 layers"

#: Modules of MS-AMP that are not here → the reason.
MODULES = {
    "msamp.common.tensor.hook": HOOKS,
    "msamp.common.tensor.tensor_dist": TENSOR_DIST,
    "msamp.common.utils": "it holds MS-AMP's own internals; torch.distributed and logging have what loops need",
    "msamp.deepspeed.runtime": "the engine is DeepSpeed's own; call msamp.deepspeed.initialize",
    "msamp.fsdp._runtime_utils": _FSDP,
    "msamp.fsdp.flat_param": _FSDP,
    "msamp.megatron": "pretrain_gpt.py of fp8_megatron runs megatron-core with Megatron's own flags in FP8",
    "msamp.nn.functional": "torch.nn.functional.linear takes the weight of an FP8 layer as it is",
    "msamp.nn.module": WEIGHTS,
    "msamp.nn.parameter": WEIGHTS,
    "msamp.nn.state": MODEL_STATE,
    "msamp.operators.dist_op": "it wraps an NCCL that is not public; fp8_megatron.collectives reduces FP8 on torch's",
    "msamp.operators.fp4_quantize": "FP4 training is not part of fp8_megatron",
    "msamp.optim.optimizer": "all optimizers here are fp8_megatron.FP8Optimizer: derive from that",
    "msamp.te.extension": _TE,
    "msamp.te.modules": _TE,
}


def not_provided(name: str, reason: str) -> ImportError:
    """The error for a name of MS-AMP that this distribution does not provide."""
    return ImportError(f"{name} is not provided: {reason}")


class Refusals:
    """Finder of ``sys.meta_path`` behind all others: importing one of `MODULES` is an error with its reason."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Find nothing.

        Raises:
            ImportError: the module is not provided.
        """
        if name in MODULES:
            raise not_provided(name, MODULES[name])


def refuse(module: str, reasons: Mapping[str, str], *, late: Mapping[str, str] | None = None) -> Callable[[str], Any]:
    """A module's ``__getattr__`` that raises `not_provided` for the names in `reasons`.

    Args:
        late: name → the module that has it, which is imported when the name is asked for.
    """

    def __getattr__(name: str) -> Any:
        if late is not None and name in late:
            return getattr(importlib.import_module(late[name]), name)
        if name in reasons:
            raise not_provided(f"{module}.{name}", reasons[name])
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__
