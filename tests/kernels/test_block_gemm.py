"""csrc/block_scaled_gemm.cu on the threads of a CPU, with the hardware emulated (emulated_hopper.h), and on a GPU."""

from __future__ import annotations

import ctypes
import functools
import itertools
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fp8_megatron.dtypes import E4M3, E5M2
from fp8_megatron.kernels import extension, ops
from fp8_megatron.kernels.gemm import block_scaled_cuda, cublaslt
from fp8_megatron.kernels.gemm.block_scaled_cuda import (
    TILINGS,
    BlockScaledGemm,
    Tiling,
    block_scaled_gemm,
    tiling_of,
)
from fp8_megatron.kernels.quantize.blocks import has_tile_scales
from fp8_megatron.quantization.stats import snr_db
from tests.kernels.test_blocks import FORMATS, operands, product_in_float64

H200_SMS, SHARED_BYTES = 132, 232_448
TILING_IDS = [f"{tiling.rows}_rows" for tiling in TILINGS]

#: What tests call, for ctypes.
_WRAPPERS = """
#include "{source}"
extern "C" {{
int shared_bytes() {{ return SHARED_BYTES; }}
int places(int m, int n) {{ return num_places(m, n); }}
long place(int index, int m, int n) {{
  const Place at = place_of(index, m, n);
  return static_cast<long>(at.m) << 32 | at.n;
}}
#if GROUPED
#define PARAMETERS , const int* offsets, int experts, int stride_0, int stride_1, int stride_2
#define ARGUMENTS , offsets, experts, stride_0, stride_1, stride_2
#else
#define PARAMETERS
#define ARGUMENTS
#endif
void run(int blocks, const TensorMap* map_a, const TensorMap* map_b, const float* scales_a, const float* scales_b,
         const u8* bias, const u8* addend, u8* out, int m, int n, int k PARAMETERS) {{
  run_blocks(blocks, [&] {{
    block_scaled_gemm(*map_a, *map_b, scales_a, scales_b, bias, addend, out, m, n, k ARGUMENTS);
  }});
}}
}}
"""


class _Map(ctypes.Structure):
    """emulated_hopper.h's TensorMap."""

    _fields_ = [
        ("address", ctypes.c_void_p),
        ("rank", ctypes.c_int),
        *[(name, ctypes.c_long * 5) for name in ("sizes", "strides", "box")],
    ]


