"""What is set before CUDA starts."""

from __future__ import annotations

import pytest

from fp8_megatron.device import prepare_cuda_environment


@pytest.mark.parametrize(("tensor_parallel_size", "expected"), [(1, "32"), (2, "1")])
def test_launch_queues_by_layout(monkeypatch: pytest.MonkeyPatch, tensor_parallel_size: int, expected: str) -> None:
    import os

    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "x")  # so that it is put back
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    assert prepare_cuda_environment(tensor_parallel_size) is None
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == expected


@pytest.mark.parametrize(("tensor_parallel_size", "warns"), [(1, True), (2, False)])
def test_the_users_choice_stays(monkeypatch: pytest.MonkeyPatch, tensor_parallel_size: int, warns: bool) -> None:
    import os

    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    warning = prepare_cuda_environment(tensor_parallel_size)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert (warning is not None and "CUDA_DEVICE_MAX_CONNECTIONS is 1" in warning) == warns
