"""torch's cuBLASLt through ctypes: its functions' types and its structures."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t."""

    _fields_ = [("data", ctypes.c_uint64 * 8)]


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", Algorithm),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


@functools.cache
def library() -> ctypes.CDLL | None:
    """cuBLASLt, or None without it."""
    if torch.version.cuda is None:
        return None
    try:
        lib = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None
    lib.cublasLtGetVersion.restype = ctypes.c_size_t
    lib.cublasLtMatmulDescCreate.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
    lib.cublasLtMatrixLayoutCreate.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint64,
        ctypes.c_uint64,
        ctypes.c_int64,
    ]
    for set_attribute in (lib.cublasLtMatmulDescSetAttribute, lib.cublasLtMatmulPreferenceSetAttribute):
        set_attribute.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
    lib.cublasLtMatmulPreferenceDestroy.argtypes = [ctypes.c_void_p]
    lib.cublasLtMatmulAlgoGetHeuristic.argtypes = [
        *[ctypes.c_void_p] * 7,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
    ]
    lib.cublasLtMatmul.argtypes = [*[ctypes.c_void_p] * 14, ctypes.c_size_t, ctypes.c_void_p]
    return lib


def loaded() -> ctypes.CDLL:
    """cuBLASLt, which is there."""
    found = library()
    assert found is not None, "see is_available"
    return found


def create(make: Callable[..., int], *args: object) -> ctypes.c_void_p:
    """What a function makes with these arguments and writes to its first.

    Raises:
        RuntimeError: it fails.
    """
    made = ctypes.c_void_p()
    status = make(ctypes.byref(made), *args)
    if status:
        raise RuntimeError(f"cuBLASLt made no descriptor: status {status} for {args}")
    return made
