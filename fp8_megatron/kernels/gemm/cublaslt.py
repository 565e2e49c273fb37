"""FP8 GEMMs through cuBLASLt's own interface, with the algorithm of every shape chosen once.

``torch._scaled_mm`` asks cuBLASLt's heuristic again at each call, which takes 110 µs of the host; a launch with a kept
plan takes 18. Here a plan for each shape keeps descriptors, layouts and algorithm. A call sets the scale pointers and
launches. The library is the one that torch has loaded, called with ctypes; nothing is compiled.

A plan takes the algorithm that the heuristic names first. With fast accumulation, or scales of blocks, the first call
times the others too, and takes the fastest that writes the same bits (`algorithm_choice`). With scales of blocks one of
them is this project's own kernel (`block_scaled_cuda`).

The constants have the names and values of cublasLt.h.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...dtypes import E4M3, E5M2
from .algorithm_choice import fastest
from .block_scaled_cuda import BlockScaledGemm, block_scaled_gemm
from .cublaslt_library import Algorithm, Heuristic, create, library, loaded

_COMPUTE_32F = 68
_CUDA_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14, E4M3: 28, E5M2: 29}
_OP_T = 1
_EPILOGUE_BIAS = 4
_DESC_TRANSA, _DESC_EPILOGUE, _DESC_FAST_ACCUM, _DESC_BIAS_DATA_TYPE = 3, 7, 25, 26
_DESC_A_SCALE_MODE, _DESC_B_SCALE_MODE = 31, 32
#: Attributes that are addresses: of A's scale, B's scale, the bias, D's scale and D's amax.
_POINTERS = (17, 18, 8, 20, 21)
_A_SCALE, _B_SCALE, _BIAS, _D_SCALE, _D_AMAX = range(len(_POINTERS))
_PREF_MAX_WORKSPACE_BYTES, _PREF_MIN_ALIGNMENT_A_BYTES = 1, 5
_NUM_OPERANDS = 4

#: What one scale of an operand is for: the tensor, 128 elements along K, a tile of 128×128.
TENSOR_SCALE, BLOCK_SCALES, TILE_SCALES = 0, 4, 5
#: The first version with scales of blocks and of tiles.
BLOCK_SCALES_VERSION = 120900

#: What NVIDIA recommends for Hopper.
_WORKSPACE_BYTES = 32 * 2**20
_MAX_ALIGNMENT = 256
#: Algorithms that are timed of each problem.
_NUM_CANDIDATES = 8
#: Problems whose algorithms are timed. A loop that never stops bringing new shapes pays for no more than these.
_MOST_TIMED = 64


def is_available() -> bool:
    """Whether torch's cuBLASLt can be called."""
    return library() is not None


@functools.cache
def version() -> int:
    """cuBLASLt's version as 10000 · major + 100 · minor + patch; 0 if it cannot be called."""
    found = library()
    return 0 if found is None else int(found.cublasLtGetVersion())


