"""Functions with which `torch.compile` begins no graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])

_frames: Any = torch._C._dynamo.eval_frame
# `torch._dynamo.eval_frame.skip_code` does so, and takes seconds to import.
_SKIP = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT)


def enters_no_graph(function: _Function) -> _Function:
    """Decorator: a compiler traces calls of `function` inside of a graph. Where no graph calls it, as behind a graph
    break, it runs as it is, and what it calls may be compiled again.

    A compiler fails with an internal error at a function whose argument is a decoded tensor, if it meets the tensor's
    layer there (torch 2.13).
    """
    _frames.set_code_exec_strategy(function.__code__, _SKIP)
    return function
