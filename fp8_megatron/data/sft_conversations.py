"""Conversations of --sft: JSON lines, read and checked, and the chat templates that a flag names. Imports no torch.

Tokens come later (`sft_template`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..errors import UserError
from .documents import JSON_SUFFIXES, check_inputs, is_plain_text

_EACH = "{% for message in messages %}"
_ROLE_IS = "message['role'] =="
_CONTENT = "message['content']"
_QUIET = "replace('/think', '')|replace('/no_think', '')"

#: Megatron's formats by their names in --sft-tokenizer-prompt-format; ``default`` is the tokenizer's own template.
FORMATS = MappingProxyType(
    {
        "identity": f"{_EACH}{{% if {_ROLE_IS} 'assistant' %}}{{% generation %}}{{{{ {_CONTENT} }}}}"
        f"{{% endgeneration %}}{{% else %}}{{{{ {_CONTENT} }}}}{{% endif %}}{{% endfor %}}",
        "nemotron-h-aligned": f"{_EACH}{{% if {_ROLE_IS} 'system' %}}{{{{ '<SPECIAL_10>System\\n' + "
        f"{_CONTENT}|trim + '\\n' }}}}{{% elif {_ROLE_IS} 'user' %}}{{{{ '<SPECIAL_11>User\\n' + {_CONTENT}|trim + "
        f"'\\n<SPECIAL_11>Assistant\\n' }}}}{{% elif {_ROLE_IS} 'assistant' %}}{{% generation %}}"
        f"{{{{ {_CONTENT}|trim + '\\n' }}}}{{% endgeneration %}}{{% endif %}}{{% endfor %}}",
        "nemotron-nano-v2": f"{_EACH}{{% if {_ROLE_IS} 'system' %}}{{{{ '<SPECIAL_10>System\\n' + "
        f"({_CONTENT}|{_QUIET}|trim) + '\\n' }}}}{{% elif {_ROLE_IS} 'user' %}}{{{{ '<SPECIAL_11>User\\n' + "
        f"({_CONTENT}|{_QUIET}|trim) + '\\n' }}}}{{% elif {_ROLE_IS} 'assistant' %}}"
        f"{{{{ '<SPECIAL_11>Assistant\\n' }}}}{{% generation %}}{{{{ {_CONTENT}|trim + '\\n<SPECIAL_12>\\n' }}}}"
        f"{{% endgeneration %}}{{% endif %}}{{% endfor %}}",
    }
)


def template_text(prompt_format: str, file: str | None) -> str | None:
    """The template that --sft-tokenizer-prompt-format or --sft-chat-template names; None: the tokenizer's own.

    Raises:
        UserError: the file cannot be read.
    """
    if file is None:
        return FORMATS.get(prompt_format)
    try:
        return Path(file).read_text(encoding="utf-8-sig")  # a byte order mark would begin each conversation
    except (OSError, ValueError) as error:
        raise UserError(f"--sft-chat-template {file} cannot be read ({error}); give a Jinja template") from error


#: Who may speak. The template says how a role is written, and may know fewer.
ROLES = ("system", "developer", "user", "assistant", "tool")
#: The role whose messages are answers. The loss is taken over them.
ANSWERING = "assistant"

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages that are one document.

    Attributes:
        messages: each with ``role`` and ``content``, and what else its line gives, for the template. The content of
            calls of tools may be None.
        tools: what the answers may call, as JSON schemas; None: nothing.
        place: ``file:line``, for errors.
    """

    messages: tuple[Message, ...]
    tools: list[Any] | None
    place: str


def check_conversation_file(name: str) -> None:
    """Check that a path names a file of JSON lines. Its content is not read.

    Raises:
        UserError: it does not exist, is empty, or is of another kind.
    """
    if Path(f"{name}.bin").is_file() and not Path(name).is_file():
        raise UserError(f"--sft reads conversations, and {name} names token files; give a .jsonl file, or drop --sft")
    check_inputs([name])
    if is_plain_text(name):
        raise UserError(f"--sft reads JSON lines, and {name} is plain text; give {', '.join(JSON_SUFFIXES)}")


def conversations_of(line: bytes, place: str) -> list[Conversation]:
    """The conversations of one line, ``{"messages": [{"role": …, "content": …}, …]}``.

    A system message after others starts another conversation, as in Megatron: a line may hold several.

    Args:
        line: JSON. ``tools`` beside ``messages`` goes to the template.
        place: ``file:line``.

    Raises:
        UserError: no such object, an unknown role, content that is no text, an empty answer, or no answer at all.
    """
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{place}: not JSON ({error.msg} at column {error.colno}); correct the line") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not JSON ({error}); correct the line") from None
    messages = content.get("messages") if isinstance(content, Mapping) else None
    if not isinstance(messages, list) or not messages:
        raise UserError(f'{place}: no "messages"; write {{"messages": [{{"role": "user", "content": "…"}}, …]}}')
    tools = content.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise UserError(f'{place}: "tools" is {type(tools).__name__}, not a list of JSON schemas; correct it')
    _check_utf8(tools, f"{place}, tools")
    checked = [_checked(message, f"{place}, message {number}") for number, message in enumerate(messages, 1)]
    starts = [index for index, message in enumerate(checked) if index == 0 or message["role"] == "system"]
    parts = [tuple(checked[start:end]) for start, end in zip(starts, [*starts[1:], len(checked)], strict=True)]
    for part in parts:
        if all(message["role"] != ANSWERING for message in part):
            raise UserError(f"{place}: no message of the assistant, so there is nothing to learn; remove the line")
        if part[0]["role"] == ANSWERING:
            raise UserError(f"{place}: the first message is the assistant's, with no question before it; remove it")
    return [Conversation(part, tools, place) for part in parts]


def _checked(message: object, place: str) -> Message:
    """A message without its null values, which some templates write as None, but for its content."""
    if not isinstance(message, dict):
        raise UserError(f'{place}: {type(message).__name__}, not {{"role": …, "content": …}}; correct it')
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise UserError(f"{place}: role {role!r} is unknown; give {', '.join(ROLES)}")
    calls = role == ANSWERING and bool(message.get("tool_calls"))
    if not isinstance(content, str) and not (calls and content is None):
        kind = type(content).__name__ if "content" in message else "missing"
        raise UserError(f"{place}: content is {kind}, not a string; write the text itself")
    if role == ANSWERING and not calls and not str(content).strip():
        raise UserError(f"{place}: the answer is empty; write one, or remove the line")
    _check_utf8(message, place)
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def _check_utf8(content: object, place: str) -> None:
    """Raise `UserError` if JSON holds lone surrogates, which no tokenizer takes."""
    try:
        json.dumps(content, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{place}: not UTF-8 ({error.reason}); correct the text") from None
