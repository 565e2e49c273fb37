"""Values of the tools' flags: one line that names the flag, the value and the fix refuses what is out of range."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import ModuleType

import pytest

from fp8_megatron.commands import arguments, merge_datasets, preprocess_data, train_tokenizer

FULL_WIDTH_ONE = "\uff11"
ARABIC_TWO = "\u0662"


@pytest.mark.parametrize(
    "word", ["", "x", "1.0", "1e3", "1__0", FULL_WIDTH_ONE, ARABIC_TWO, " 1", "0", "-1", "9" * 40, str(2**31), "nan"]
)
def test_a_count_takes_plain_digits_within_its_limits(word: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="give 1 to 2147483647"):
        arguments.whole()(word)


@pytest.mark.parametrize("word", ["nan", "inf", "-inf", "1e999", "", "0", "-1", FULL_WIDTH_ONE, "1_0.5", "0x1"])
def test_a_number_is_finite_and_within_its_limits(word: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="give more than 0"):
        arguments.real(above=0)(word)


def test_values_within_the_limits_are_taken() -> None:
    assert [arguments.whole(least=0)(word) for word in ("0", "007", "+3", "1_000")] == [0, 7, 3, 1000]
    assert [arguments.real()(word) for word in ("1e-3", ".5", "-2.", "1_0")] == [1e-3, 0.5, -2.0, 10.0]
    assert arguments.seed("4294967295") == 2**32 - 1


def test_an_empty_path_is_refused_and_an_output_is_tried(tmp_path: Path) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is a variable of the shell unset"):
        arguments.path("")
    with pytest.raises(argparse.ArgumentTypeError, match="NUL"):
        arguments.path("a\0b")
    with pytest.raises(argparse.ArgumentTypeError, match=f"{tmp_path} is a folder"):
        arguments.output_file(str(tmp_path))
    assert arguments.output_folder(str(tmp_path / "a" / "b")) == tmp_path / "a" / "b"
    assert list(tmp_path.iterdir()) == []


def test_an_error_is_one_line_and_a_repeated_flag_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    parser = arguments.Parser(prog="tool")
    parser.add_argument("--steps", type=arguments.whole())
    parser.add_argument("--names", nargs="+")
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--steps", "0"])
    line = capsys.readouterr().err
    assert line.startswith("error: argument --steps: 0 is out of range; give 1 to") and line.count("\n") == 1
    given = parser.parse_args(["--steps", "1", "--names", "a", "b", "--steps=2", "--names", "a", "b"])
    assert (given.steps, given.names) == (2, ["a", "b"])
    arguments.note_repeated_flags(["a", "b"])
    assert capsys.readouterr().err == "note: --steps is given 2 times; the last one counts: --steps 2\n"


@pytest.mark.parametrize(
    ("words", "passes_flags", "said"),
    [
        ("--append_eod", False, "unknown flag --append_eod; did you mean --append-eod?"),
        ("--append-eos=1", False, "unknown flag --append-eos; did you mean --append-eod?"),
        ("--zzz 4", False, "unknown flag --zzz; drop it"),
        ("file", False, "'file' belongs to no flag; put one before it, or drop it"),
        ("-x", False, "'-x' belongs to no flag; put one before it, or drop it"),
        ("--config a.yaml", True, "unknown flag --config; put flags of the run behind --"),
        ("--apend-eod", True, "unknown flag --apend-eod; did you mean --append-eod?"),
    ],
)
def test_a_word_that_belongs_to_no_flag_is_named_with_the_nearest(
    words: str, passes_flags: bool, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = arguments.Parser(prog="tool", passes_flags=passes_flags)
    parser.add_argument("--append-eod", action="store_true")
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(words.split())
    assert capsys.readouterr().err == f"error: {said} (tool --help lists the flags)\n"


def test_an_input_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert arguments.existing(str(tmp_path)) == tmp_path
    with pytest.raises(argparse.ArgumentTypeError, match="nowhere does not exist; check the path"):
        arguments.existing("nowhere")


def test_a_count_without_limits_names_none() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"^'two' is not a whole number; give one$"):
        arguments.whole(least=-arguments.MAX_COUNT)("two")


@pytest.mark.parametrize("word", ["folder/", "/", ".", "..", "folder/..", "folder/."])
@pytest.mark.parametrize(
    "tool", [merge_datasets, preprocess_data, train_tokenizer], ids=lambda tool: tool.__name__[21:]
)
def test_a_prefix_is_no_folder(tool: ModuleType, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    """After a folder the files would be hidden: ``folder/.bin``."""
    with pytest.raises(SystemExit):
        tool.parse_arguments(["--input", "x", "--output-prefix", word])
    assert f"argument --output-prefix: {word} is a folder; add the start of the files' names" in capsys.readouterr().err
    assert tool.parse_arguments(["--input", "x", "--output-prefix", "folder/.x"]).output_prefix == "folder/.x"
