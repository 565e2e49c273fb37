"""Every flag and YAML key with every kind of bad value: one line that names it, or a configuration that can train.

The cases are made from the configuration itself, so a new setting is tried too.
"""

from __future__ import annotations

import dataclasses
import random
import signal
from concurrent.futures import Executor
from functools import partial
from pathlib import Path

import pytest
import yaml

from fp8_megatron import cli
from fp8_megatron.config.checks import ConfigError, check_config
from fp8_megatron.config.fields import FieldType, field_types
from fp8_megatron.config.io import parse_config
from fp8_megatron.config.schema import Config
from tests.harness.forked import Ending, run_forked
from tests.harness.runs import TINY_RUN, tiny_flags

ROOT = Path(__file__).parents[2]
FIELDS: dict[str, FieldType] = {
    name: kind
    for section in dataclasses.fields(Config)
    for name, kind in field_types(type(getattr(Config(), section.name))).items()
}
#: Words that some setting cannot take: of another type, empty, out of range, not finite, not ASCII, unprintable.
WORDS = (
    *("", " ", "0", "-1", "1", "2", "3.5", "-0.0", "1e-400", "1e400", "1e30", "1e308", "nan", "-nan", "inf", "-inf"),
    *("9" * 30, "9" * 5000, "-" + "9" * 400, str(2**31), str(2**32), str(2**63), str(2**64), "0x10", "1_000", "01"),
    *("\uff11\uff12", "\u0663", "½", "é", "日本", "\U0001f600", "\u202e", "\udc80", "a\nb", "a\x1b[31m", "a\0b"),
    *("true", "None", "none", "null", "~", "[]", "{}", "a b", "a,b", "--", "-", "..", "/", "/dev/null", "x" * 5000),
)
#: What YAML reads as other types: lists, maps, booleans, null, nested.
YAML_VALUES = (
    *("true", "null", "[]", "[1]", "[[1]]", "{a: 1}", "[a, {b: c}]", ".nan", ".inf", "-.inf", "1e999", "'1'", "'0'"),
    *("2001-01-01", "!!int 3", "!!python/name:os.system", "&a [*a]", "*a", "[" * 3000, "|\n  text", "? x", "- x"),
    *('"\\ud800"', '"\\0"', '"\\e[1m"', "1:30", "0o7", "off", "'none'", "@x", "`", "%", "\t"),
)

#: Settings that an error may name otherwise.
OTHER_NAMES = {"kv_channels": "head width", "vocab_file": "merge_file", "merge_file": "vocab_file"}
#: What changes the meaning of YAML around it.
SNIPPETS = (b"\t", b"{", b"[", b"&a ", b"*a", b"!!x ", b"\0", b"- ", b": ", b"'", b"\xff")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def base(name: str) -> list[str]:
    """The flags of a tiny run without `name`."""
    return tiny_flags(Path("unused"), **({name: None} if name in TINY_RUN else {}))


def outcome(words: list[str]) -> str | None:
    """What is wrong with a command line, as the user reads it; None if it can train. Any other error fails the test."""
    try:
        check_config(parse_config(words), 1)
    except ConfigError as error:
        return str(error)
    return None


def assert_it_is_told(text: str, name: str) -> None:
    """Each problem is one printable line of bearable length, and one of them names the setting."""
    lines = text.split("\n")
    assert lines and all(line and len(line) < 1000 for line in lines), text
    assert all(character.isprintable() for line in lines for character in line), repr(text)
    assert name in text.replace("-", "_") or OTHER_NAMES.get(name, name) in text, text


