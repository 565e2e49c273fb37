"""Types and ranges of the settings in a ``config.json``. Each problem is one line with the setting, its value and the
fix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..errors import CheckpointError

Json = Mapping[str, Any]
#: Settings, each with the values that are supported, and why no others are.
Allowed = Mapping[str, tuple[tuple[Any, ...], str]]

#: Largest width, number of layers and number of heads. Larger ones fit into no memory.
MAX_WIDTH = 10_000_000
#: Largest vocabulary and context.
MAX_ROWS = 1_000_000_000


def shown(value: Any) -> str:
    """A value in an error, cut if it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def plain(value: Any) -> str:
    """As `shown`; a simple word has no quotes."""
    return value if isinstance(value, str) and value.isidentifier() and len(value) <= 80 else shown(value)


def count(most: int = MAX_WIDTH) -> Callable[[Any], str | None]:
    """A check for a whole number from 1 to `most`: what else is expected, or None."""

    def problem(value: Any) -> str | None:
        fits = type(value) is int and 1 <= value <= most
        return None if fits else f"expected a whole number from 1 to {most}"

    return problem


def number(
    *, least: float = -math.inf, above: float = -math.inf, below: float = math.inf
) -> Callable[[Any], str | None]:
    """A check for a finite number within limits: what else is expected, or None."""
    bounds = [f"of {least:g} or more"] if least > -math.inf else []
    bounds += [f"above {above:g}"] if above > -math.inf else []
    bounds += [f"below {below:g}"] if below < math.inf else []

    def problem(value: Any) -> str | None:
        is_number = type(value) is float or (type(value) is int and abs(value) < 1 << 53)
        fits = is_number and math.isfinite(value) and least <= value < below and value > above
        return None if fits else " ".join(["expected a finite number", " and ".join(bounds)]).strip()

    return problem


def truth(value: Any) -> str | None:
    """A check for true or false: what else is expected, or None."""
    return None if type(value) is bool else "expected true or false"


def mapping(value: Any) -> str | None:
    """A check for an object of JSON: what else is expected, or None."""
    return None if isinstance(value, dict) else "expected an object"


def not_allowed(settings: Json, only: Allowed) -> Iterator[str]:
    """A line for each setting that has another value than the supported ones."""
    for name, (allowed, reason) in only.items():
        if name in settings and settings[name] not in allowed:
            yield f"{name}({plain(settings[name])}) is not supported ({reason}); only {' or '.join(map(str, allowed))}"


def wrong_types(settings: Json, checks: Sequence[tuple[str, Callable[[Any], str | None], bool]]) -> Iterator[str]:
    """A line for each setting whose value has the wrong type or range. Settings that are missing have none.

    Args:
        checks: (setting, its check, whether null stands for the default).
    """
    for name, check, takes_null in checks:
        if name not in settings or (takes_null and settings[name] is None):
            continue
        expected = check(settings[name])
        if expected is not None:
            yield f"{name}({shown(settings[name])}) is wrong: {expected}{' or null' if takes_null else ''}; correct it"


def refuse(problems: Sequence[str]) -> None:
    """Raise `CheckpointError` with a line for each problem, if there is one."""
    if problems:
        raise CheckpointError("\n".join(f"config.json: {problem}" for problem in problems))


def without_aliases(settings: Json, aliases: Mapping[str, str]) -> Json:
    """The settings, each under its own name.

    Args:
        aliases: another name of a setting → its own.

    Raises:
        CheckpointError: a setting has two values.
    """
    own = dict(settings)
    for alias, name in aliases.items():
        if alias in settings and own.setdefault(name, settings[alias]) != settings[alias]:
            raise CheckpointError(
                f"config.json: {alias}({shown(settings[alias])}) contradicts {name}({shown(own[name])}), another name "
                "of the same setting; remove the wrong one"
            )
    return own


def unequal_heads(hidden_size: int, heads: int, groups: int, head_dim: int | None) -> Iterator[str]:
    """A line for each way in which widths and heads do not fit together. The arguments have the right types.

    Args:
        head_dim: None: it is ``hidden_size / heads``.
    """
    if head_dim is None and hidden_size % heads:
        yield f"hidden size({hidden_size}) is no multiple of the number of heads({heads}); correct one of them"
    if heads % groups:
        yield f"num_key_value_heads({groups}) does not divide num_attention_heads({heads}); correct one of them"


def rope_contradictions(settings: Json) -> Iterator[str]:
    """A line for each way in which the settings of RoPE contradict each other or differ between layers. They are
    objects or null.

    Transformers 5 writes ``rope_parameters``. Transformers 4 writes ``rope_scaling`` and ``rope_theta``.
    """
    new, old = settings.get("rope_parameters"), settings.get("rope_scaling")
    if new and old:
        ours, theirs = _plain_rope(new), _plain_rope(old)
        for name in sorted(ours.keys() | theirs.keys()):
            is_in_both = name in ours and name in theirs
            if ours.get(name) != theirs.get(name) and (is_in_both or name != "rope_theta"):
                yield (
                    f"rope_parameters has {name}({shown(ours.get(name))}) and rope_scaling beside it "
                    f"{name}({shown(theirs.get(name))}); remove the wrong one of the two objects"
                )
    for name, nested in (("rope_parameters", new), ("rope_scaling", old)):
        for kind in (kind for kind, value in (nested or {}).items() if isinstance(value, dict)):
            yield f"{name} has settings for {plain(kind)} alone, which is not supported (all layers rotate alike)"
        for setting in ("rope_theta", "original_max_position_embeddings"):
            beside = settings.get(setting)
            if nested and beside is not None and nested.get(setting, beside) != beside:
                yield (
                    f"{setting}({shown(beside)}) contradicts {setting}({shown(nested[setting])}) in {name}; "
                    f"remove the wrong one"
                )


def _plain_rope(nested: Json) -> dict[str, Any]:
    kind = nested.get("rope_type", nested.get("type", "default"))
    return {**{name: value for name, value in nested.items() if name != "type"}, "rope_type": kind}
