"""Every variable that is read as a number, a name or a place is checked by one table, and named in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fp8_megatron.device import variables
from fp8_megatron.device.variables import check_variables
from fp8_megatron.errors import UserError

ROOT = Path(__file__).parents[2]
ODD_NUMBERS = ("", "x", "-1", "1.5", "\u0663", "1e3", "9" * 5000)
NUMBERS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_MAX_RESTARTS"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "TORCH_FR_BUFFER_SIZE"),
    *("TORCH_NCCL_TRACE_BUFFER_SIZE", "CUDA_DEVICE_MAX_CONNECTIONS", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
)


@pytest.mark.parametrize("name", NUMBERS)
def test_an_odd_number_is_named_with_its_value(name: str) -> None:
    for value in ODD_NUMBERS:
        with pytest.raises(UserError) as told:
            check_variables({name: value}, on_gpu=True)
        line = str(told.value)
        assert (
            line.startswith(f"the environment variable {name}={value[:50]}") and "is not a whole number from " in line
        )
        assert line.endswith("; correct it, or unset it") and len(line) < 400


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 is not a whole number from 1 to"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0 is not a whole number from 1 to"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0 is not a whole number from 1 to 65535"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999 is not a whole number from 1 to 65535"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR= is no name or address of a machine"),
        ({"MASTER_ADDR": "a b"}, "MASTER_ADDR=a b is no name or address of a machine"),
        ({"MASTER_ADDR": "\x1b[31m"}, r"MASTER_ADDR=\\x1b\[31m is no name or address of a machine"),
        ({"GLOO_SOCKET_IFNAME": "eth77"}, "GLOO_SOCKET_IFNAME=eth77 names no network interface of this machine, .*lo"),
        ({"GLOO_SOCKET_IFNAME": "lo,eth77"}, "GLOO_SOCKET_IFNAME=lo,eth77 names no network interface"),
        ({"NCCL_SOCKET_IFNAME": "eth77"}, "NCCL_SOCKET_IFNAME=eth77 names no network interface"),
        ({"NCCL_SOCKET_IFNAME": "=l"}, "NCCL_SOCKET_IFNAME==l names no network interface"),
        ({"GLOO_DEVICE_TRANSPORT": "x"}, "GLOO_DEVICE_TRANSPORT=x is none of tcp, tcp_tls, uv"),
        ({"TORCH_DISTRIBUTED_DEBUG": "x"}, "TORCH_DISTRIBUTED_DEBUG=x is none of off, info, detail"),
        ({"TORCH_GLOO_LAZY_INIT": "x"}, "TORCH_GLOO_LAZY_INIT=x is none of 0, 1, "),
        ({"TORCHELASTIC_USE_AGENT_STORE": "x"}, "TORCHELASTIC_USE_AGENT_STORE=x is none of true, false"),
        (
            {"TORCHELASTIC_ERROR_FILE": "/no/f"},
            "TORCHELASTIC_ERROR_FILE=/no/f is no file that can be written",
        ),
        ({"TORCHELASTIC_ERROR_FILE": "/tmp"}, "TORCHELASTIC_ERROR_FILE=/tmp is no file that can be written"),
        ({"NCCL_GRAPH_REGISTER": "2"}, "NCCL_GRAPH_REGISTER=2 is none of 0, 1"),
        (
            {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"},
            "LOCAL_RANK=2 and LOCAL_WORLD_SIZE=2 ",
        ),
        ({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE=4 and WORLD_SIZE=2 contradict each other"),
    ],
)
def test_an_odd_value_is_named(variables: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=f"^the environment variables? {said}"):
        check_variables(variables, on_gpu=True)


@pytest.mark.parametrize(
    "right",
    [
        {"MASTER_PORT": "1", "MASTER_ADDR": "fe80::1%eth0", "RANK": "0", "WORLD_SIZE": "1"},
        {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
        {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "^docker,veth", "GLOO_DEVICE_TRANSPORT": "TCP"},
        {"NCCL_SOCKET_IFNAME": "l", "TORCH_FR_BUFFER_SIZE": "0", "LOCAL_RANK": "3"},
    ],
)
def test_right_values_pass(right: dict[str, str]) -> None:
    check_variables(right, on_gpu=True)


def test_what_only_gpus_read_is_not_checked_elsewhere() -> None:
    check_variables({"NCCL_SOCKET_IFNAME": "eth77"})


def test_no_number_is_read_around_the_table() -> None:
    sources = [path for path in (ROOT / "fp8_megatron").rglob("*.py") if path != Path(variables.__file__)]
    assert [path for path in sources if "int(os.environ" in path.read_text()] == []


@pytest.mark.parametrize("variable", ["MASTER_PORT=x", "TORCHELASTIC_ERROR_FILE=x/y", "GLOO_SOCKET_IFNAME=eth77"])
@pytest.mark.parametrize("command", ["pretrain_gpt", "generate_text"])
def test_a_program_ends_with_one_line(command: str, variable: str, tmp_path: Path) -> None:
    name, value = variable.split("=")
    words = ["--mock-data", "--config", "configs/gpt_quickstart.yaml"]
    if command == "generate_text":
        words = ["--load", str(tmp_path), "--prompt", "a"]
    environment = {**os.environ, name: value, "PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-m", "fp8_megatron.cli", "generate", *words]
    if command == "pretrain_gpt":
        program = [sys.executable, "pretrain_gpt.py", *words]
    ended = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1, ended.stderr
    assert ended.stderr.startswith(f"error: the environment variable {variable} ")
