"""Conversations as tokens: transformers' ids, and a mask over the answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fp8_megatron.data.sft_conversations import FORMATS, check_conversation_file, conversations_of, template_text
from fp8_megatron.data.sft_template import ChatTemplate
from fp8_megatron.data.transformers_tokenizer import HuggingFaceTokenizer
from fp8_megatron.errors import UserError
from tests.harness.chat_tokenizer import CHATML, MARKED_CHATML, save_chat_tokenizer, talk, write_lines

pytest.importorskip("transformers")

#: Two turns. Answers hold characters of several bytes, and look like what a template writes.
TALK = talk("Grüße?", "ja 😀\nassistant", "and\n", "user", system="Be brief.")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(save_chat_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def encoded(tokenizer: HuggingFaceTokenizer, template: str | None, content: Any = TALK) -> tuple[list[int], str]:
    """(ids, the answers' text) of a line's only conversation."""
    (conversation,) = conversations_of(json.dumps(content).encode(), "x.jsonl:7")
    ids, is_answer = ChatTemplate(tokenizer, template).encode(conversation)
    return ids.tolist(), tokenizer.decode(ids[is_answer].tolist())


def test_ids_are_those_of_transformers_and_answers_end_with_their_end(tokenizer: HuggingFaceTokenizer) -> None:
    theirs = tokenizer.backend.apply_chat_template(TALK["messages"], return_dict=True)["input_ids"]
    ids, answers = encoded(tokenizer, None)
    # The template does not write <|endoftext|>, which the tokenizer's documents end with.
    assert ids == [*theirs, tokenizer.eod]
    assert answers == "ja 😀\nassistant<|im_end|>\nuser<|im_end|>\n<|endoftext|>"


def test_marked_and_compared_answers_are_the_same(tokenizer: HuggingFaceTokenizer) -> None:
    assert encoded(tokenizer, MARKED_CHATML) == encoded(tokenizer, CHATML)


def test_a_written_end_is_not_written_twice(tokenizer: HuggingFaceTokenizer) -> None:
    ends = CHATML.replace("<|im_end|>\\n", "<|endoftext|>")
    ids, answers = encoded(tokenizer, ends)
    assert ids.count(tokenizer.eod) == len(TALK["messages"]) and ids[-1] == tokenizer.eod
    assert answers == "ja 😀\nassistant<|endoftext|>user<|endoftext|>"


def test_the_mask_is_transformers_where_a_token_crosses_a_border(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(save_chat_tokenizer(tmp_path), special_tokens=(": a", "b\n"))
    template = (
        "{% for m in messages %}{{ m['role'] + ': ' }}{% if m['role'] == 'assistant' %}{% generation %}"
        "{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{{ '\n' }}{% endfor %}"
    )
    content = talk("ab", "ab", "b", "a c b")
    (conversation,) = conversations_of(json.dumps(content).encode(), "x.jsonl:7")
    ids, is_answer = ChatTemplate(tokenizer, template).encode(conversation)
    theirs = tokenizer.backend.apply_chat_template(
        content["messages"], chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    assert ids.tolist() == [*theirs["input_ids"], tokenizer.eod]
    assert is_answer.tolist() == [*map(bool, theirs["assistant_masks"]), True]
    assert tokenizer.decode(ids[is_answer].tolist()) == ": ab\n: a c b\n<|endoftext|>"


@pytest.mark.parametrize("template", [CHATML, MARKED_CHATML])
def test_an_end_behind_a_question_is_no_answer(tokenizer: HuggingFaceTokenizer, template: str) -> None:
    ids, answers = encoded(tokenizer, template, talk("q", "a", "and?"))
    assert ids[-1] == tokenizer.eod and answers == "a<|im_end|>\n"


@pytest.mark.parametrize(
    ("name", "text", "answers"),
    [
        ("identity", "Be  /think.q a q2 a2", " a  a2"),
        (
            "nemotron-h-aligned",
            "<SPECIAL_10>System\nBe  /think.\n<SPECIAL_11>User\nq\n<SPECIAL_11>Assistant\na\n"
            "<SPECIAL_11>User\nq2\n<SPECIAL_11>Assistant\na2\n",
            "a\na2\n",
        ),
        (
            "nemotron-nano-v2",
            "<SPECIAL_10>System\nBe  .\n<SPECIAL_11>User\nq\n<SPECIAL_11>Assistant\na\n<SPECIAL_12>\n"
            "<SPECIAL_11>User\nq2\n<SPECIAL_11>Assistant\na2\n<SPECIAL_12>\n",
            "a\n<SPECIAL_12>\na2\n<SPECIAL_12>\n",
        ),
    ],
)
def test_formats_of_megatron(tokenizer: HuggingFaceTokenizer, name: str, text: str, answers: str) -> None:
    content = talk("q", " a ", "q2", " a2", system="Be  /think.")
    ids, found = encoded(tokenizer, FORMATS[name], content)
    assert tokenizer.decode(ids) == text + "<|endoftext|>" and found == answers + "<|endoftext|>"


def test_tools_and_further_keys_reach_the_template(tokenizer: HuggingFaceTokenizer) -> None:
    template = (
        "{{ tools[0]['name'] }}{% for m in messages %}{{ '|' + m['role'] + ':' }}{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] or m['tool_calls'][0]['name'] }}{% endgeneration %}{% else %}"
        "{{ m['content'] }}{% endif %}{% endfor %}"
    )
    messages = [
        {"role": "user", "content": "3+4?"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "Seven."},
    ]
    ids, answers = encoded(tokenizer, template, {"messages": messages, "tools": [{"name": "add"}]})
    assert tokenizer.decode(ids) == "add|user:3+4?|assistant:add|tool:7|assistant:Seven.<|endoftext|>"
    assert answers == "addSeven.<|endoftext|>"


def test_a_weight_that_the_template_does_not_read_is_refused(tokenizer: HuggingFaceTokenizer) -> None:
    content = talk("q", "bad", "q", "good")
    content["messages"][1]["weight"] = 0
    content["messages"][3]["weight"] = 1
    for template in (CHATML, MARKED_CHATML):
        with pytest.raises(UserError, match=r"x.jsonl:7, message 2: weight 0 has no effect.*\{% generation %\}"):
            encoded(tokenizer, template, content)
    reads = MARKED_CHATML.replace("== 'assistant'", "== 'assistant' and message['weight'] != 0")
    assert encoded(tokenizer, reads, content)[1] == "good<|im_end|>\n<|endoftext|>"
    content["messages"][1]["weight"] = 1
    assert encoded(tokenizer, CHATML, content)[1] == "bad<|im_end|>\ngood<|im_end|>\n<|endoftext|>"


USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}


@pytest.mark.parametrize(
    ("writes", "text"),
    [
        # As DeepSeek's templates
        ("{% if m['content'] is none %}{{ calls }}{% else %}{{ m['content'] + calls }}{% endif %}", "q[add]"),
        ("{{ calls }}{% if m.content is not none %}{{ ':' + m.content }}{% endif %}", "q[add]"),
        # As GLM's
        ("{{ m.content }}{{ calls }}", "q[add]"),
    ],
)
def test_null_beside_calls_is_no_text(tokenizer: HuggingFaceTokenizer, writes: str, text: str) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% set calls = '[' + m.tool_calls[0].name + ']' %}"
        f"{{% generation %}}{writes}{{% endgeneration %}}{{% else %}}{{{{ m.content }}}}{{% endif %}}{{% endfor %}}"
    )
    ids, answers = encoded(tokenizer, template, {"messages": [{"role": "user", "content": "q"}, CALL]})
    assert tokenizer.decode(ids) == f"{text}<|endoftext|>" and answers == "[add]<|endoftext|>"


@pytest.mark.parametrize("marks", [False, True], ids=["compared", "marked"])
@pytest.mark.parametrize(
    ("content", "what"),
    [
        ({"messages": [USER, {**ANSWER, "tool_calls": [{"name": "add"}]}]}, ", message 2: tool_calls:"),
        ({"messages": [USER, CALL, {"role": "tool", "content": "7"}, ANSWER]}, ": messages of the role tool:"),
        ({"messages": [{"role": "developer", "content": "d"}, USER, ANSWER]}, ": messages of the role developer:"),
        ({"messages": [{"role": "system", "content": "s"}, USER, ANSWER]}, ": messages of the role system:"),
        ({"messages": [USER, ANSWER], "tools": [{"name": "add"}]}, ": tools:"),
    ],
    ids=lambda value: value.strip(", :") if isinstance(value, str) else "",
)
def test_what_a_template_leaves_out_is_named(
    tokenizer: HuggingFaceTokenizer, content: dict[str, Any], what: str, marks: bool
) -> None:
    begin, end = ("{% generation %}", "{% endgeneration %}") if marks else ("", "")
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ 'U' + m.content }}{% elif m.role == 'assistant' %}A"
        f"{begin}{{{{ m.content or 'c' }}}}{end}{{% endif %}}{{% endfor %}}"
        "{% if add_generation_prompt %}A{% endif %}"
    )
    with pytest.raises(UserError, match=rf"x.jsonl:7{what} the chat template of .* does not write them; remove them"):
        encoded(tokenizer, template, content)
    assert encoded(tokenizer, template, {"messages": [USER, ANSWER], "tools": []})[1] == "a<|endoftext|>"


def test_calls_and_tools_that_a_template_writes_are_taken(tokenizer: HuggingFaceTokenizer) -> None:
    template = (
        "{{ tools[0].name }}{% for m in messages %}{{ m.role + m.content|default('') }}"
        "{{ (m.tool_calls or [{'name': ''}])[0].name + '|' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    content = {"messages": [USER, CALL, {"role": "tool", "content": "7"}, ANSWER], "tools": [{"name": "add"}]}
    assert encoded(tokenizer, template, content)[1] == "add|a|<|endoftext|>"


def test_a_system_message_starts_another_conversation() -> None:
    one, two = talk("a", "b", system="s"), talk("c", "d", system="t")
    line = json.dumps({"messages": one["messages"] + two["messages"]}).encode()
    assert [list(part.messages) for part in conversations_of(line, "x:1")] == [one["messages"], two["messages"]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"messages": [', "x.jsonl:7: not JSON .*correct the line"),
        ("[1]", 'x.jsonl:7: no "messages"; write'),
        ({"text": "a"}, 'x.jsonl:7: no "messages"; write'),
        ({"messages": []}, 'x.jsonl:7: no "messages"; write'),
        ({"messages": ["a"]}, "x.jsonl:7, message 1: str, not"),
        (
            {"messages": [USER, {"role": "bot", "content": "a"}]},
            "message 2: role 'bot' is unknown; give system,",
        ),
        ({"messages": [USER, {"role": "assistant"}]}, "message 2: content is missing, not a string"),
        ({"messages": [{"role": "user", "content": [{"text": "q"}]}, ANSWER]}, "message 1: content is list, not a str"),
        ({"messages": [USER, {"role": "assistant", "content": " \n"}]}, "message 2: the answer is empty; write one"),
        ({"messages": [USER]}, "x.jsonl:7: no message of the assistant"),
        ({"messages": [ANSWER]}, "x.jsonl:7: the first message is the assistant's"),
        ({"messages": [USER, ANSWER], "tools": "add"}, '"tools" is str, not a list'),
        ({"messages": [USER, {"role": "assistant", "content": "\ud800"}]}, "message 2: not UTF-8"),
        ({"messages": [USER, ANSWER], "tools": [{"name": "\ud800"}]}, "x.jsonl:7, tools: not UTF-8"),
    ],
)
def test_a_bad_line_is_named(content: Any, message: str) -> None:
    line = content if isinstance(content, str) else json.dumps(content)
    with pytest.raises(UserError, match=message):
        conversations_of(line.encode(), "x.jsonl:7")


def test_a_template_that_does_not_fit_is_named(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    forgets = (
        "{% for m in messages %}{% if m['role'] == 'user' or loop.last %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    with pytest.raises(UserError, match=r"x.jsonl:7, message 3: .* writes this answer otherwise .*--sft-chat-template"):
        encoded(tokenizer, forgets)
    with pytest.raises(UserError, match=r"x.jsonl:7: the chat template refuses it \(no system\)"):
        encoded(tokenizer, "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}")
    with pytest.raises(UserError, match=r"x.jsonl:7: the chat template marks no answer"):
        encoded(tokenizer, "{% if false %}{% generation %}{% endgeneration %}{% endif %}{{ messages[0]['content'] }}")
    bare = HuggingFaceTokenizer(save_chat_tokenizer(tmp_path / "bare", template=None))
    with pytest.raises(UserError, match=r"bare has no chat template; give one as a file: --sft-chat-template"):
        ChatTemplate(bare)
    with pytest.raises(UserError, match=r"--sft-chat-template .*none.jinja cannot be read"):
        template_text("default", str(tmp_path / "none.jinja"))
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / "own.jinja").write_text("mine ü", encoding=encoding)
        assert template_text("default", str(tmp_path / "own.jinja")) == "mine ü"
    assert template_text("default", None) is None


def test_a_path_of_another_kind_is_named(tmp_path: Path) -> None:
    check_conversation_file(write_lines(tmp_path / "a.jsonl", [TALK]))
    (tmp_path / "tokens.bin").write_bytes(b"0")
    for name, message in {
        "tokens": "--sft reads conversations, and .*tokens names token files",
        "none.jsonl": "none.jsonl does not exist",
        "a.txt": "a.txt is plain text",
        "a.csv": "a.csv is of an unknown kind",
    }.items():
        if name.startswith("a."):
            (tmp_path / name).write_text("text")
        with pytest.raises(UserError, match=message):
            check_conversation_file(str(tmp_path / name))
