"""What --help shows: where to start, then every flag once, with its default said once."""

from __future__ import annotations

import dataclasses
import re

import pytest

from fp8_megatron.config.fields import FieldType, field_types
from fp8_megatron.config.io import parse_config
from fp8_megatron.config.schema import Config

FIELDS: dict[str, tuple[FieldType, object]] = {
    name: (kind, getattr(getattr(Config(), section.name), name))
    for section in dataclasses.fields(Config)
    for name, kind in field_types(type(getattr(Config(), section.name))).items()
}


@pytest.fixture
def text(capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit_info:
        parse_config(["--help"], prog="train")
    assert exit_info.value.code == 0
    return capsys.readouterr().out


def entries(text: str) -> dict[str, str]:
    """Flag → its entry, a flag's line and what is indented under it."""
    found: dict[str, str] = {}
    flag = ""
    for line in text[text.index("  -h, --help") :].splitlines():
        if re.match(r"  --\w", line):
            flag = line.split()[0]
            assert flag not in found, f"{flag} is listed twice"
            found[flag] = line.strip()
        elif flag and "{" in found[flag] and "}" not in found[flag]:
            found[flag] += line.strip()  # choices that need more than a line
        elif flag and line.startswith("     "):
            found[flag] += " " + line.strip()
        else:
            flag = ""
    return found


def test_it_begins_with_an_example_and_where_to_read_on(text: str) -> None:
    head = text[: text.index("-h, --help")]
    assert "train --config configs/gpt_345m.yaml --mock-data --train-iters 20" in head
    assert "configs/fast.yaml" in head and "docs/" in head


def test_data_and_training_come_before_the_internals_of_precision(text: str) -> None:
    titles = re.findall(r"^\s+(\w+) options\s*$", text, flags=re.MULTILINE)
    assert titles == "model data training optimizer checkpoint logging parallel precision profile".split()
    flags = list(entries(text))
    assert flags.index("--fp8-recipe") < flags.index("--exp-avg-dtype")


def test_every_field_is_one_flag_in_one_form(text: str) -> None:
    """A switch in the form that changes its default."""
    forms = {
        "--" + ("no-" if default is True else "") + name.replace("_", "-") for name, (_, default) in FIELDS.items()
    }
    assert set(entries(text)) == {*forms, "--config", "--bf16", "--fp16", "--dry-run", "--world-size"}


def test_a_default_is_said_once(text: str) -> None:
    for flag, entry in entries(text).items():
        assert len(re.findall(r"\(default: |Default: ", entry)) <= 1, entry
        assert not re.search(r"\(default: (none|True|False)?\)", entry), entry
        default = FIELDS.get(flag[2:].replace("-", "_"), (None, None))[1]
        if isinstance(default, int | float) and not isinstance(default, bool):
            assert re.search(rf"\(default:\s+{re.escape(str(default))}\)", entry), entry


def test_a_flag_shows_the_choices_that_it_takes_and_no_others(text: str) -> None:
    shown = {flag: re.search(r"{(.*?)}", entry.split(" ", 2)[1]) for flag, entry in entries(text).items()}
    for name, (kind, _) in FIELDS.items():
        if kind.choices:
            match = shown["--" + name.replace("_", "-")]
            assert match is not None and match[1].split(",") == list(kind.choice_names), name
    assert "{fp32,bf16,fp16,fp8,split}" in entries(text)["--main-params-dtype"]


def test_readable_metavars(text: str) -> None:
    for line in ("--ffn-hidden-size INT", "--data-path STR [STR ...]", "--save STR", "--config FILE.yaml"):
        assert line in text
    assert "{None" not in text
