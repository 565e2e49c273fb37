"""Memory for the outputs of kernels."""

from __future__ import annotations

import pytest
import torch

from fp8_megatron.kernels import shapes

DTYPES = [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int32]


def check(device: torch.device) -> None:
    for dtype in DTYPES:
        for made, expected in (
            (shapes.empty(6, 16, dtype, device), torch.empty(6, 16, dtype=dtype, device=device)),
            (shapes.empty_vector(5, dtype, device), torch.empty(5, dtype=dtype, device=device)),
            (shapes.empty(0, 16, dtype, device), torch.empty(0, 16, dtype=dtype, device=device)),
        ):
            assert (made.shape, made.stride(), made.dtype) == (expected.shape, expected.stride(), expected.dtype)
            assert made.device == expected.device and made.is_contiguous()


def test_memory_is_torchs() -> None:
    check(torch.device("cpu"))


@pytest.mark.gpu
def test_memory_of_a_gpu_is_torchs() -> None:
    """With and without the device's number."""
    check(torch.device("cuda", 0))
    check(torch.device("cuda"))
    made = shapes.empty(1 << 10, 1 << 10, torch.float32, torch.device("cuda", 0))
    assert bool((made.fill_(3) == 3).all())


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_memory_of_another_gpu_than_the_current_one() -> None:
    check(torch.device("cuda", 1))
