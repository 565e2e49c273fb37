"""Files of conversations as tokens: made once, cached, and mapped by every rank."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from ..errors import UserError
from .cached_arrays import make_files, map_arrays
from .sft_encoding import ConversationEncoding, encode_all
from .splits import cache_folder

logger = logging.getLogger(__name__)

#: Raised when the same conversations would give other tokens.
_FORMAT = 3
_PARTS = ("tokens", "is_answer", "conversation_ends", "line_ends")


@dataclass(frozen=True, eq=False)
class ConversationFile:
    """A file of conversations as tokens.

    Attributes:
        tokens: int32 [tokens].
        is_answer: bool [tokens]; the loss is taken over these.
        conversation_ends: int64 [conversations], where each ends among the tokens.
        line_ends: int64 [lines], where the conversations of each line end among the conversations.
    """

    tokens: np.ndarray
    is_answer: np.ndarray
    conversation_ends: np.ndarray
    line_ends: np.ndarray

    def __len__(self) -> int:
        """The number of lines."""
        return len(self.line_ends)

    def conversation(self, index: int) -> slice:
        """Where a conversation's tokens are."""
        start = int(self.conversation_ends[index - 1]) if index else 0
        return slice(start, int(self.conversation_ends[index]))

    def line(self, index: int) -> range:
        """The conversations of a line."""
        return range(int(self.line_ends[index - 1]) if index else 0, int(self.line_ends[index]))


def open_conversations(name: str, encoding: ConversationEncoding, cache_root: str | None) -> ConversationFile:
    """A file's conversations as tokens. Rank 0 makes them and caches them; all ranks map the cache.

    All ranks call it together, or a process without torch.distributed. All hosts share the cache folder.

    Args:
        name: JSON lines, compressed or not (`documents.read_batches`).
        cache_root: see `splits.cache_folder`.

    Raises:
        UserError: a bad file, line or template, on every rank. One line names ``file:line``.
    """
    path = Path(name).resolve()
    template = encoding.template()  # each rank knows its own error of a missing tokenizer
    folder = cache_folder([path], cache_root, kind="sft", settings=(_FORMAT, template.fingerprint))
    files = [f"{part}.npy" for part in _PARTS]
    _first_does(lambda: make_files(folder, files, "crc32.json", partial(_write, name, encoding)))
    return ConversationFile(*map_arrays(folder, files, f"the tokens of {name}"))


def _first_does(action: Callable[[], object]) -> None:
    """Run an action on rank 0 while the others wait. Its `UserError` is raised on every rank."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        action()
        return
    problem: list[str | None] = [None]
    unknown: Exception | None = None
    if torch.distributed.get_rank() == 0:
        try:
            action()
        except UserError as error:
            problem = [str(error)]
        except Exception as error:
            problem, unknown = [f"rank 0 could not read the conversations: {error}"], error
    torch.distributed.broadcast_object_list(problem, src=0)
    if unknown is not None:
        raise unknown
    if problem[0] is not None:
        raise UserError(problem[0])


def _write(name: str, encoding: ConversationEncoding, folder: Path) -> None:
    """Write the parts of a file into a folder."""
    started = time.monotonic()
    try:
        encoded = list(encode_all(name, encoding))
    except OSError as error:
        raise UserError(f"{name} cannot be read ({error.strerror or error}); copy it again") from error
    ends = (
        np.cumsum(np.concatenate([lines.conversation_lengths for lines in encoded])) if encoded else np.zeros(0),
        np.cumsum(np.concatenate([lines.line_lengths for lines in encoded])) if encoded else np.zeros(0),
    )
    if not len(ends[0]):
        raise UserError(f"{name} has no conversation; give one a line")
    tokens, is_answer = (np.concatenate([getattr(lines, part) for lines in encoded]) for part in _PARTS[:2])
    for part, array in zip(_PARTS, (tokens, is_answer, *ends), strict=True):
        np.save(folder / f"{part}.npy", array)
    logger.info(
        "%s: %d conversations, %d tokens, of which %d are answers (%.1f s)",
        name,
        len(ends[0]),
        len(tokens),
        int(is_answer.sum()),
        time.monotonic() - started,
    )
