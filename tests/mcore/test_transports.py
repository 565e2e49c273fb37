"""The transports that a configuration asks for, and what they need of the launch order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Literal

import pytest
import torch

from fp8_megatron.config.precision import Precision
from fp8_megatron.config.schema import ParallelConfig
from fp8_megatron.mcore.topology import needs_launch_order, share_rows, transport_choice
from fp8_megatron.sharding import transport

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
    assert needs_launch_order(ParallelConfig(**parallel), has_fp8_layers=precision == "fp8") == ordered


@pytest.mark.parametrize("records_graphs", [False, True])
@pytest.mark.parametrize("wanted", ["auto", "nccl", "copy_engine"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_recorded_steps_let_copy_engines_serve_four_ranks(
    monkeypatch: pytest.MonkeyPatch, size: int, wanted: Literal["auto", "nccl", "copy_engine"], records_graphs: bool
) -> None:
    """The launch queues and what is shared between ranks go together."""
    shared: list[object] = []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(transport, "_copies", lambda *_: True)
    monkeypatch.setattr(transport.row_exchange, "share_memory", lambda group, device: shared.append(group))
    parallel = ParallelConfig(tensor_model_parallel_size=size, sequence_parallel=True, tp_transport=wanted)
    group = SimpleNamespace()
    share_rows(parallel, group, torch.device("cpu"), records_graphs=records_graphs)  # type: ignore[arg-type]
    most = {"auto": 4 if records_graphs else 2, "nccl": 0, "copy_engine": 8}[wanted]
    assert shared == ([group] if size <= most else [])
    assert needs_launch_order(parallel, has_fp8_layers=True, records_graphs=records_graphs) == (size > most)
    assert needs_launch_order(parallel, has_fp8_layers=False, records_graphs=records_graphs)


@pytest.mark.parametrize(("queues", "size", "ordered"), [("1", 2, True), ("1", 1, False), ("32", 2, False)])
def test_one_launch_queue_orders_tensor_parallel_launches(
    monkeypatch: pytest.MonkeyPatch, queues: str, size: int, ordered: bool
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    choice = transport_choice("dp_transport", ParallelConfig(tensor_model_parallel_size=size, dp_transport="nccl"))
    assert (choice.wanted, choice.setting, choice.launches_in_order) == ("nccl", "dp_transport", ordered)
