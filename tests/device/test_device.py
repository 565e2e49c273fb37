"""What is set before CUDA starts."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Literal

import pytest
import torch

from fp8_megatron.config.schema import ParallelConfig, Precision
from fp8_megatron.device.device import UnsupportedDeviceError, check_cuda_graph_support, prepare_cuda_environment
from fp8_megatron.sharding import transport as transports
from fp8_megatron.sharding.transport import needs_launch_order, share_rows

TP2 = {"tensor_model_parallel_size": 2}
TP2_SP = {**TP2, "sequence_parallel": True}


@pytest.mark.parametrize(
    ("parallel", "precision", "ordered"),
    [
        ({}, "fp8", False),
        (TP2, "fp8", True),
        (TP2_SP, "fp8", False),
        ({**TP2_SP, "tp_transport": "nccl"}, "fp8", True),
        ({**TP2_SP, "tp_transport": "copy_engine"}, "fp8", False),
        (TP2_SP, "bf16", True),
        ({**TP2_SP, "tensor_model_parallel_size": 4}, "fp8", True),
        ({**TP2_SP, "tensor_model_parallel_size": 4, "tp_transport": "copy_engine"}, "fp8", False),
        ({**TP2_SP, "tensor_model_parallel_size": 8, "tp_transport": "copy_engine"}, "fp8", True),  # two nodes
    ],
)
def test_nccl_between_tensor_parallel_ranks_needs_the_launch_order(
    monkeypatch: pytest.MonkeyPatch, parallel: dict, precision: Precision, ordered: bool
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert needs_launch_order(ParallelConfig(**parallel), precision) == ordered


@pytest.mark.parametrize("records_graphs", [False, True])
@pytest.mark.parametrize("transport", ["auto", "nccl", "copy_engine"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_recorded_steps_let_copy_engines_serve_four_ranks(
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    transport: Literal["auto", "nccl", "copy_engine"],
    records_graphs: bool,
) -> None:
    """The launch queues and what is shared between ranks go together."""
    shared: list[object] = []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(transports, "_copies", lambda *_: True)
    monkeypatch.setattr(transports.row_exchange, "share_memory", lambda group, device: shared.append(group))
    parallel = ParallelConfig(tensor_model_parallel_size=size, sequence_parallel=True, tp_transport=transport)
    group = SimpleNamespace()
    share_rows(parallel, group, torch.device("cpu"), records_graphs=records_graphs)  # type: ignore[arg-type]
    most = {"auto": 4 if records_graphs else 2, "nccl": 0, "copy_engine": 8}[transport]
    assert shared == ([group] if size <= most else [])
    assert needs_launch_order(parallel, "fp8", records_graphs=records_graphs) == (size > most)
    assert needs_launch_order(parallel, "bf16", records_graphs=records_graphs)


@pytest.mark.parametrize(("ordered", "expected"), [(False, "32"), (True, "1")])
def test_launch_queues_by_layout(monkeypatch: pytest.MonkeyPatch, ordered: bool, expected: str) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "x")  # so that it is put back
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    assert prepare_cuda_environment(needs_launch_order=ordered) is None
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == expected


@pytest.mark.parametrize(("ordered", "warns"), [(False, True), (True, False)])
def test_the_users_choice_stays(monkeypatch: pytest.MonkeyPatch, ordered: bool, warns: bool) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    warning = prepare_cuda_environment(needs_launch_order=ordered)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert (warning is not None and "CUDA_DEVICE_MAX_CONNECTIONS is 1" in warning) == warns


@pytest.mark.parametrize(("chosen", "expected"), [(None, "0"), ("1", "1")])
def test_recorded_collectives_are_not_registered(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None, expected: str
) -> None:
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", chosen or "x")
    if chosen is None:
        monkeypatch.delenv("NCCL_GRAPH_REGISTER")
    prepare_cuda_environment(needs_launch_order=False)
    assert os.environ.get("NCCL_GRAPH_REGISTER") == chosen
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    warning = prepare_cuda_environment(needs_launch_order=False, records_graphs=True)
    assert os.environ["NCCL_GRAPH_REGISTER"] == expected
    warns = warning is not None and warning.startswith("NCCL_GRAPH_REGISTER is 1: a recorded step may hang")
    assert warns == (chosen == "1")


def test_a_cpu_records_no_graph() -> None:
    with pytest.raises(UnsupportedDeviceError, match="--cuda-graph-impl local needs a GPU, and there is none here"):
        check_cuda_graph_support(torch.device("cpu"))
