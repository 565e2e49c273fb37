"""Small memsets of a CUDA graph, as kernels.

cuBLASLt zeroes a counter in front of most GEMMs, and attention and sorts zero a few bytes too. In a graph such a memset
holds the kernels around it up: 9 µs a GEMM on an H100, where two kernels follow each other within 1. A kernel that
writes the same bytes takes 2. The driver's API replaces the nodes before the graph is made ready to run.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

logger = logging.getLogger(__name__)

#: CU_GRAPH_NODE_TYPE_MEMSET
_MEMSET = 2
#: A longer memset takes the bandwidth of the memory either way.
_MOST_BYTES = 1 << 14
_THREADS = 256

#: Writes the 32-bit `value` to `count` words from address `at` on.
_PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry fill_words(.param .u64 at, .param .u32 value, .param .u32 count)
{
    .reg .pred %past;
    .reg .b32 %word, %block, %size, %thread, %value, %count;
    .reg .b64 %at, %offset;
    ld.param.u64 %at, [at];
    ld.param.u32 %value, [value];
    ld.param.u32 %count, [count];
    mov.u32 %block, %ctaid.x;
    mov.u32 %size, %ntid.x;
    mov.u32 %thread, %tid.x;
    mad.lo.u32 %word, %block, %size, %thread;
    setp.ge.u32 %past, %word, %count;
    @%past bra DONE;
    cvta.to.global.u64 %at, %at;
    mul.wide.u32 %offset, %word, 4;
    add.u64 %at, %at, %offset;
    st.global.u32 [%at], %value;
DONE:
    ret;
}
\0"""


class _MemsetParams(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS"""

    _fields_ = [
        ("address", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("element_size", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    ]


class _KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2"""

    _fields_ = [
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    ]


@dataclass(frozen=True)
class Fill:
    """A memset of `count` words of 32 bits."""

    address: int
    value: int
    count: int

    @staticmethod
    def of(address: int, value: int, element_size: int, width: int, height: int) -> Fill | None:
        """The fill that a memset of `height` rows of `width` elements is; None: it is not short, or not of whole words.

        Args:
            value: its lowest `element_size` bytes, 1, 2 or 4, count.
        """
        nbytes = element_size * width
        if height != 1 or not 0 < nbytes <= _MOST_BYTES or nbytes % 4 or address % 4 or element_size not in (1, 2, 4):
            return None
        word = value & ((1 << 8 * element_size) - 1)
        for size in (1, 2):
            if size >= element_size:
                word |= word << 8 * size
        return Fill(address, word, nbytes // 4)


def replace_memsets(graph: int) -> int:
    """Replace the short memsets of a graph of the current device by kernels; returns how many.

    What the driver does not let change stays as it is.

    Args:
        graph: the ``cudaGraph_t``, captured and not yet instantiated.
    """
    num_replaced, refusal = 0, None
    try:
        driver = _driver()
        function, nodes = _fill_function(torch.cuda.current_device()), _nodes(driver.cuGraphGetNodes, graph)
    except (OSError, AttributeError, _DriverRefusal) as error:
        nodes, refusal = [], error
    for node in nodes:
        try:
            num_replaced += _replace(driver, graph, node, function)
        except _DriverRefusal as error:
            refusal = error
    if refusal is not None:
        logger.debug("memsets of a recording stay: %s", refusal)
    return num_replaced


class _DriverRefusal(Exception):
    """The driver refuses a call."""


def _replace(driver: ctypes.CDLL, graph: int, node: int, function: int) -> bool:
    kind = ctypes.c_int()
    _check("cuGraphNodeGetType", driver.cuGraphNodeGetType(node, ctypes.byref(kind)))
    if kind.value != _MEMSET:
        return False
    memset = _MemsetParams()
    _check("cuGraphMemsetNodeGetParams", driver.cuGraphMemsetNodeGetParams(node, ctypes.byref(memset)))
    fill = Fill.of(memset.address, memset.value, memset.element_size, memset.width, memset.height)
    if fill is None:
        return False
    before = _nodes(driver.cuGraphNodeGetDependencies, node)
    behind = _nodes(driver.cuGraphNodeGetDependentNodes, node)
    values = (ctypes.c_uint64(fill.address), ctypes.c_uint32(fill.value), ctypes.c_uint32(fill.count))
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    kernel = _KernelParams(function=function, arguments=pointers)
    kernel.grid[:], kernel.block[:] = (-(-fill.count // _THREADS), 1, 1), (min(fill.count, _THREADS), 1, 1)
    made = ctypes.c_void_p()
    status = driver.cuGraphAddKernelNode_v2(
        ctypes.byref(made), graph, _handles(before), len(before), ctypes.byref(kernel)
    )
    _check("cuGraphAddKernelNode", status)
    if behind:
        sources = _handles([made.value or 0] * len(behind))
        status = driver.cuGraphAddDependencies(graph, sources, _handles(behind), len(behind))
        if status:
            driver.cuGraphDestroyNode(made)
        _check("cuGraphAddDependencies", status)
    _check("cuGraphDestroyNode", driver.cuGraphDestroyNode(node))
    return True


def _nodes(query: Callable[..., int], of: int) -> list[int]:
    """The nodes that a call of the driver lists."""
    count = ctypes.c_size_t()
    _check("a query of graph nodes", query(of, None, ctypes.byref(count)))
    if not count.value:
        return []
    found = (ctypes.c_void_p * count.value)()
    _check("a query of graph nodes", query(of, found, ctypes.byref(count)))
    return [node or 0 for node in found[: count.value]]


def _handles(nodes: list[int]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(nodes))(*nodes)


def _check(name: str, status: int) -> None:
    if status:
        raise _DriverRefusal(f"{name} failed with CUDA driver error {status}")


@functools.cache
def _fill_function(device: int) -> int:
    """The kernel, loaded for a device."""
    driver = _driver()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(device):
        _check("cuModuleLoadData", driver.cuModuleLoadData(ctypes.byref(module), _PTX))
        _check("cuModuleGetFunction", driver.cuModuleGetFunction(ctypes.byref(function), module, b"fill_words"))
    return function.value or 0


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    handle, handles, number = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
    driver.cuGraphGetNodes.argtypes = [handle, handles, handles]
    driver.cuGraphNodeGetDependencies.argtypes = [handle, handles, handles]
    driver.cuGraphNodeGetDependentNodes.argtypes = [handle, handles, handles]
    driver.cuGraphNodeGetType.argtypes = [handle, handle]
    driver.cuGraphMemsetNodeGetParams.argtypes = [handle, handle]
    driver.cuGraphAddKernelNode_v2.argtypes = [handle, handle, handles, number, handle]
    driver.cuGraphAddDependencies.argtypes = [handle, handles, handles, number]
    driver.cuGraphDestroyNode.argtypes = [handle]
    driver.cuModuleLoadData.argtypes = [handle, ctypes.c_char_p]
    driver.cuModuleGetFunction.argtypes = [handle, handle, ctypes.c_char_p]
    return driver