def emulated_map(address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> _Map:
    """In the place of `extension.tensor_map`."""
    lists = ((ctypes.c_long * 5)(*values) for values in (sizes, (1, *strides), box))
    return _Map(address, len(sizes), *lists)


class Compiled(NamedTuple):
    """The source for one tiling, on the CPU."""

    tiling: Tiling
    functions: ctypes.CDLL

    def place(self, index: int, m: int, n: int) -> tuple[int, int]:
        both = self.functions.place(index, m, n)
        return both >> 32, both & 0xFFFFFFFF


@functools.cache
def compiled(
    tiling: Tiling,
    folder: Path,
    b_has_tiles: bool = True,
    out_dtype: torch.dtype = torch.bfloat16,
    a_dtype: torch.dtype = E4M3,
    is_grouped: bool = False,
) -> Compiled:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    name = f"{tiling.rows}_{b_has_tiles}_{out_dtype}_{a_dtype}_{is_grouped}"
    source, library = folder / f"{name}.cpp", folder / f"{name}.so"
    source.write_text(_WRAPPERS.format(source=extension._FOLDER / "block_scaled_gemm.cu"))
    given = block_scaled_cuda.macros(tiling, a_dtype, E4M3, out_dtype, b_has_tiles, is_grouped)
    flags = [f"-D{key}={int(value)}" for key, value in given.items()] + [f"-I{Path(__file__).parent}"]
    flags += ["-std=c++17", "-O2", "-w", "-shared", "-fPIC", "-pthread"]
    subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
    functions = ctypes.CDLL(str(library))
    functions.place.restype = ctypes.c_long
    return Compiled(tiling, functions)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("host")


@pytest.mark.parametrize("tiling", TILINGS, ids=TILING_IDS)
@pytest.mark.parametrize("size", [(8192, 12288), (272, 352), (16, 32), (4224, 4096), (128, 28672)], ids=str)
def test_every_tile_is_computed_once(tiling: Tiling, size: tuple[int, int], folder: Path) -> None:
    functions, (m, n) = compiled(tiling, folder, True), size
    count = functions.functions.places(m, n)
    assert count == tiling.tiles(m, n)
    places = [functions.place(index, m, n) for index in range(count)]
    assert len(set(places)) == len(places)
    assert set(places) == {(row, column) for row in range(0, m, tiling.rows) for column in range(0, n, 128)}


@pytest.mark.parametrize("tiling", TILINGS, ids=TILING_IDS)
def test_tiles_that_run_at_once_share_rows_and_columns(tiling: Tiling, folder: Path) -> None:
    functions, (m, n) = compiled(tiling, folder, True), (8192, 12288)
    for first in range(0, functions.functions.places(m, n) - H200_SMS, H200_SMS):
        rows, columns = map(set, zip(*(functions.place(first + i, m, n) for i in range(H200_SMS)), strict=True))
        # A group's rows, or two groups' where one ends; in row-major order a round has 97 columns or more.
        group = round(2048 / tiling.rows)
        assert len(rows) <= 2 * group and len(columns) <= 2 * (H200_SMS // group + 2)


#: What is behind the last of a row's tiles of scales, and around the result: nothing may read or write it.
_GUARD = 4


@pytest.mark.parametrize("summands", [False, True], ids=["product", "sum"])
@pytest.mark.parametrize("tiles", ["b", "neither"])
@pytest.mark.parametrize("tiling", TILINGS, ids=TILING_IDS)
def test_on_a_cpus_threads(
    tiling: Tiling, tiles: str, summands: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last tile of each dimension and the last block are short, and a block has several tiles."""
    monkeypatch.setattr(block_scaled_cuda, "tensor_map", emulated_map)
    m, n, k = (272, 160, 784) if summands else (144, 416, 144)
    dtype, formats = (torch.float32, (E5M2, E4M3)) if summands else (torch.bfloat16, (E4M3, E4M3))
    (a, scales_a), (b, scales_b) = operands(m, n, k, formats, tiles)
    truth = product_in_float64(a, b, scales_a, scales_b)
    out = torch.full((m + 2 * _GUARD, n), torch.nan, dtype=dtype)
    inside = out[_GUARD:-_GUARD]
    bias = addend = None
    if summands:
        addend = torch.randn(m, n, generator=torch.Generator().manual_seed(1)) * truth.std().float()
        inside.copy_(addend)  # in place
        truth += addend
    else:
        bias = (torch.randn(n + 1, generator=torch.Generator().manual_seed(2)) * truth.std().float()).bfloat16()[1:]
        truth += bias.double()
    kernel = compiled(tiling, folder, tiles == "b", dtype, formats[0])
    maps = (
        block_scaled_cuda.map_of_a.__wrapped__(a.data_ptr(), m, k, tiling.rows),
        block_scaled_cuda.map_of_b.__wrapped__(b.data_ptr(), n, k),
    )
    given = (scales_a, scales_b, bias, inside if summands else None, inside)
    kernel.functions.run(
        1,
        *map(ctypes.byref, maps),
        *(ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in given),
        *map(ctypes.c_int, (m, n, k)),
    )
    assert out[:_GUARD].isnan().all() and out[-_GUARD:].isnan().all()
    # At most ten roundings to FP32, 2⁻²⁴ each of a sum that may be some times the largest result, and one to BF16.
    tolerance = 2**-20 * truth.abs().max() + (2**-8 * truth.abs() if dtype == torch.bfloat16 else 0)
    assert ((inside.double() - truth).abs() <= tolerance).all()


VARIANTS = [*itertools.product(TILINGS, (False, True), (False,)), (TILINGS[0], True, True)]


@pytest.mark.parametrize(("tiling", "b_has_tiles", "is_grouped"), VARIANTS, ids=str)
def test_shared_memory_is_what_the_source_takes(
    tiling: Tiling, b_has_tiles: bool, is_grouped: bool, folder: Path
) -> None:
    found = compiled(tiling, folder, b_has_tiles, is_grouped=is_grouped).functions.shared_bytes()
    assert tiling.shared_bytes(b_has_tiles) == found <= SHARED_BYTES
    assert tiling.stages(b_has_tiles) >= 4


def test_tilings() -> None:
    """The faster of the two, as measured."""
    three, two = TILINGS
    for n, k in ((12288, 4096), (14336, 4096), (28672, 4096)):
        assert tiling_of(8192, n, True, H200_SMS) == tiling_of(8192, k, True, H200_SMS) == three
        assert tiling_of(n, k, False, H200_SMS) == tiling_of(k, n, False, H200_SMS) == three
    assert tiling_of(4096, 4096, False, H200_SMS) == two


needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


def multiply(
    out: Tensor,
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    tiling: Tiling | None = None,
    *,
    bias: Tensor | None = None,
    addend: Tensor | None = None,
) -> None:
    """The kernel itself, in a given tiling."""
    gemm = block_scaled_gemm(
        a[0].shape,
        b[0].shape,
        dtypes=(a[0].dtype, b[0].dtype, out.dtype),
        b_has_tiles=has_tile_scales(*b),
        alignment=16,
        device=0,
        tiling=tiling,
    )
    assert gemm is not None
    given = (a[0], b[0], a[1], b[1], bias, addend, out)
    gemm.launch(*(0 if tensor is None else tensor.data_ptr() for tensor in given))


def on_gpu(operand: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return operand[0].cuda(), operand[1].cuda()


def check(
    shape: tuple[int, int, int],
    tiles: str,
    tiling: Tiling | None,
    formats: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3),
    *,
    power_of_two: bool = False,
) -> None:
    m, n, k = shape
    on_cpu = operands(m, n, k, formats, tiles, power_of_two=power_of_two)
    truth = product_in_float64(on_cpu[0][0], on_cpu[1][0], on_cpu[0][1], on_cpu[1][1])
    a, b = map(on_gpu, on_cpu)
    generator, size = torch.Generator().manual_seed(1), truth.std().float()
    bias = (torch.randn(n, generator=generator) * size).bfloat16()
    for dtype in (torch.bfloat16, torch.float32):
        addend = (torch.randn(m, n, generator=generator) * size).to(dtype)
        for added, given_bias in itertools.product((None, addend), (None, bias)):
            if given_bias is not None and dtype == torch.float32:
                continue
            expected = truth + sum(value.double() for value in (added, given_bias) if value is not None)
            odd = None if given_bias is None else torch.cat([given_bias[:1], given_bias]).cuda()[1:]
            summands = dict(bias=odd, addend=None if added is None else added.cuda())
            guarded = torch.full((m + 2, n), torch.nan, dtype=dtype, device="cuda")
            multiply(guarded[1:-1], a, b, tiling, **summands)
            # As test_blocks_gpu has it: BF16's rounding is 54 dB or better, the tensor core's 66 over a block.
            assert snr_db(guarded[1:-1].cpu(), expected) > 50
            assert guarded[0].isnan().all() and guarded[-1].isnan().all()
            if added is not None:
                multiply(summands["addend"], a, b, tiling, **summands)  # in place
                assert torch.equal(summands["addend"], guarded[1:-1])


SHAPES = ((16, 32, 16), (272, 352, 400), (528, 160, 2048), (1040, 1184, 640), (256, 544, 4096))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tiles", ["b", "neither"])
@pytest.mark.parametrize("tiling", TILINGS, ids=TILING_IDS)
def test_tilings_on_a_gpu(tiling: Tiling, tiles: str, shape: tuple[int, int, int]) -> None:
    check(shape, tiles, tiling)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("power_of_two", [False, True], ids=["exact", "power_of_two"])
@pytest.mark.parametrize("formats", FORMATS, ids=str)
@pytest.mark.parametrize("tiles", ["b", "neither"])
def test_formats_and_scales(tiles: str, formats: tuple[torch.dtype, torch.dtype], power_of_two: bool) -> None:
    check((4096 + 16, 512 + 32, 384 + 16), tiles, None, formats, power_of_two=power_of_two)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("tiles", ["b", "neither"])
def test_tilings_write_the_same_bits_as_cublaslt(tiles: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tiles than multiprocessors, several rounds, and the same bits again."""
    monkeypatch.setattr(cublaslt, "_plans", {})
    monkeypatch.setattr(cublaslt._GemmPlan, "_own_algorithms", lambda self: [])
    m, n, k = 4096 + 16, 2048 + 96, 1024 + 16
    a, b = map(on_gpu, operands(m, n, k, (E4M3, E4M3), tiles))
    theirs = ops.block_scaled_mm(a[0], b[0], a[1], b[1])
    for dtype in (torch.bfloat16, torch.float32):
        results = [torch.full((m, n), torch.nan, dtype=dtype, device="cuda") for _ in range(2 * len(TILINGS))]
        for out, tiling in zip(results, TILINGS * 2, strict=True):
            multiply(out, a, b, tiling)
        assert results[0].isfinite().all() and all(torch.equal(results[0], other) for other in results[1:])
        assert torch.equal(results[0].bfloat16(), theirs)


@pytest.mark.gpu
@needs_hopper
def test_a_nan_stays_in_its_row_and_column() -> None:
    (a, scales_a), (b, scales_b) = map(on_gpu, operands(272, 352, 400, (E4M3, E4M3), "neither"))
    scales_a[1, 7], scales_b[2, 300] = torch.nan, torch.nan
    out = torch.zeros(272, 352, device="cuda")
    multiply(out, (a, scales_a), (b, scales_b))
    assert out[7].isnan().all() and out[:, 300].isnan().all() and out.isnan().sum() == 272 + 352 - 1


@pytest.mark.gpu
@needs_hopper
def test_a_recorded_launch() -> None:
    a, b = map(on_gpu, operands(512, 768, 1024, (E4M3, E4M3), "b"))
    expected, out = (torch.zeros(512, 768, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    multiply(expected, a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        multiply(out, a, b)
    graph.replay()
    assert torch.equal(out, expected) and out.any()


def compile_again(monkeypatch: pytest.MonkeyPatch, user: ModuleType) -> None:
    """`user`, a module that launches the kernel, begins without compiled ones."""
    monkeypatch.setattr(user, "compiled_kernel", functools.cache(block_scaled_cuda.compiled_kernel.__wrapped__))


@pytest.mark.gpu
@needs_hopper
def test_new_threads_load_launch_and_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's calls need a context, which a thread has not before the CUDA runtime needs one."""
    a, b = map(on_gpu, operands(512, 768, 1024, (E4M3, E4M3), "b"))
    expected, out = (torch.zeros(512, 768, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    multiply(expected, a, b)
    compile_again(monkeypatch, block_scaled_cuda)

    def record() -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            multiply(out, a, b)
        graph.replay()

    for work in (lambda: multiply(out, a, b),) * 2 + (record,):  # the first one loads
        out.zero_()
        torch.cuda.synchronize()
        with ThreadPoolExecutor(1) as new_thread:
            new_thread.submit(work).result()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("in_place", [False, True])
def test_cublaslts_plan_takes_it(monkeypatch: pytest.MonkeyPatch, in_place: bool) -> None:
    """The operator gives the plan's operands to the kernel in its own order."""
    monkeypatch.setattr(cublaslt, "_plans", {})
    monkeypatch.setattr(cublaslt, "_chosen", {})
    last = lambda count, launch, out, addend: count - 1  # noqa: E731
    monkeypatch.setattr(cublaslt, "fastest", last)
    on_cpu = operands(272, 352, 400, (E4M3, E4M3), "b")
    truth = product_in_float64(on_cpu[0][0], on_cpu[1][0], on_cpu[0][1], on_cpu[1][1])
    (a, scales_a), (b, scales_b) = map(on_gpu, on_cpu)
    size = truth.std().float()
    bias, addend = ((torch.randn(*shape) * size).bfloat16() for shape in ((352,), (272, 352)))
    added = addend.cuda()
    out = added if in_place else torch.empty_like(added)
    ops.block_scaled_mm_into_(out, a, b, scales_a, scales_b, bias=bias.cuda(), addend=added)
    assert isinstance(*cublaslt._chosen.values(), BlockScaledGemm)
    assert snr_db(out.cpu(), truth + bias.double() + addend.double()) > 50


@pytest.mark.gpu
@needs_hopper
def test_what_it_is_not_made_for_stays_cublaslts() -> None:
    kept = dict(b_has_tiles=True, device=0)
    shapes = torch.Size((256, 512)), torch.Size((256, 512))
    bf16, fp16 = (E4M3, E4M3, torch.bfloat16), (E4M3, E4M3, torch.float16)
    assert block_scaled_gemm(*shapes, dtypes=bf16, alignment=16, **kept) is not None
    assert block_scaled_gemm(*shapes, dtypes=fp16, alignment=16, **kept) is None
    assert block_scaled_gemm(*shapes, dtypes=bf16, alignment=8, **kept) is None
    assert block_scaled_gemm(shapes[0], torch.Size((272, 512)), dtypes=bf16, alignment=16, **kept) is None


@pytest.mark.gpu
@needs_hopper
def test_a_gpu_that_cannot_compile_it_has_cublaslts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(block_scaled_cuda, "_SOURCE", "no_such.cu")
    compile_again(monkeypatch, block_scaled_cuda)
    monkeypatch.setattr(cublaslt, "_plans", {})
    monkeypatch.setattr(cublaslt, "_chosen", {})
    (a, scales_a), (b, scales_b) = map(on_gpu, operands(256, 128, 384, (E4M3, E4M3), "b"))
    assert ops.block_scaled_mm(a, b, scales_a, scales_b).isfinite().all()
    assert "no_such.cu" in caplog.text
