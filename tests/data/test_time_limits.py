"""What never ends, ends: templates and tokenizers that others wrote, in Python and in native code."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from fp8_megatron.data import time_limits
from fp8_megatron.data.sft_conversations import conversations_of
from fp8_megatron.data.sft_template import ChatTemplate
from fp8_megatron.data.transformers_tokenizer import HuggingFaceTokenizer
from fp8_megatron.errors import UserError
from tests.harness.chat_tokenizer import CHATML, save_chat_tokenizer, talk, write_lines

pytest.importorskip("transformers")

#: Run in a process of its own, which is killed. Arguments: tokenizer, conversations.
_HOSTILE = """
import sys
from pathlib import Path
from fp8_megatron.data import time_limits, transformers_tokenizer
from fp8_megatron.data.sft_encoding import ConversationEncoding, encode_all
transformers_tokenizer._LOADING_SECONDS = 2.0 if sys.argv[3] == "load" else 300.0
time_limits.SECONDS = 1.0
if sys.argv[3] == "conversation":
    print(list(encode_all(sys.argv[2], ConversationEncoding(sys.argv[1]))))
tokenizer = transformers_tokenizer.HuggingFaceTokenizer(sys.argv[1])
print("loaded", flush=True)
tokenizer.encode_batch(["fine", "q"])
"""
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def hostile_tokenizer(folder: Path, letter: str, *, adds: bool = False) -> str:
    """A tokenizer whose normaliser doubles a letter again and again. `adds`: one of its own tokens has the letter."""
    model = Path(save_chat_tokenizer(folder))
    file = model / "tokenizer.json"
    content = json.loads(file.read_text())
    double = {"type": "Replace", "pattern": {"String": letter}, "content": 2 * letter}
    content["normalizer"] = {"type": "Sequence", "normalizers": [double] * 60}
    if adds:
        last = max(token["id"] for token in content["added_tokens"])
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
        content["added_tokens"].append({"id": last + 1, "content": f"[{letter}]", **flags})
    file.write_text(json.dumps(content))
    return str(model)


@pytest.mark.parametrize("where", ["load", "text", "conversation"])
def test_a_tokenizer_that_never_ends_is_named_and_its_process_ends(tmp_path: Path, where: str) -> None:
    """Native code: while it loads it holds Python's lock, so that no thread of the process can act."""
    model = hostile_tokenizer(tmp_path / "tokenizer", "q", adds=where == "load")
    lines = write_lines(tmp_path / "a.jsonl", [talk("fine", "yes"), talk("q", "no")])
    command = [sys.executable, "-c", _HOSTILE, model, lines, where]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert ("loaded" in done.stdout) == (where == "text")
    place = f"{lines}:2: " if where == "conversation" else ""
    assert f"error: {place}the tokenizer {model} has not ended within 2 s" in done.stderr.replace("1 s", "2 s")


def test_a_watched_process_that_is_done_leaves_no_other_behind() -> None:
    started = time.monotonic()
    with time_limits.watched() as give:
        give(0.1, "the first")
        give(60.0, "the\nlast")
        time.sleep(0.3)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    "loops",
    [LOOPS, "{% macro m(n) %}{% for i in range(9999) %}{{ m(n) }}{% endfor %}{% endmacro %}\n" + LOOPS],
    ids=["loops", "second line"],
)
@pytest.mark.parametrize("marks", [False, True], ids=["compared", "marked"])
def test_a_template_that_never_ends_is_an_error_with_its_line_and_the_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loops: str, marks: bool
) -> None:
    monkeypatch.setattr(time_limits, "SECONDS", 0.5)
    tokenizer = HuggingFaceTokenizer(save_chat_tokenizer(tmp_path))
    answer = "{% generation %}{{ messages[1].content }}{% endgeneration %}" if marks else CHATML
    (conversation,) = conversations_of(json.dumps(talk("a", "b")).encode(), "x.jsonl:7")
    line = 1 + loops.count("\n")
    with pytest.raises(
        UserError, match=rf"x.jsonl:7: the chat template of t.jinja has not written it .*, and was at its line {line};"
    ):
        ChatTemplate(tokenizer, loops + answer, file="t.jinja").encode(conversation)


def test_an_alarm_rings_again_and_gives_back_the_one_before_it() -> None:
    rings: list[float] = []

    def ring() -> float:
        rings.append(time.monotonic())
        if len(rings) == 3:
            raise TimeoutError("three")
        return 0.05

    def earlier(*_: object) -> None:
        rings.append(0.0)

    before = signal.getsignal(signal.SIGALRM), signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        signal.signal(signal.SIGALRM, earlier)
        signal.setitimer(signal.ITIMER_REAL, 0.4)
        with pytest.raises(TimeoutError, match="three"), time_limits.alarm(0.05, ring):
            time.sleep(30)
        assert len(rings) == 3
        deadline = time.monotonic() + 10
        while len(rings) < 4 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert rings[3:] == [0.0], "the alarm of before"
    finally:
        signal.signal(signal.SIGALRM, before[0])
        signal.setitimer(signal.ITIMER_REAL, *before[1])


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['os'].system('touch ran') }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{% include 'tokenizer.json' %}",
        "{% import 'os' as os %}",
        "{{ range(10 ** 9) | list }}",
        "{{ cycler.__init__.__globals__.os.system('touch ran') }}",
    ],
)
def test_a_template_reaches_neither_python_nor_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: str
) -> None:
    """transformers runs templates in Jinja's sandbox."""
    monkeypatch.chdir(tmp_path)
    tokenizer = HuggingFaceTokenizer(save_chat_tokenizer(tmp_path))
    (conversation,) = conversations_of(json.dumps(talk("a", "b")).encode(), "x.jsonl:7")
    with pytest.raises(UserError, match=r"x.jsonl:7: the chat template refuses it"):
        ChatTemplate(tokenizer, attack + CHATML).encode(conversation)
    assert not (tmp_path / "ran").exists()


def test_code_in_a_tokenizers_folder_is_not_run(tmp_path: Path) -> None:
    folder = Path(save_chat_tokenizer(tmp_path))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}, "tokenizer_class": "Own"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "own.py").write_text(
        f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\nclass Own: pass\n"
    )
    with suppress(UserError):
        HuggingFaceTokenizer(str(folder))
    assert not (tmp_path / "ran").exists()
