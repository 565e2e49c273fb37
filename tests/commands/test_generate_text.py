"""Flags of fp8-megatron generate: a prompt or a number that no run can use is one line, before torch is imported."""

from __future__ import annotations

import pytest

from fp8_megatron.commands import generate_text


def test_a_terminal_does_not_obey_generated_text() -> None:
    text = "a\x1b[31mb\r\x07\tc\nd \u00a0é\u200d\x9b"
    assert generate_text._without_controls(text) == "a\\x1b[31mb\\r\\x07\tc\nd \u00a0é\u200d\\x9b"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--prompt", "\udc80"), r"argument --prompt: '\udc80' is not UTF-8 at character 0"),
        (("--num-tokens", "0"), "argument --num-tokens: 0 is out of range; give 1 to"),
        (("--num-tokens", "99999999999"), "argument --num-tokens: 99999999999 is out of range"),
        (("--temperature", "nan"), "argument --temperature: nan is out of range; give"),
        (("--temperature", "-1"), "argument --temperature: -1 is out of range; give 0, or 1e-06 or more and"),
        (("--temperature", "1e-320"), "argument --temperature: 1e-320 is out of range; give 0, or 1e-06 or more and"),
        (("--top-k", "0"), "argument --top-k: 0 is out of range; give 1 to"),
        (("--temperature", "0", "--top-k", "5"), "--top-k 5: --temperature 0 draws nothing; leave one of them out"),
        (("--temperature", "0", "--seed", "0"), "--seed 0: --temperature 0 draws nothing; leave one of them out"),
        (("--seed", "-1"), "argument --seed: -1 is out of range; give 0 to 4294967295"),
        (("--load", ""), "argument --load: the text is empty"),
        (("--load", "runs/a"), "argument --load: runs/a does not exist; check the path"),
    ],
)
def test_bad_flags_are_one_line(capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        generate_text.main(["--load", ".", "--prompt", "a", *flags])
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ") and message in line
