"""Environment variables that this package, or torch while ranks meet, reads as numbers, names or places.

One table says what each may be, and one function checks them all.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from ..errors import UserError, printable

#: More ranks, restarts or entries than any run has.
_MOST = 1_000_000
#: Returns what is wrong with a value; None if nothing is.
_Check = Callable[[str], str | None]


def _whole(least: int = 0, most: int = _MOST) -> _Check:
    def check(word: str) -> str | None:
        # The length first: Python refuses to convert very long words.
        is_right = word.isascii() and word.isdecimal() and len(word) < 20 and least <= int(word) <= most
        return None if is_right else f"is not a whole number from {least} to {most}"

    return check


def _one_of(*allowed: str) -> _Check:
    return lambda word: None if word.lower() in allowed else f"is none of {', '.join(allowed)}"


def _or_empty(check: _Check) -> _Check:
    """An empty value counts as none."""
    return lambda word: check(word) if word else None


def _host(word: str) -> str | None:
    is_right = word and word.isprintable() and not any(character.isspace() for character in word)
    return None if is_right else "is no name or address of a machine"


def _gloo_interfaces(word: str) -> str | None:
    """Names, separated by commas."""
    return _no_interface() if set(word.split(",")) - {*_interfaces(), ""} else None


def _nccl_interfaces(word: str) -> str | None:
    """Beginnings of names, separated by commas; whole names after ``=``; those to leave out after ``^``."""
    excludes, exact = word.startswith("^"), word.lstrip("^").startswith("=")
    wanted = [part.partition(":")[0] for part in word.lstrip("^=").split(",")]

    def is_wanted(name: str) -> bool:
        return any(name == want if exact else name.startswith(want) for want in wanted) != excludes

    return None if any(map(is_wanted, _interfaces())) else _no_interface()


def _interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def _no_interface() -> str:
    return f"names no network interface of this machine, which has {', '.join(_interfaces())}"


def _writable_file(word: str) -> str | None:
    folder = Path(word).absolute().parent
    may_write = os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK) and not os.path.isdir(word)
    return None if may_write else "is no file that can be written"


_SWITCH = _one_of("0", "1", "false", "true", "f", "t", "no", "yes", "n", "y")

#: Variables of a launcher, of ranks that meet, and of what watches them.
_VARIABLES: dict[str, _Check] = {
    "RANK": _whole(),
    "WORLD_SIZE": _whole(1),
    "LOCAL_RANK": _whole(),
    "LOCAL_WORLD_SIZE": _whole(1),
    "MASTER_ADDR": _host,
    "MASTER_PORT": _whole(1, 65_535),
    "TORCHELASTIC_MAX_RESTARTS": _whole(),
    "TORCHELASTIC_RESTART_COUNT": _whole(),
    "TORCHELASTIC_USE_AGENT_STORE": _one_of("true", "false"),
    "TORCHELASTIC_ERROR_FILE": _writable_file,
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": _whole(),
    "TORCH_DISTRIBUTED_DEBUG": _one_of("off", "info", "detail"),
    "TORCH_FR_BUFFER_SIZE": _whole(),
    "TORCH_NCCL_TRACE_BUFFER_SIZE": _whole(),
    "TORCH_GLOO_LAZY_INIT": _SWITCH,
    "GLOO_SOCKET_IFNAME": _or_empty(_gloo_interfaces),
    "GLOO_DEVICE_TRANSPORT": _or_empty(_one_of("tcp", "tcp_tls", "uv")),
}
#: What only a GPU's ranks read.
_GPU_VARIABLES: dict[str, _Check] = {
    "NCCL_SOCKET_IFNAME": _or_empty(_nccl_interfaces),
    "CUDA_DEVICE_MAX_CONNECTIONS": _whole(1, 32),
    "NCCL_GRAPH_REGISTER": _one_of("0", "1"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": _whole(0, 3),
    "TORCH_NCCL_BLOCKING_WAIT": _SWITCH,
    "TORCH_NCCL_DUMP_ON_TIMEOUT": _SWITCH,
    "TORCH_NCCL_ENABLE_MONITORING": _SWITCH,
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": _whole(),
}


def check_variables(environment: Mapping[str, str], *, on_gpu: bool = False) -> None:
    """Check every variable of the table, and that ranks fit their worlds.

    Args:
        on_gpu: check those too that only the ranks of GPUs read.

    Raises:
        UserError: it names the variable, its value, and what it may be.
    """
    for name in _VARIABLES | (_GPU_VARIABLES if on_gpu else {}):
        _check(name, environment)
    rank, world = (int(environment.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    local_rank = int(environment.get("LOCAL_RANK", "0"))
    local_world = int(environment.get("LOCAL_WORLD_SIZE", max(world, local_rank + 1)))
    contradictions = {
        f"RANK={rank} and WORLD_SIZE={world}": rank >= world,
        f"LOCAL_RANK={local_rank} and LOCAL_WORLD_SIZE={local_world}": local_rank >= local_world,
        f"LOCAL_WORLD_SIZE={local_world} and WORLD_SIZE={world}": "LOCAL_WORLD_SIZE" in environment
        and local_world > world,
    }
    for values, contradict in contradictions.items():
        if contradict:
            raise UserError(f"the environment variables {values} contradict each other; unset them, or use torchrun")


def number(name: str, default: int) -> int:
    """A variable of the table as a whole number; `default` if it is not set.

    Raises:
        UserError: it is no such number.
    """
    _check(name, os.environ)
    return int(os.environ.get(name, default))


def _check(name: str, environment: Mapping[str, str]) -> None:
    value = environment.get(name)
    if value is not None and (problem := (_VARIABLES | _GPU_VARIABLES)[name](value)) is not None:
        shown = printable(value[:200])
        raise UserError(f"the environment variable {name}={shown} {problem}; correct it, or unset it")
