"""Short memsets of a recorded graph become kernels that write the same bytes at the same place in the order."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from fp8_megatron.dtypes import E4M3
from fp8_megatron.graphs import memsets, recorder
from fp8_megatron.graphs.memsets import Fill
from fp8_megatron.kernels import ops

MEMSET, KERNEL = 2, 0


@pytest.mark.parametrize(
    ("element_size", "value", "word"),
    [(1, 0xAB, 0xABABABAB), (2, 0x12CD, 0x12CD12CD), (4, 7, 7), (1, 0x1FF, 0xFFFFFFFF)],
)
def test_a_fill_repeats_the_lowest_bytes(element_size: int, value: int, word: int) -> None:
    fill = Fill.of(4096, value, element_size, 32 // element_size, 1)
    assert fill is not None and (fill.address, fill.value, fill.count) == (4096, word, 8)


@pytest.mark.parametrize(
    "memset", [(4096, 0, 4, 1, 2), (4096, 0, 1, 6, 1), (4098, 0, 1, 8, 1), (4096, 0, 4, 1 << 20, 1), (4096, 0, 4, 0, 1)]
)
def test_rows_odd_sizes_and_long_ones_stay(memset: tuple[int, int, int, int, int]) -> None:
    assert Fill.of(*memset) is None


def num_memsets(graph: torch.cuda.CUDAGraph) -> int:
    driver = memsets._driver()
    kinds = []
    for node in memsets._nodes(driver.cuGraphGetNodes, graph.raw_cuda_graph()):
        kind = ctypes.c_int()
        assert driver.cuGraphNodeGetType(node, ctypes.byref(kind)) == 0
        kinds.append(kind.value)
    return kinds.count(MEMSET)


@pytest.mark.gpu
def test_a_graph_writes_what_memsets_wrote() -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    sizes: list[Any] = [ctypes.c_uint64, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p]
    x = torch.zeros(1 << 15, dtype=torch.int32, device="cuda")
    seen = torch.empty_like(x)

    def compute() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        x.add_(1)
        for call, value, count, offset in (
            (driver.cuMemsetD8Async, 0xAB, 16, 0),
            (driver.cuMemsetD16Async, 0x12CD, 6, 64),
            (driver.cuMemsetD32Async, 123456789, 1000, 4096),
            (driver.cuMemsetD32Async, 5, 20000, 16384),  # long
            (driver.cuMemsetD8Async, 3, 5, 80000),  # no whole words
        ):
            call.argtypes = sizes
            assert call(x.data_ptr() + offset, value, count, stream) == 0
        seen.copy_(x).add_(1)

    x.zero_()
    compute()
    expected = seen.clone(), x.clone()
    graph, _ = recorder.capture(compute, torch.cuda.graph_pool_handle(), torch.cuda.Stream())
    assert num_memsets(graph) == 2
    for _ in range(3):
        x.zero_()
        graph.replay()
        assert torch.equal(seen, expected[0]) and torch.equal(x, expected[1])


@pytest.mark.gpu
def test_gemms_of_a_graph_have_no_memsets_and_the_same_bits() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(rows, 1024, device="cuda", generator=generator).to(E4M3) for rows in (2048, 1024))
    scale = torch.full((4,), 0.5, device="cuda")[:1]
    outs = [torch.empty(2048, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(8)]

    def compute() -> None:
        for index, out in enumerate(outs):
            ops.scaled_mm_into_(out, a, b, scale, scale, use_fast_accum=index % 2 == 0)

    compute()
    expected = [out.clone() for out in outs]
    graph, _ = recorder.capture(compute, torch.cuda.graph_pool_handle(), torch.cuda.Stream())
    assert num_memsets(graph) == 0
    for _ in range(3):
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        for out, value in zip(outs, expected, strict=True):
            assert torch.equal(out, value)