def matmul(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    use_fast_accum: bool,
    addend: Tensor | None = None,
    inverse: Tensor | None = None,
    amax: Tensor | None = None,
    scale_mode_a: int = TENSOR_SCALE,
    scale_mode_b: int = TENSOR_SCALE,
) -> None:
    """``out = scale_a · scale_b · a bᵀ (+ bias) (+ addend)`` on the current stream; one launch without host sync.

    Args:
        a, b: FP8 [M, K] and [N, K], contiguous; scale_a, scale_b: FP32 [1], 16-byte aligned.
        bias: [N] in `out`'s dtype, or None.
        addend: [M, N], contiguous, in `out`'s dtype, which is no FP8, or None.
        out: [M, N], contiguous, BF16, FP16, FP32 or FP8. An FP8 `out` needs `inverse` and `amax`.
        inverse: FP32 [1], 16-byte aligned; the result is multiplied by it before the cast.
        amax: FP32 [1], 16-byte aligned; the result's amax is written to it.
        scale_mode_a, scale_mode_b: what `scale_a` and `scale_b` hold. Modes other than `TENSOR_SCALE` need Hopper,
            version `BLOCK_SCALES_VERSION`, scales as in `quantize.blocks`, an `out` that is not FP8, and no fast
            accumulation.

    Raises:
        RuntimeError: cuBLASLt refuses; the text has its status and the shape.
    """
    a_pointer, b_pointer, out_pointer = a.data_ptr(), b.data_ptr(), out.data_ptr()
    addend_pointer = 0 if addend is None else addend.data_ptr()
    pointers = a_pointer | b_pointer | out_pointer | addend_pointer
    alignment = min(pointers & -pointers, _MAX_ALIGNMENT)
    bias_dtype = None if bias is None else bias.dtype
    problem = (
        a.shape,
        b.shape,
        a.dtype,
        b.dtype,
        out.dtype,
        bias_dtype,
        addend is not None,
        use_fast_accum,
        alignment,
        a.get_device(),
        scale_mode_a,
        scale_mode_b,
    )
    plan = _plans.get(problem)
    with _lock:
        if plan is None:
            plan = _plans[problem] = _GemmPlan(_Problem(*problem))
        # The heuristic checks that it is set; cuBLASLt reads it at the launch.
        plan.point_at(_A_SCALE, scale_b)
        plan.point_at(_B_SCALE, scale_a)
        if bias is not None:
            plan.point_at(_BIAS, bias)
        if inverse is not None:
            plan.point_at(_D_SCALE, inverse)
        if amax is not None:
            plan.point_at(_D_AMAX, amax)
        if plan.awaits_timing and (addend_pointer != out_pointer or scale_mode_a == BLOCK_SCALES):
            plan.time_algorithms((a_pointer, b_pointer, addend_pointer), out, addend)
        plan.run(a_pointer, b_pointer, addend_pointer, out_pointer)


@dataclass(frozen=True)
class _Problem:
    """The problem that one plan solves. (Plans are looked up by a tuple of its fields, because making a `_Problem`
    takes longer than a launch.)"""

    a_shape: torch.Size
    b_shape: torch.Size
    a_dtype: torch.dtype
    b_dtype: torch.dtype
    out_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    has_addend: bool
    use_fast_accum: bool
    alignment: int
    device: int
    scale_mode_a: int
    scale_mode_b: int

    def __str__(self) -> str:
        return f"{self.a_dtype} {list(self.a_shape)} × {self.b_dtype} {list(self.b_shape)}ᵀ → {self.out_dtype}"


