"""Files that hold the words of --data-path and its like, where those are too many for a command line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .schema import DataConfig
from .words import shortened

_SPLITS = ("train", "valid", "test")


def words_of_files(data: DataConfig) -> tuple[dict[str, Any], list[str]]:
    """(settings that stand for --data-args-path and --per-split-data-args-path, one line for each problem).

    The former holds the words of --data-path between blanks. The latter is JSON:
    ``{"train": [weight, prefix, …], "valid": …, "test": …}``, each a list or one string.
    """
    settings: dict[str, Any] = {}
    problems: list[str] = []
    if data.data_args_path is not None:
        problems += _both(data, "data_args_path", "data_path")
        words = _read(data.data_args_path, "data_args_path", problems).split()
        if not words and not problems:
            problems.append(
                f"data_args_path({shortened(data.data_args_path)}) is empty; write 'weight prefix …' into it"
            )
        settings = {"data_path": tuple(words), "data_args_path": None}
    if data.per_split_data_args_path is not None:
        for split in _SPLITS:
            problems += _both(data, "per_split_data_args_path", f"{split}_data_path")
        try:
            found = dict(_by_split(_read(data.per_split_data_args_path, "per_split_data_args_path", problems)))
        except (ValueError, RecursionError) as error:
            found = {}
            if not problems:
                problems.append(
                    f"per_split_data_args_path({shortened(data.per_split_data_args_path)}) cannot be read ({error}); "
                    'write {"train": ["weight", "prefix"], "valid": [], "test": []}'
                )
        settings |= {**found, "per_split_data_args_path": None}
    return settings, problems


def _both(data: DataConfig, name: str, other: str) -> Iterator[str]:
    if getattr(data, other):
        given = shortened(" ".join(getattr(data, other)))
        yield f"{name}({shortened(getattr(data, name))}) and {other}({given}) both name the data; drop one"


def _read(path: str, name: str, problems: list[str]) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or shortened(str(error))
        problems.append(
            f"{name}({shortened(path)}) cannot be read ({reason}); give a file with the words of --data-path"
        )
        return ""


def _by_split(text: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    content = json.loads(text)
    if not isinstance(content, Mapping) or not set(content) <= set(_SPLITS) or not content.get("train"):
        raise ValueError("it is no object with train, valid and test")
    for split, words in content.items():
        words = words.split() if isinstance(words, str) else words or []
        if not isinstance(words, list) or not all(isinstance(word, str | int | float) for word in words):
            raise ValueError(f"{split} is no list of words")
        yield f"{split}_data_path", tuple(map(str, words))
