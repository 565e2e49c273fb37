"""Variables that are set before CUDA starts."""

from __future__ import annotations

import os

import pytest
import torch

from fp8_megatron.device.device import UnsupportedDeviceError, check_cuda_graph_support, prepare_cuda_environment


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
