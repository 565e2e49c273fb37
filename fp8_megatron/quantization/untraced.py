"""Functions with which `torch.compile` begins no graph, or that it never traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])

_frames: Any = torch._C._dynamo.eval_frame
# `torch._dynamo.eval_frame.skip_code` does so, and takes seconds to import.
_ACTIONS = _frames._FrameAction
_SKIP = _frames._FrameExecStrategy(_ACTIONS.SKIP, _ACTIONS.DEFAULT)
_SKIP_ALL = _frames._FrameExecStrategy(_ACTIONS.SKIP, _ACTIONS.SKIP)


def enters_no_graph(function: _Function) -> _Function:
    """Decorator: a compiler traces calls of `function` inside of a graph. Where no graph calls it, as behind a graph
    break, it runs as it is, and what it calls may be compiled again.

    A compiler fails with an internal error at a function whose argument is a decoded tensor, if it meets the tensor's
    layer there (torch 2.13).
    """
    _frames.set_code_exec_strategy(function.__code__, _SKIP)
    return function


def leaves_graph(function: _Function) -> _Function:
    """Decorator: a compiler breaks its graph at a call of `function`, and runs it and what it calls as they are."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # what torch.compiler.disable sets
    _frames.set_code_exec_strategy(function.__code__, _SKIP_ALL)
    return function
