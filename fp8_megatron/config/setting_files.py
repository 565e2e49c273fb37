"""YAML files of settings: plain YAML 1.2 scalars, no tags, bounded in size and depth.

Also files with the words of --data-path and its like, where those are too many for a command line.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from .checks import ConfigError
from .schema import DataConfig
from .words import shortened

# YAML 1.2's plain scalars. PyYAML reads YAML 1.1, where 3e-4 is a string, off is false and 1:30 is 90.
_PLAIN_SCALARS = {
    None: [
        ("tag:yaml.org,2002:null", re.compile(r"(?:~|null|Null|NULL|)\Z")),
        ("tag:yaml.org,2002:bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z")),
        ("tag:yaml.org,2002:int", re.compile(r"[-+]?(?:0|[1-9][0-9]*)\Z")),
        ("tag:yaml.org,2002:float", re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z")),
        ("tag:yaml.org,2002:float", re.compile(r"(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z")),
    ]
}

#: Bytes and depth of a file of settings; the longest that this project writes has 5,000 bytes and 2 levels.
_MOST_BYTES = 1_000_000
_MOST_LEVELS = 20
_SPLITS = ("train", "valid", "test")

#: The repository's configs/, which an installed package brings along.
_CONFIGS = Path(__file__).parents[1] / "configs"


class Dumper(yaml.SafeDumper):
    """Quotes every string that YAML 1.1 or 1.2 would read as something else."""

    yaml_implicit_resolvers = {**yaml.SafeDumper.yaml_implicit_resolvers, **_PLAIN_SCALARS}  # noqa: RUF012


class _Loader(yaml.SafeLoader):
    """Reads YAML 1.2 scalars. A duplicate key is an error."""

    yaml_implicit_resolvers = _PLAIN_SCALARS

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key '{key_node.value}' is given twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


def read_mapping(path: str | Path) -> Mapping[Any, Any]:
    """The mapping that a YAML file holds; empty if the file is.

    ``configs/NAME.yaml`` is the package's own file where the working folder has none of this name.

    Raises:
        ConfigError: the file cannot be read, is too large, is not YAML, has a tag, or holds something else.
    """
    text = _read_text(path)
    try:
        _check_events(text)
        content = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        reason = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ConfigError(f"{path}{where}: not valid YAML: {reason}") from error
    except ValueError as error:  # a number of more digits than Python reads
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path}: holds a {type(content).__name__}; expected a mapping such as 'num_layers: 24'")
    return content


def _read_text(path: str | Path) -> str:
    if not str(path).strip():
        raise ConfigError("--config is empty (an unset shell variable?); give a file, or leave it out")
    try:
        found = _found(Path(path))
        is_file = stat.S_ISREG(found.stat().st_mode)
        content = b""
        if is_file:
            with found.open("rb") as file:
                content = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        reason = getattr(error, "strerror", None) or error
        own = f"{Path(path).stem}.yaml"
        fix = f"did you mean configs/{own}?" if own in (each.name for each in _CONFIGS.iterdir()) else "check --config"
        raise ConfigError(f"{path}: cannot read the configuration file: {reason}; {fix}") from error
    if not is_file:
        raise ConfigError(f"{path}: --config takes files, which every rank reads again; this is none")
    if len(content) > _MOST_BYTES:
        raise ConfigError(f"{path}: has more than {_MOST_BYTES:,} bytes; give a file of settings to --config")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8 text; check --config") from error


def _found(path: Path) -> Path:
    """`path`, or the package's file that it names."""
    own = _CONFIGS.joinpath(*path.parts[1:])
    is_own = path.parts[:1] == (_CONFIGS.name,) and ".." not in path.parts and not path.exists() and own.is_file()
    return own if is_own else path


def _check_events(text: str) -> None:
    """Check depth and tags before the recursive reader sees the file."""
    level = 0
    for event in yaml.parse(text, Loader=_Loader):
        tag = getattr(event, "tag", None)
        level += isinstance(event, yaml.CollectionStartEvent)
        level -= isinstance(event, yaml.CollectionEndEvent)
        problem = f"settings have no tags; leave out {tag}" if tag is not None else None
        if level > _MOST_LEVELS:
            problem = f"nested deeper than {_MOST_LEVELS} levels"
        if problem is not None:
            raise yaml.constructor.ConstructorError(None, None, problem, event.start_mark)  # type: ignore[arg-type]


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
