"""megatron-core imported without what this project does not use: torch's compiler, wandb, its warnings."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

_compile = torch.compile


@contextlib.contextmanager
def quick_import() -> Iterator[None]:
    """Inside, modules of megatron-core load neither the compiler of torch nor wandb, and warn of nothing.

    It decorates functions by ``torch.compile``, which loads the compiler. Here that is done at a function's first call.
    It looks for wandb for a log of its inference. This project's log imports wandb when there is one to write.
    """
    # It imports this module of torch, which says where a CUDA toolkit without a GPU is, as on a login node.
    extensions = logging.getLogger("torch.utils.cpp_extension")
    was_disabled, extensions.disabled = extensions.disabled, True
    torch.compile = _compile_at_first_call  # type: ignore[assignment]
    has_wandb = "wandb" in sys.modules
    if not has_wandb:
        sys.modules["wandb"] = None  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            # On import it warns of each optional package that is not installed. Nothing here uses one of them.
            warnings.filterwarnings("ignore", module=r"megatron\.core\.")
            yield
    finally:
        torch.compile = _compile
        extensions.disabled = was_disabled
        if not has_wandb:
            del sys.modules["wandb"]


def _compile_at_first_call(function: Callable[..., Any] | None = None, **settings: Any) -> Callable[..., Any]:
    """As ``torch.compile`` of a function."""
    if function is None:
        return functools.partial(_compile_at_first_call, **settings)

    @functools.cache
    def compiled() -> Callable[..., Any]:
        return _compile(function, **settings)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call
