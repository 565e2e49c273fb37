"""--data-args-path and --per-split-data-args-path: files of words that a command line would be too short for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp8_megatron.config.checks import ConfigError
from fp8_megatron.config.io import config_text, load_config, parse_config


def test_a_file_of_words_stands_for_data_path(tmp_path: Path) -> None:
    """Blanks and lines are alike; the saved configuration holds the words, so that the file may go."""
    file = tmp_path / "blend.txt"
    file.write_text("0.3 data/a\n  0.7\tdata/b\n")
    config = parse_config(["--data-args-path", str(file)])
    assert config.data.data_path == ("0.3", "data/a", "0.7", "data/b") and config.data.data_args_path is None
    (tmp_path / "config.yaml").write_text(config_text(config))
    file.unlink()
    assert load_config(tmp_path / "config.yaml") == config


def test_a_json_stands_for_the_paths_of_the_splits(tmp_path: Path) -> None:
    """Lists or strings, as in Megatron; numbers are words; a split may be left out."""
    file = tmp_path / "splits.json"
    file.write_text(json.dumps({"train": [0.3, "data/a", 0.7, "data/b"], "valid": "data/c data/d", "test": None}))
    data = parse_config(["--per-split-data-args-path", str(file)]).data
    assert data.train_data_path == ("0.3", "data/a", "0.7", "data/b")
    assert (data.valid_data_path, data.test_data_path) == (("data/c", "data/d"), ())


def test_a_flag_replaces_the_paths_of_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("data_path: [data/old]")
    (tmp_path / "blend.txt").write_text("data/new")
    words = ["--config", str(tmp_path / "recipe.yaml"), "--data-args-path", str(tmp_path / "blend.txt")]
    assert parse_config(words).data.data_path == ("data/new",)


@pytest.mark.parametrize(
    ("flag", "content", "more", "message"),
    [
        ("--data-args-path", "", "", "is empty; write 'weight prefix …' into it"),
        ("--data-args-path", None, "", "cannot be read (No such file or directory"),
        ("--data-args-path", "data/a", "--data-path data/b", "and data_path(data/b) both name the data; drop one"),
        ("--per-split-data-args-path", "{", "", "cannot be read (Expecting property name"),
        ("--per-split-data-args-path", "[]", "", "it is no object with train, valid and test"),
        ("--per-split-data-args-path", '{"valid": "a"}', "", "it is no object with train, valid and test"),
        ("--per-split-data-args-path", '{"train": [["a"]]}', "", "train is no list of words"),
        ("--per-split-data-args-path", '{"train": "a"}', "--valid-data-path b", "and valid_data_path(b) both name"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    tmp_path: Path, flag: str, content: str | None, more: str, message: str
) -> None:
    file = tmp_path / "file"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError) as error:
        parse_config([flag, str(file), *more.split()])
    assert message in str(error.value) and len(str(error.value).splitlines()) == 1
