"""The grouped GEMM of csrc/block_scaled_gemm.cu: on the threads of a CPU, with the hardware emulated
(emulated_hopper.h), and on a GPU, beside Triton's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8_megatron.dtypes import E4M3, E5M2
from fp8_megatron.kernels import ops
from fp8_megatron.kernels.gemm import block_scaled_cuda
from fp8_megatron.kernels.grouped import gemm_cuda
from tests.kernels.test_block_gemm import compile_again, compiled, emulated_map, folder, needs_hopper  # noqa: F401 (a fixture)
from tests.kernels.test_grouped_gemm import ROUNDING, assert_near, of_blocks, random_scales, wide

#: Rows of experts: none; a tile's first 128; two tiles; a tile and 64 rows of the next one.
ROWS = [0, 128, 384, 0, 256]
#: Behind the last expert's.
MORE_ROWS = 128


def offsets_of(rows: list[int]) -> Tensor:
    return torch.tensor([0, *rows]).cumsum(0).int()


class Emulated:
    """In the place of `extension.Kernel`."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def launch(self, blocks: int, device: torch.device, map_a: Any, map_b: Any, *given: int) -> None:
        kinds = [*[ctypes.c_void_p] * 5, *[ctypes.c_int] * 3, *block_scaled_cuda._EXPERTS_PARAMETERS]
        values = [kind(value) for kind, value in zip(kinds, given, strict=True)]
        self._function(blocks, ctypes.byref(map_a), ctypes.byref(map_b), *values)


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:  # noqa: F811
    """`gemm_cuda` launches two blocks of the emulated kernel. Memory for results begins as NaN."""

    def kernel(
        device: int, tiling: Any, a: Any, b: Any, out: torch.dtype, has_tiles: bool, is_grouped: bool
    ) -> Emulated:
        return Emulated(compiled(tiling, folder, has_tiles, out, a, is_grouped).functions.run)

    monkeypatch.setattr(gemm_cuda, "compiled_kernel", kernel)
    monkeypatch.setattr(block_scaled_cuda, "tensor_map", emulated_map)
    for name in ("map_of_a", "map_of_b"):
        monkeypatch.setattr(gemm_cuda, name, getattr(block_scaled_cuda, name).__wrapped__)
    monkeypatch.setattr(gemm_cuda, "_num_multiprocessors", lambda device: 2)
    monkeypatch.setattr(gemm_cuda, "empty", lambda m, n, dtype, _: torch.full((m, n), torch.nan, dtype=dtype))


def operands_of_rows(rows: list[int], n: int, k: int, dtype: torch.dtype = E4M3, device: str = "cpu") -> list[Tensor]:
    """a, b, their scales, and offsets."""
    num_rows = sum(rows) + MORE_ROWS
    a, b = torch.randn(num_rows, k, device=device), torch.randn(len(rows), n, k, device=device)
    scales = random_scales(k // 128, num_rows), random_scales(len(rows), n // 128, k // 128)
    return [a.to(dtype), b.to(E4M3), *(each.to(device) for each in (*scales, offsets_of(rows)))]


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("transposed", [False, True], ids=["weight", "transpose"])
def test_products_on_a_cpus_threads(transposed: bool) -> None:
    torch.manual_seed(0)
    a, b, scale_a, tiles, offsets = operands_of_rows(ROWS, 128, 256, E5M2 if transposed else E4M3)
    scale_b = tiles.mT.contiguous().mT if transposed else torch.nn.functional.pad(tiles, (0, 3), value=torch.nan)
    out = gemm_cuda.grouped_mm(a, b, scale_a, scale_b, offsets)
    assert out is not None
    exact_a, exact_b = of_blocks(a, scale_a), b.double() * wide(wide(tiles, 1), 2)
    for e, (start, stop) in enumerate(pairwise(offsets)):
        assert_near(out[start:stop], exact_a[start:stop] @ exact_b[e].t(), ROUNDING[torch.bfloat16])
    assert out[offsets[-1] :].isnan().all()


def many_experts(num_experts: int, mean_blocks: int) -> list[int]:
    """Rows of experts, in whole blocks, some of them none."""
    generator = torch.Generator().manual_seed(num_experts)
    blocks = torch.randint(0, 2 * mean_blocks + 1, (num_experts,), generator=generator)
    blocks[1] = 0
    return [128 * int(count) for count in blocks]


#: Rows of experts, n and k.
ON_A_GPU = [
    (ROWS, 128, 128),
    (ROWS, 640, 896),
    ([0, 0, 0, 2560], 640, 896),
    ([640], 640, 896),
    ([0, 0], 128, 128),
    (many_experts(128, 4), 1536, 2048),
    (many_experts(128, 12), 2048, 768),
    (many_experts(8, 24), 1536, 2048),
]
ids_of = [f"{len(rows)}_experts_{sum(rows)}_{n}_{k}" for rows, n, k in ON_A_GPU]


def same_bits(own: Tensor, other: Tensor) -> bool:
    return torch.equal(own.view(torch.uint8), other.view(torch.uint8))


@pytest.fixture
def in_triton(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Calls an operator without the kernel."""

    def call(operator: Callable[..., Any], *operands: Any, **settings: Any) -> Any:
        with monkeypatch.context() as patched:
            patched.setattr(gemm_cuda, "compiled_kernel", lambda *_: None)
            return operator(*operands, **settings)

    return call


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(("rows", "n", "k"), ON_A_GPU, ids=ids_of)
def test_products_are_tritons(
    rows: list[int], n: int, k: int, in_triton: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same sums in the same order; and again."""
    torch.manual_seed(0)
    a, b, scale_a, tiles, offsets = operands_of_rows(rows, n, k, E5M2 if n == 128 else E4M3, "cuda")
    end = int(offsets[-1])
    for scale_b in (tiles, tiles.mT.contiguous().mT):
        operands = (a, b, scale_a, scale_b, offsets)
        theirs = in_triton(ops.grouped_mm, *operands)[:end]
        monkeypatch.setattr(gemm_cuda, "empty", lambda m, n, dtype, at: torch.full((m, n), 7.0, dtype=dtype, device=at))
        for _ in range(2):
            own = gemm_cuda.grouped_mm(*operands)
            assert own is not None and own[:end].isfinite().all() and (own[end:] == 7).all()
            assert same_bits(own[:end], theirs)


@pytest.mark.gpu
@needs_hopper
def test_a_recorded_launch_reads_offsets_on_the_device() -> None:
    a, b, scale_a, tiles, offsets = operands_of_rows(ROWS, 256, 512, device="cuda")
    ops.grouped_mm(a, b, scale_a, tiles, offsets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.grouped_mm(a, b, scale_a, tiles, offsets)
    offsets.copy_(offsets_of([256, 0, 128, 128, 256]))
    expected = ops.grouped_mm(a, b, scale_a, tiles, offsets)
    graph.replay()
    assert torch.equal(out[:768], expected[:768])


@pytest.mark.gpu
@needs_hopper
def test_a_gpu_that_cannot_compile_it_has_tritons(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(block_scaled_cuda, "_SOURCE", "no_such.cu")
    compile_again(monkeypatch, gemm_cuda)
    assert ops.grouped_mm(*operands_of_rows([128], 128, 128, device="cuda"))[:128].isfinite().all()
    assert "no_such.cu" in caplog.text and "Triton" in caplog.text