@pytest.mark.slow
@pytest.mark.parametrize("name", FIELDS)
def test_every_word_after_every_flag(name: str) -> None:
    """Every fourth word; the next settings have the others."""
    switch, number = FIELDS[name].base is bool, list(FIELDS).index(name)
    for index, word in enumerate(WORDS[number % 4 :: 4]):
        as_one = switch or (index + number // 4) % 2 == 0
        words = [f"{flag(name)}={word}"] if as_one else [flag(name), word]
        said = outcome([*base(name), *words])
        assert said is not None or not switch, words
        if said is not None:
            assert_it_is_told(said, name)
    for words in ([flag(name)], [f"{flag(name)}="], [flag(name), "--log-interval", "1"]):
        said = outcome([*base(name), *words])
        assert switch if said is None else name in said.replace("-", "_"), (words, said)


@pytest.mark.slow
@pytest.mark.parametrize("name", FIELDS)
def test_every_value_of_every_key(name: str, tmp_path: Path) -> None:
    """Every fourth value; the next settings have the others."""
    path = tmp_path / "x.yaml"
    dumped = [yaml.safe_dump(word, allow_unicode=True).split("\n...")[0] for word in WORDS[::2]]
    texts = [f"{name}: {value}\n" for value in (*YAML_VALUES, *dumped)][list(FIELDS).index(name) % 4 :: 4]
    for text in (*texts, f"{name}: 1\n{name}: 1\n", f"? {name}\n", f"{name}:\n  {name}: 1\n"):
        path.write_bytes(text.encode(errors="surrogateescape"))
        said = outcome(["--config", str(path), *base(name)])
        if said is not None:
            assert_it_is_told(said, "x.yaml" if "x.yaml" in said else name)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_bytes_of_a_file_that_are_changed(seed: int, tmp_path: Path) -> None:
    """A file of settings with random bytes changed, left out, doubled or cut off."""
    draw = random.Random(seed)
    content = bytearray((ROOT / "configs" / "gpt_quickstart.yaml").read_bytes())
    for _ in range(draw.randint(1, 8)):
        at = draw.randrange(len(content))
        match draw.randrange(4):
            case 0:
                content[at] = draw.randrange(256)
            case 1:
                del content[at : at + draw.randint(1, 20)]
            case 2:
                content[at:at] = content[at : at + draw.randint(1, 20)]
            case 3:
                content[at:at] = draw.choice(SNIPPETS)
    path = tmp_path / "x.yaml"
    path.write_bytes(bytes(content))
    said = outcome(["--config", str(path)])
    if said is not None:
        assert_it_is_told(said, "")


def sampled(name: str) -> str:
    """A word for a whole run with this setting: one that the checks let through, if there is one."""
    words = [word for word in WORDS if "\0" not in word and outcome([*base(name), f"{flag(name)}={word}"]) is None]
    return random.Random(f"21 {name}").choice(words or ["nonsense"])


def whole_run(forks: Executor, folder: Path, *words: str, seconds: float = 8.0, **overrides: object) -> Ending:
    """A run that does not end by itself is asked to after 8 s; one that must be killed then is in a single step of
    hours, no mistake that a check could name."""
    flags = tiny_flags(folder / "out", **{"train_iters": 2, **overrides})
    limits = {"folder": folder, "seconds": seconds, "more_seconds": 8.0, "address_bytes": 4 << 30}
    return forks.submit(run_forked, partial(cli.main, ["train", "--gpus", "0", *flags, *words]), **limits).result()


@pytest.mark.slow
def test_a_whole_run_of_good_settings_trains(tmp_path: Path, forks: Executor) -> None:
    ending = whole_run(forks, tmp_path, seconds=60.0)
    assert ending.status == 0 and "iter 2/2 | loss" in ending.output, ending


#: Settings that share a run, from all over the list.
NUM_RUNS = -(-len(FIELDS) // 4)
SHARING = [list(FIELDS)[first::NUM_RUNS] for first in range(NUM_RUNS)]


@pytest.mark.slow
@pytest.mark.parametrize("names", SHARING, ids="+".join)
def test_a_whole_run_trains_or_says_why(names: list[str], tmp_path: Path, forks: Executor) -> None:
    """What passes the checks trains, or ends in one line. Settings that the checks refuse together have runs alone."""
    words = {name: f"{flag(name)}={sampled(name)}" for name in names}
    plain = tiny_flags(Path("unused"), **dict.fromkeys(TINY_RUN.keys() & words.keys()))
    together = outcome([*plain, *words.values()]) is None
    for of_run in [names] if together else [[name] for name in names]:
        folder = tmp_path / of_run[0]
        folder.mkdir()
        overrides = dict.fromkeys(TINY_RUN.keys() & set(of_run))
        ending = whole_run(forks, folder, *(words[name] for name in of_run), **overrides)
        assert "Traceback" not in ending.errors and "internal error" not in ending.errors, ending.errors
        assert ending.status in (0, 1, 2, *((None, -signal.SIGTERM) if ending.was_asked else ())), ending
        assert ending.status in (0, None, -signal.SIGTERM) or ending.errors.strip(), ending
