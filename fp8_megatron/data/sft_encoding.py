"""Lines of conversations to tokens, by several processes. Imports no torch, which they would wait for."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import numpy as np

from ..errors import UserError
from .documents import RawBatch, documents_of, read_batches
from .pools import process_pool, results_in_order
from .sft_conversations import conversations_of, template_text
from .sft_template import ChatTemplate
from .time_limits import seconds_for, watched
from .transformers_tokenizer import HuggingFaceTokenizer

logger = logging.getLogger(__name__)

#: Below this a file is tokenized by the process itself: starting others takes seconds.
_ALONE_BELOW_BYTES = 4 << 20
_MOST_PROCESSES = 16
_BATCHES_PER_PROCESS = 4


@dataclass(frozen=True)
class ConversationEncoding:
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
        text = template_text(self.prompt_format, self.template_file)
        return ChatTemplate(tokenizer, text, file=self.template_file)


@dataclass
class EncodedLines:
    """Some lines as tokens.

    Attributes:
        tokens: int32 [tokens].
        is_answer: bool [tokens].
        conversation_lengths: int64 [conversations], in tokens.
        line_lengths: int64 [lines], in conversations.
    """

    tokens: np.ndarray
    is_answer: np.ndarray
    conversation_lengths: np.ndarray
    line_lengths: np.ndarray


@dataclass
class _EncodedLists:
    """Lists that become an `EncodedLines`."""

    tokens: list[np.ndarray] = field(default_factory=list)
    is_answer: list[np.ndarray] = field(default_factory=list)
    per_line: list[int] = field(default_factory=list)


def encode_all(name: str, encoding: ConversationEncoding) -> Iterator[EncodedLines]:
    """Encode a file in order: the result does not depend on the number of processes.

    Raises:
        UserError: a bad line, named, or a file that cannot be read.
    """
    batches = read_batches([name])
    num_processes = min(os.cpu_count() or 1, _MOST_PROCESSES)
    if num_processes == 1 or Path(name).stat().st_size < _ALONE_BELOW_BYTES:
        template = encoding.template()
        yield from (_encode(template, batch) for batch in batches)
        return
    logger.info("%s: conversations are made tokens by %d processes", name, num_processes)
    # Spawned: a forked process must not have this one's CUDA context and threads.
    executor = process_pool(num_processes, method="spawn")
    most = _BATCHES_PER_PROCESS * num_processes
    try:
        yield from results_in_order(executor, partial(_encode_in_process, encoding), batches, most=most)
    except BrokenProcessPool as error:
        raise UserError(f"a process that reads {name} died, probably out of memory; cut the file in parts") from error


@cache
def _template(encoding: ConversationEncoding) -> ChatTemplate:
    """The template of a process that lives as long as one file is read."""
    return encoding.template()


def _encode_in_process(encoding: ConversationEncoding, batch: RawBatch) -> EncodedLines:
    return _encode(_template(encoding), batch)


def _encode(template: ChatTemplate, batch: RawBatch) -> EncodedLines:
    """Encode some lines.

    Raises:
        UserError: a bad line, named.
    """
    gathered = _EncodedLists()
    with watched() as give:
        for line, content in documents_of(batch):
            place = f"{batch.path}:{line}"
            # Templates have a limit of their own, which comes first where it can; it is for each text that they write.
            seconds = 2 * seconds_for(len(content))
            give(seconds, f"{place}: {template.tokenizer.too_slow(seconds)}")
            conversations = conversations_of(content, place)
            gathered.per_line.append(len(conversations))
            for conversation in conversations:
                tokens, is_answer = template.encode(conversation)
                gathered.tokens.append(tokens)
                gathered.is_answer.append(is_answer)
    no_tokens = np.zeros(0, dtype=np.int32)
    return EncodedLines(
        np.concatenate([no_tokens, *gathered.tokens]),
        np.concatenate([no_tokens.astype(bool), *gathered.is_answer]),
        np.array([len(tokens) for tokens in gathered.tokens], dtype=np.int64),
        np.array(gathered.per_line, dtype=np.int64),
    )
