"""Attention masks of transformers that attention does not need are left out, in compiled models too.

Attention without a written mask takes faster kernels, which skip what a causal mask hides. transformers looks at values
to find out whether it may leave a mask out: whether a batch without `attention_mask` has packed sequences, whose
positions restart, and whether an `attention_mask` hides anything. A look waits for the GPU, and while `torch.compile`
traces there are no values, so compiled models write every mask. Both are known without a look where the caller gives
neither: then positions are consecutive, and nothing is hidden.

transformers' functions ask here first, for all models of the process. Only models that `initialize` has been given say
what their callers give.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

#: Modules of transformers: where masks are made, and where models have their base class.
_MASKS, _MODELS = "transformers.masking_utils", "transformers.modeling_utils"


class _Call(threading.local):
    """The call of a model that runs in this thread. None: nothing is known of it.

    Attributes:
        has_own_positions: whether its caller gave positions.
        config: the model's.
        asking: the configuration of the model that makes a mask. It is another one's where a call of this one was
            interrupted.
    """

    has_own_positions: bool | None = None
    config: Any = None
    asking: Any = None


_call = _Call()


def leave_out_masks(model: torch.nn.Module) -> None:
    """Let the models of transformers in `model` leave out masks that hide no more than a causal one does."""
    if _MASKS not in sys.modules or _MODELS not in sys.modules:
        return
    base = sys.modules[_MODELS].PreTrainedModel
    for module in model.modules():
        if isinstance(module, base) and _note_call not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_note_call, with_kwargs=True)
            module.register_forward_hook(_forget_call, always_call=True)
    masks: Any = sys.modules[_MASKS]
    for name, answer in _ANSWERS.items():
        asked = getattr(masks, name, None)
        if asked is not None and not hasattr(asked, "_is_asked_here"):
            setattr(masks, name, _asked_first(answer, asked))


def _note_call(module: torch.nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Before a forward. Positions that are not given by name are among several arguments without one."""
    _call.config = module.config
    _call.has_own_positions = len(args) > 1 or named.get("position_ids") is not None


def _forget_call(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Behind a forward, also of a model inside of another one, whose call is then no longer known."""
    del module, args, output
    _call.has_own_positions = None


def _asked_first(answer: Callable[..., Any], asked: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(asked)
    def call(*args: Any, **named: Any) -> Any:
        return answer(asked, *args, **named)

    call._is_asked_here = True  # type: ignore[attr-defined]
    return call


def _mask_arguments(look: Callable[..., Any], config: Any, *others: Any, **named: Any) -> Any:
    """``_preprocess_mask_arguments``, which asks for packed sequences."""
    _call.asking = config
    return look(config, *others, **named)


def _packed_sequences(look: Callable[..., Tensor | None], position_ids: Tensor) -> Tensor | None:
    """``find_packed_sequence_indices``: the number of each token's sequence; None: each row is one sequence."""
    is_known = _call.has_own_positions is False and _call.asking is _call.config
    return None if is_known else look(position_ids)


def _causal_mask_is_left_out(
    look: Callable[..., bool], padding_mask: Tensor | None, q_length: int, kv_length: int, *others: Any
) -> bool:
    """``_ignore_causal_mask_sdpa``: whether attention's own causal mask will do. `others` are the offsets of queries
    (newer versions) and of keys, and the window of local attention, or None."""
    *offsets, window = others
    is_square = isinstance(q_length, int | torch.SymInt) and q_length == kv_length
    if padding_mask is None and is_square and all(map(_is_zero, offsets)) and torch.compiler.is_dynamo_compiling():
        return window is None or kv_length < window
    return look(padding_mask, q_length, kv_length, *others)


def _bidirectional_mask_is_left_out(
    look: Callable[..., bool], padding_mask: Tensor | None, kv_length: int, window: int | None = None
) -> bool:
    """``_ignore_bidirectional_mask_sdpa``: whether every token sees every other one."""
    if padding_mask is None and torch.compiler.is_dynamo_compiling():
        return window is None or kv_length < window
    return look(padding_mask, kv_length, window)


def _is_zero(offset: Any) -> bool:
    return isinstance(offset, int) and offset == 0


#: By transformers' names. Each takes the function that it stands in for, and that function's arguments.
_ANSWERS: Mapping[str, Callable[..., Any]] = {
    "_preprocess_mask_arguments": _mask_arguments,
    "find_packed_sequence_indices": _packed_sequences,
    "_ignore_causal_mask_sdpa": _causal_mask_is_left_out,
    "_ignore_bidirectional_mask_sdpa": _bidirectional_mask_is_left_out,
}
