"""Files of conversations as tokens: made once, cached, and mapped by every rank."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from ..errors import UserError
from ..outputs import writing_to
from .documents import RawBatch, documents_of, read_batches
from .sft_conversations import conversations_of
from .sft_template import ChatTemplate, template_text
from .splits import cache_folder
from .transformers_tokenizer import HuggingFaceTokenizer

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

#: Raised when the same conversations would give other tokens.
_FORMAT = 1
_PARTS = ("tokens", "is_answer", "conversation_ends", "line_ends")
#: Below this a file is tokenized by the process itself: starting others takes seconds.
_ALONE_BELOW_BYTES = 4 << 20
_MOST_PROCESSES = 16
_BATCHES_PER_PROCESS = 4


@dataclass(frozen=True)
class Encoding:
    """What makes tokens of conversations. Processes are sent it.

    Attributes:
        tokenizer: a folder, or a name on the hub.
        special_tokens: further tokens that are never cut.
        prompt_format: --sft-tokenizer-prompt-format.
        template_file: --sft-chat-template.
    """

    tokenizer: str
    special_tokens: tuple[str, ...] = ()
    prompt_format: str = "default"
    template_file: str | None = None

    def template(self) -> ChatTemplate:
        """The tokenizer with its template.

        Raises:
            UserError: see `ChatTemplate` and `template_text`.
        """
        tokenizer = HuggingFaceTokenizer(self.tokenizer, special_tokens=self.special_tokens)
        return ChatTemplate(tokenizer, template_text(self.prompt_format, self.template_file))


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
        """Lines."""
        return len(self.line_ends)

    def conversation(self, index: int) -> slice:
        """Where a conversation's tokens are."""
        start = int(self.conversation_ends[index - 1]) if index else 0
        return slice(start, int(self.conversation_ends[index]))

    def line(self, index: int) -> range:
        """The conversations of a line."""
        return range(int(self.line_ends[index - 1]) if index else 0, int(self.line_ends[index]))


def open_conversations(name: str, encoding: Encoding, cache_root: str | None) -> ConversationFile:
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
    settings = (_FORMAT, encoding.tokenizer, encoding.special_tokens, template.text, _state(encoding.tokenizer))
    folder = cache_folder([path], cache_root, kind="sft", settings=settings)
    _first_does(lambda: _make(name, encoding, folder))
    parts = {part: np.load(folder / f"{part}.npy", mmap_mode="r") for part in _PARTS}
    return ConversationFile(**parts)


def _state(tokenizer: str) -> list[tuple[str, int, int]]:
    """Sizes and times of a tokenizer's files; none for a name on the hub."""
    folder = Path(tokenizer)
    files = sorted(folder.glob("*token*.json")) if folder.is_dir() else []
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def _first_does(action: Callable[[], Result]) -> None:
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


def _make(name: str, encoding: Encoding, folder: Path) -> None:
    """Write the parts of a file, unless they are there. A part has its name when all are complete."""
    if all((folder / f"{part}.npy").is_file() for part in _PARTS):
        return
    started = time.monotonic()
    encoded = list(_encode_all(name, encoding))
    counts = {part: [getattr(batch, part) for batch in encoded] for part in _PARTS}
    for part in ("conversation_ends", "line_ends"):
        lengths = np.concatenate([np.zeros(0, dtype=np.int64), *counts[part]])
        counts[part] = [np.cumsum(lengths, dtype=np.int64)]
    if not len(counts["line_ends"][0]):
        raise UserError(f"{name} has no conversation; give one a line")
    partial = {part: folder / f"{part}.{os.getpid()}.partial" for part in _PARTS}
    try:
        for part, path in partial.items():
            with writing_to(path, "--data-cache-path"), path.open("wb") as file:
                np.save(file, np.concatenate(counts[part]))
        for part, path in partial.items():
            path.replace(folder / f"{part}.npy")
    finally:
        for path in partial.values():
            path.unlink(missing_ok=True)
    num_answers = sum(int(batch.is_answer.sum()) for batch in encoded)
    logger.info(
        "%s: %d conversations, %d tokens, of which %d are answers (%.1f s)",
        name,
        len(counts["conversation_ends"][0]),
        counts["conversation_ends"][0][-1],
        num_answers,
        time.monotonic() - started,
    )


@dataclass
class _Encoded:
    """Some lines as tokens. The ends are lengths until all lines are joined."""

    tokens: np.ndarray
    is_answer: np.ndarray
    conversation_ends: np.ndarray
    line_ends: np.ndarray


@dataclass
class _Gathered:
    """Lists that become an `_Encoded`."""

    tokens: list[np.ndarray] = field(default_factory=list)
    is_answer: list[np.ndarray] = field(default_factory=list)
    per_line: list[int] = field(default_factory=list)


def _encode_all(name: str, encoding: Encoding) -> Iterator[_Encoded]:
    """Encode a file in order: the result does not depend on the number of processes."""
    batches = read_batches([name])
    num_processes = min(os.cpu_count() or 1, _MOST_PROCESSES)
    if num_processes == 1 or Path(name).stat().st_size < _ALONE_BELOW_BYTES:
        yield from (_encode(encoding, batch) for batch in batches)
        return
    logger.info("%s: conversations are made tokens by %d processes", name, num_processes)
    # Spawned: a forked process must not have this one's CUDA context and threads.
    executor = ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn"), initializer=_ignore_interrupts)
    pending: deque[Future[_Encoded]] = deque()
    try:
        for batch in batches:
            pending.append(executor.submit(_encode, encoding, batch))
            if len(pending) >= _BATCHES_PER_PROCESS * num_processes:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(f"a process that reads {name} died, probably out of memory; cut the file in parts") from error
    finally:
        executor.shutdown(cancel_futures=True)


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@cache
def _template(encoding: Encoding) -> ChatTemplate:
    return encoding.template()


def _encode(encoding: Encoding, batch: RawBatch) -> _Encoded:
    """Encode some lines.

    Raises:
        UserError: a bad line, named.
    """
    template, gathered = _template(encoding), _Gathered()
    for line, content in documents_of(batch):
        conversations = conversations_of(content, f"{batch.path}:{line}")
        gathered.per_line.append(len(conversations))
        for conversation in conversations:
            tokens, is_answer = template.encode(conversation)
            gathered.tokens.append(tokens)
            gathered.is_answer.append(is_answer)
    no_tokens: Any = np.zeros(0, dtype=np.int32)
    return _Encoded(
        np.concatenate([no_tokens, *gathered.tokens]),
        np.concatenate([no_tokens.astype(bool), *gathered.is_answer]),
        np.array([len(tokens) for tokens in gathered.tokens], dtype=np.int64),
        np.array(gathered.per_line, dtype=np.int64),
    )
