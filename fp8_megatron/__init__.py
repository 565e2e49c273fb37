"""fp8_megatron: LLM training with FP8 end to end.

Importing the package loads no other module and has no side effects. The names for any PyTorch model load their modules
at first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

#: Public name → the module that defines it.
_HOMES = {
    "FP8Linear": "nn.module",
    "FP8Optimizer": "any_model.optimizer",
    "clip_grad_norm_": "any_model.clip_grads",
    "initialize": "any_model.initialize",
    "record_step": "any_model.recorded_step",
    "replace_linears": "any_model.linears",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