class _GemmPlan:
    """cuBLASLt's descriptors of one problem. cuBLASLt is column-major: its A is b, transposed, and its D is outᵀ."""

    def __init__(self, problem: _Problem) -> None:
        self.problem = problem
        self._library = loaded()
        self._handle = _handle(problem.device)
        self._descriptor = create(self._library.cublasLtMatmulDescCreate, _COMPUTE_32F, _CUDA_TYPES[torch.float32])
        self._set(_DESC_TRANSA, ctypes.c_int32(_OP_T))
        self._set(_DESC_FAST_ACCUM, ctypes.c_int8(problem.use_fast_accum))
        for attribute, mode in (
            (_DESC_A_SCALE_MODE, problem.scale_mode_b),
            (_DESC_B_SCALE_MODE, problem.scale_mode_a),
        ):
            if mode != TENSOR_SCALE:  # an older library knows no such attribute
                self._set(attribute, ctypes.c_int32(mode))
        if problem.bias_dtype is not None:
            self._set(_DESC_EPILOGUE, ctypes.c_int32(_EPILOGUE_BIAS))
            self._set(_DESC_BIAS_DATA_TYPE, ctypes.c_int32(_CUDA_TYPES[problem.bias_dtype]))
        (m, k), n = problem.a_shape, problem.b_shape[0]
        self._layouts = [
            create(self._library.cublasLtMatrixLayoutCreate, _CUDA_TYPES[dtype], *sizes)
            for dtype, sizes in (
                (problem.b_dtype, (k, n, k)),
                (problem.a_dtype, (k, m, k)),
                # What cuBLASLt adds; no FP8.
                (torch.bfloat16 if problem.out_dtype in (E4M3, E5M2) else problem.out_dtype, (n, m, n)),
                (problem.out_dtype, (n, m, n)),
            )
        ]
        # What changes from call to call is kept as ctypes' own objects, because making them takes as long as the call.
        self._pointers = [ctypes.c_void_p() for _ in _POINTERS]
        self._addresses = [0] * len(_POINTERS)
        self._point = [
            functools.partial(
                self._library.cublasLtMatmulDescSetAttribute,
                self._descriptor,
                attribute,
                ctypes.byref(pointer),
                ctypes.sizeof(pointer),
            )
            for attribute, pointer in zip(_POINTERS, self._pointers, strict=True)
        ]
        self._a, self._b, self._addend, self._out, self._workspace = (ctypes.c_void_p() for _ in range(5))
        self._stream = ctypes.c_void_p()
        self._current = -1  # no stream: the default one is 0
        self._launch: Callable[[], int] | None = None
        is_timed = problem.use_fast_accum or problem.scale_mode_a != TENSOR_SCALE
        self.awaits_timing = is_timed and problem not in _chosen and len(_chosen) < _MOST_TIMED

    def _set(self, attribute: int, value: ctypes._SimpleCData[Any]) -> None:
        _check(
            self._library.cublasLtMatmulDescSetAttribute(
                self._descriptor, attribute, ctypes.byref(value), ctypes.sizeof(value)
            ),
            self.problem,
        )

    def point_at(self, index: int, tensor: Tensor) -> None:
        """Set the address of one of `_POINTERS`, which changes from call to call."""
        address = tensor.data_ptr()
        if self._addresses[index] != address:
            self._pointers[index].value = self._addresses[index] = address
            status = self._point[index]()
            if status:
                _check(status, self.problem)

    def run(self, a: int, b: int, addend: int, out: int) -> None:
        """Launch with the operands at these addresses; 0 for none."""
        stream = torch._C._cuda_getCurrentRawStream(self.problem.device)
        if self._current != stream:
            self._stream.value = self._current = stream
            self._workspace.value = workspace(self.problem.device, stream).data_ptr()
        if self._launch is None:
            self._launch = self._prepare_launch(_chosen.get(self.problem) or self._heuristic(1)[0])
        self._a.value, self._b.value, self._addend.value, self._out.value = a, b, addend, out
        status = self._launch()
        if status:
            _check(status, self.problem)

    def _prepare_launch(self, algorithm: Algorithm | BlockScaledGemm) -> Callable[[], int]:
        if isinstance(algorithm, BlockScaledGemm):
            return functools.partial(self._launch_own, algorithm)
        layout_b, layout_a, layout_c, layout_out = self._layouts
        one, factor_of_addend = ctypes.c_float(1.0), ctypes.c_float(float(self.problem.has_addend))
        return functools.partial(
            self._library.cublasLtMatmul,
            self._handle,
            self._descriptor,
            ctypes.byref(one),
            self._b,
            layout_b,
            self._a,
            layout_a,
            ctypes.byref(factor_of_addend),
            self._addend,
            layout_c,
            self._out,
            layout_out,
            ctypes.byref(algorithm),
            self._workspace,
            ctypes.c_size_t(_WORKSPACE_BYTES),
            self._stream,
        )

    def _launch_own(self, gemm: BlockScaledGemm) -> int:
        a, b, addend, out = (pointer.value or 0 for pointer in (self._a, self._b, self._addend, self._out))
        scales_b, scales_a, bias = self._addresses[: _BIAS + 1]
        gemm.launch(a, b, scales_a, scales_b, bias, addend, out)
        return 0

    def time_algorithms(self, operands: tuple[int, int, int], out: Tensor, addend: Tensor | None) -> None:
        """Choose the problem's algorithm, now that all pointers are set; later, if the launch is recorded into a graph.

        Args:
            operands: the first three that `run` takes.
            out: what is timed writes to it, or to a tensor like it if it is the addend.
        """
        if torch.cuda.is_current_stream_capturing():
            return
        self.awaits_timing = False
        if addend is not None and addend.data_ptr() == out.data_ptr():
            out = torch.empty_like(out)
        before, algorithms = self._launch, self._heuristic(_NUM_CANDIDATES) + self._own_algorithms()
        launches = [self._prepare_launch(algorithm) for algorithm in algorithms]

        def launch(index: int) -> bool:
            self._launch = launches[index]
            try:
                self.run(*operands, out.data_ptr())
            except RuntimeError:
                return False
            return True

        try:
            with torch.cuda.device(self.problem.device):
                index = fastest(len(algorithms), launch, out, addend)
        except BaseException:
            self._launch = before  # the last one that was tried may write other bits, or not run at all
            raise
        self._launch, _chosen[self.problem] = launches[index], algorithms[index]

    def _own_algorithms(self) -> list[Algorithm | BlockScaledGemm]:
        """This project's, at most one."""
        problem = self.problem
        if problem.scale_mode_a != BLOCK_SCALES:
            return []
        gemm = block_scaled_gemm(
            problem.a_shape,
            problem.b_shape,
            dtypes=(problem.a_dtype, problem.b_dtype, problem.out_dtype),
            b_has_tiles=problem.scale_mode_b == TILE_SCALES,
            alignment=problem.alignment,
            device=problem.device,
        )
        return [] if gemm is None else [gemm]

    def _heuristic(self, most: int) -> list[Algorithm | BlockScaledGemm]:
        """The heuristic's algorithms, at least one and at most `most`, the fastest in its opinion first."""
        preference = create(self._library.cublasLtMatmulPreferenceCreate)
        limits: list[tuple[int, ctypes._SimpleCData[Any]]] = [
            (_PREF_MAX_WORKSPACE_BYTES, ctypes.c_uint64(_WORKSPACE_BYTES))
        ]
        limits += [
            (_PREF_MIN_ALIGNMENT_A_BYTES + operand, ctypes.c_uint32(self.problem.alignment))
            for operand in range(_NUM_OPERANDS)
        ]
        for attribute, value in limits:
            status = self._library.cublasLtMatmulPreferenceSetAttribute(
                preference, attribute, ctypes.byref(value), ctypes.sizeof(value)
            )
            _check(status, self.problem)
        found, num_found = (Heuristic * most)(), ctypes.c_int(0)
        status = self._library.cublasLtMatmulAlgoGetHeuristic(
            self._handle,
            self._descriptor,
            *self._layouts,
            preference,
            most,
            ctypes.byref(found),
            ctypes.byref(num_found),
        )
        self._library.cublasLtMatmulPreferenceDestroy(preference)
        _check(status or (found[0].state if num_found.value else 0), self.problem)
        if num_found.value == 0:
            raise RuntimeError(f"cuBLASLt has no algorithm for {self.problem}")
        return [one.algorithm for one in found[: num_found.value] if not one.state]


_plans: dict[tuple[Any, ...], _GemmPlan] = {}
#: By problem, the algorithm that timing chose.
_chosen: dict[_Problem, Algorithm | BlockScaledGemm] = {}
# Two calls set and read the scale pointers of a plan, and forward and backward are different threads.
_lock = threading.Lock()


@functools.cache
def _handle(device: int) -> ctypes.c_void_p:
    with torch.cuda.device(device):
        return create(loaded().cublasLtCreate)


@functools.cache
def workspace(device: int, stream: int) -> Tensor:
    """The workspace of a stream. GEMMs of one stream run one after another, so they share it."""
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=torch.device("cuda", device))


def _check(status: int, problem: _Problem) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt failed with status {status} on {problem}")
