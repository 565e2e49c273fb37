"""Attention masks of transformers in recorded steps.

Before a model of transformers attends, it looks whether it needs a mask. A look at values waits for the GPU, which a
recording cannot:

- Without an attention mask and without a cache, causal models look whether positions restart inside of a row, because
  sequences are packed then (`find_packed_sequence_indices`). Here the first call of a kind looks, and later ones take
  its answer. If that was "not packed", the GPU checks each later batch.
- Some look for padding tokens where no mask is given, and warn. The first call of a kind warns.
- With an attention mask of rows and tokens, models look whether it masks anything. Here the first call of a kind looks.
  Later ones write out the mask, whatever it masks, and attention takes kernels that read it.

transformers also asks whether a stream is being recorded, and then writes out masks that mask nothing. It is told no.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

#: By the name of transformers' function, what answers in its place; it is called with the function and its arguments.
_Answers = dict[str, Callable[..., Any]]

_PACKED = "find_packed_sequence_indices"
#: Whether attention may leave out a mask of rows and tokens, which is the first argument.
_IGNORED = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")
#: A method of every model, which looks for padding where no mask is given, and warns once.
_WARNING = "warn_if_padding_and_no_attention_mask"


class TransformersMasks:
    """What one kind of calls has found out, in the order in which forward asks."""

    def __init__(self) -> None:
        self._are_packed: list[bool] = []
        self._num_asked = 0
        self._has_warned = False
        #: bool []: whether positions restarted where they had not; recordings write to it.
        self._restarted: Tensor | None = None
        self._seen: Tensor | None = None
        self._event: Any = None

    @contextmanager
    def looking(self) -> Iterator[None]:
        """The first call: transformers looks."""
        self._are_packed.clear()
        answers: _Answers = {_PACKED: self._look_at_positions, **dict.fromkeys(_IGNORED, self._look_at_mask)}
        with _in_place_of(answers):
            yield

    @contextmanager
    def answering(self) -> Iterator[None]:
        """A later call: nothing waits for the GPU."""
        self._num_asked = 0
        answers: _Answers = {_PACKED: self._answer, **dict.fromkeys(_IGNORED, _keep_mask), _WARNING: _be_silent}
        with _in_place_of(answers), _with_capture_seen(False):
            yield

    def have_restarted(self) -> bool:
        """Whether a batch so far had packed sequences where the first one had none. Does not wait for the GPU, so it
        may tell of a batch some calls later.
        """
        restarted = self._restarted
        if restarted is None:
            return False
        if not restarted.is_cuda:
            return bool(restarted)
        if self._seen is None:
            self._seen = torch.zeros((), dtype=torch.bool, device="cpu", pin_memory=True)
            self._event = torch.cuda.Event()
        elif not self._event.query():
            return False
        has_restarted = bool(self._seen)
        self._seen.copy_(restarted, non_blocking=True)
        self._event.record()
        return has_restarted

    def _look_at_positions(self, look: Callable[..., Tensor | None], positions: Tensor) -> Tensor | None:
        sequences = look(positions)
        self._are_packed.append(sequences is not None)
        if sequences is None and self._restarted is None:
            self._restarted = torch.zeros((), dtype=torch.bool, device=positions.device)
        return sequences

    def _look_at_mask(self, look: Callable[..., Any], mask: Tensor | None, *others: Any, **named: Any) -> Any:
        is_ignored = look(mask, *others, **named)
        if mask is not None and not self._has_warned and bool(is_ignored):
            self._has_warned = True
            logger.warning(
                "attention_mask masks nothing in this batch. Recorded steps read it all the same, with slower kernels: "
                "leave it out of batches without padding"
            )
        return is_ignored

    def _answer(self, look: Callable[..., Tensor | None], positions: Tensor) -> Tensor | None:
        number, self._num_asked = self._num_asked, self._num_asked + 1
        if number >= len(self._are_packed):  # this forward asks more often than the first one
            return look(positions)
        if self._are_packed[number]:
            with _with_capture_seen(True):  # then transformers does not look
                return look(positions)
        assert self._restarted is not None
        self._restarted.logical_or_((positions.diff(dim=-1) != 1).any())
        return None


def _keep_mask(look: Callable[..., Any], mask: Tensor | None, *others: Any, **named: Any) -> Any:
    return False if mask is not None else look(mask, *others, **named)


def _be_silent(look: Callable[..., Any], *others: Any, **named: Any) -> None:
    del look, others, named


#: The answers of the calls that run, the innermost last.
_answering: list[_Answers] = []


@contextmanager
def _in_place_of(answers: _Answers) -> Iterator[None]:
    masks: Any = sys.modules.get("transformers.masking_utils")
    models: Any = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    before = []
    for name in answers:
        owner = models if name == _WARNING else masks
        if hasattr(owner, name):
            before.append((owner, name, getattr(owner, name)))
    for owner, name, look in before:
        setattr(owner, name, _stand_in(name, look))
    _answering.append(answers)
    try:
        yield
    finally:
        _answering.pop()
        for owner, name, look in before:
            setattr(owner, name, look)


@functools.cache
def _stand_in(name: str, look: Callable[..., Any]) -> Callable[..., Any]:
    """What stands in the place of transformers' `look`. It is one object in all calls: torch.compile compiles a model
    again if a function that it calls is another one. Inside a graph transformers does not look.
    """

    def call(*args: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling() or not _answering or name not in _answering[-1]:
            return look(*args, **named)
        if not args:  # given by name
            args = (named.pop(next(iter(named))),)
        return _answering[-1][name](look, *args, **named)

    return call


@contextmanager
def _with_capture_seen(is_seen: bool) -> Iterator[None]:
    """Tell transformers that a stream is being recorded, or that none is."""
    module: Any = sys.modules.get("transformers.utils.import_utils")
    before = getattr(module, "is_cuda_stream_capturing", None)
    if before is None:
        yield
        return
    module.is_cuda_stream_capturing = lambda: is_seen
    try:
        yield
    finally:
        module.is_cuda_stream_capturing = before
