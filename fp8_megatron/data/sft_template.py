"""Conversations to tokens by a chat template, and which of them are answers.

A template is Jinja in transformers' dialect. It may mark answers with ``{% generation %}`` … ``{% endgeneration %}``.
Otherwise an answer is what a conversation up to it has behind the prompt that the template writes for it.
"""

from __future__ import annotations

import hashlib
import json
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import UserError
from . import time_limits
from .sft_conversations import ANSWERING, Conversation, Message
from .time_limits import alarm
from .transformers_tokenizer import HuggingFaceTokenizer

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_OF_A_MESSAGE = ", message "
#: ``message['content'] is none`` and the like.
_KNOWS_NULL = re.compile(r"content\W{0,3}\s*(?:is\s+(?:not\s+)?|[!=]=\s*)none\b", re.IGNORECASE)


class ChatTemplate:
    """A tokenizer with the template that writes conversations.

    Args:
        tokenizer: a fast one: it says which characters a token comes from.
        template: Jinja; None: the tokenizer's own.
        file: where it is from, for errors.

    Raises:
        UserError: the tokenizer is slow, or has no template.
    """

    def __init__(self, tokenizer: HuggingFaceTokenizer, template: str | None = None, *, file: str | None = None):
        self.tokenizer = tokenizer
        self._name = tokenizer.name
        self._file = file or self._name
        self._backend = tokenizer.backend
        if not self._backend.is_fast:
            raise UserError(
                f"tokenizer {self._name} cannot say which characters a token comes from; give one with a tokenizer.json"
            )
        own = self._backend.chat_template
        if template is None and not isinstance(own, str):
            kind = "several chat templates" if own else "no chat template"
            raise UserError(
                f"tokenizer {self._name} has {kind}; give one as a file: --sft-chat-template FILE, or choose "
                f"--sft-tokenizer-prompt-format identity"
            )
        self.text: str = own if template is None else template
        self._marks_answers = _MARK.search(self.text) is not None
        self._reads_weights = "weight" in self.text
        self._writes: set[str] = set()
        self._knows_null = _KNOWS_NULL.search(self.text) is not None

    @property
    def fingerprint(self) -> str:
        """A hash of all that tokens of conversations depend on, wherever its files lie. Equal on all ranks."""
        backend = self._backend
        content = json.loads(backend.backend_tokenizer.to_str())  # with added tokens, normaliser and the like
        parts = (content, self.text, backend.special_tokens_map, backend.split_special_tokens, self.tokenizer.eod)
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def encode(self, conversation: Conversation) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of a conversation, and which of them the loss is taken over.

        The ids and the mask are those of transformers' ``apply_chat_template``: a token belongs to an answer if one of
        its characters does. If the template has not written the tokenizer's end token behind the last answer, that
        token is appended. It belongs to the answer if nobody speaks after it.

        Returns:
            int32 [n], bool [n].

        Raises:
            UserError: the template refuses the conversation, or does not tell where its answers are; an answer has a
                ``weight`` that the template does not read; it has messages, calls or tools that the template leaves
                out.
        """
        self._check_weights(conversation)
        text, spans = self._text(conversation)
        self._check_all_is_written(conversation, text)
        encoded = self._backend(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        tokens = np.array(encoded["input_ids"], dtype=np.int32)
        first, behind = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2).T  # characters of each token
        is_answer = np.zeros(len(tokens), dtype=bool)
        for start, end in spans:
            is_answer |= (behind > start) & (first < end)
        if not is_answer.any():
            raise UserError(f"{conversation.place}: the chat template writes no token of the answer; give another")
        eod = self.tokenizer.eod
        if eod not in tokens[behind > spans[-1][0]]:
            answers_last = conversation.messages[-1]["role"] == ANSWERING
            tokens, is_answer = np.append(tokens, np.int32(eod)), np.append(is_answer, answers_last)
        return tokens, is_answer

    def _check_weights(self, conversation: Conversation) -> None:
        """Refuse weights of answers, which would change nothing: some formats leave answers of weight 0 out."""
        for number, message in enumerate(conversation.messages, 1):
            if message["role"] == ANSWERING and message.get("weight", 1) != 1 and not self._reads_weights:
                raise UserError(
                    f"{conversation.place}, message {number}: weight {message['weight']!r} has no effect, as all "
                    f"answers count alike; remove it, or give a template that marks the answers that count with "
                    f"{{% generation %}} and reads weight: --sft-chat-template FILE"
                )

    def _text(self, conversation: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the characters of each answer."""
        return self._marked(conversation) if self._marks_answers else self._compared(conversation)

    def _check_all_is_written(self, conversation: Conversation, text: str) -> None:
        """Refuse what the template leaves out without a word: it writes the same text of a conversation with less.

        Of what a template has written once, roles and tools, it is not asked again.
        """
        for what, without in _with_less(conversation):
            if what in self._writes:
                continue
            try:
                is_left_out = self._text(without)[0] == text
            except UserError:  # it needs what was left out
                is_left_out = False
            if is_left_out:
                raise UserError(
                    f"{conversation.place}{what}: the chat template of {self._file} does not write them; remove them, "
                    f"or give a template that does: --sft-chat-template FILE"
                )
            if not what.startswith(_OF_A_MESSAGE):
                self._writes.add(what)

    def _marked(self, conversation: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the characters of each answer as the template marks them."""
        from transformers.utils.chat_template_utils import render_jinja_template

        with self._naming(conversation):
            rendered: Any = render_jinja_template(
                conversations=[self._messages(conversation)],
                tools=conversation.tools,
                chat_template=self.text,
                return_assistant_tokens_mask=True,
                **self._backend.special_tokens_map,
            )
        texts, marked = rendered
        found = [(start, end) for start, end in marked[0] if end > start]
        if not found:
            raise UserError(f"{conversation.place}: the chat template marks no answer; give another")
        return texts[0], found

    def _compared(self, conversation: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the characters of each answer: what follows its prompt in the text that ends with it."""
        text = self._write(conversation, len(conversation.messages))
        spans: list[tuple[int, int]] = []
        for index, message in enumerate(conversation.messages):
            if message["role"] != ANSWERING:
                continue
            prompt = self._write(conversation, index, prompts=True)
            is_last = index + 1 == len(conversation.messages)
            until = text if is_last else self._write(conversation, index + 1)
            if not until.startswith(prompt) or not text.startswith(until):
                raise UserError(
                    f"{conversation.place}, message {index + 1}: the chat template of {self._name} writes this answer "
                    f"otherwise inside of the conversation than behind its prompt, so its tokens are not known; give "
                    f"a template that marks answers with {{% generation %}}: --sft-chat-template FILE"
                )
            spans.append((len(prompt), len(until)))
        return text, spans

    def _messages(self, conversation: Conversation) -> list[Message]:
        """What the template gets. Content that is null is left out where the template would write it as None."""
        if self._knows_null:
            return list(conversation.messages)
        return [
            {key: value for key, value in message.items() if value is not None} for message in conversation.messages
        ]

    def _write(self, conversation: Conversation, num_messages: int, *, prompts: bool = False) -> str:
        """The first messages as text; `prompts` adds what comes before an answer."""
        with self._naming(conversation):
            return str(
                self._backend.apply_chat_template(
                    self._messages(conversation)[:num_messages],
                    tools=conversation.tools,
                    chat_template=self.text,
                    add_generation_prompt=prompts,
                    tokenize=False,
                )
            )

    @contextmanager
    def _naming(self, conversation: Conversation) -> Iterator[None]:
        """Turn what a template raises into an error that names the conversation. A template may do anything wrong."""
        try:
            with alarm(time_limits.SECONDS, _never_ends):
                yield
        except TimeoutError as error:
            raise UserError(
                f"{conversation.place}: the chat template of {self._file} has not written it within "
                f"{time_limits.SECONDS:.0f} s, and was at its line {_line_of_template(error)}; give one that ends: "
                f"--sft-chat-template FILE"
            ) from error
        except Exception as error:
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise UserError(
                f"{conversation.place}: the chat template refuses it ({reason}); correct one of them"
            ) from error


def _with_less(conversation: Conversation) -> Iterator[tuple[str, Conversation]]:
    """(what, the conversation without it or with another one) of all that a template may leave out."""
    messages = conversation.messages
    if conversation.tools:
        yield ": tools", replace(conversation, tools=None)
    for role in dict.fromkeys(message["role"] for message in messages if message["role"] != ANSWERING):
        other = [
            {**message, "content": f"{message['content']}x"} if message["role"] == role else message
            for message in messages
        ]
        yield f": messages of the role {role}", replace(conversation, messages=tuple(other))
    for index, message in enumerate(messages):
        if message.get("tool_calls"):
            plain = {key: value for key, value in message.items() if key != "tool_calls"}
            plain["content"] = plain["content"] or ""
            less = (*messages[:index], plain, *messages[index + 1 :])
            yield f"{_OF_A_MESSAGE}{index + 1}: tool_calls", replace(conversation, messages=less)


def _never_ends() -> float:
    raise TimeoutError


def _line_of_template(error: Exception) -> int | None:
    """The line of a template that raised an error. Jinja gives its frames the lines of the template."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    return lines[-1] if lines else None
