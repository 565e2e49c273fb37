"""The CUDA C++ kernels of csrc/. They are compiled for the present GPU at first use; no build step is needed.

NVRTC, which comes with torch, compiles them in a fraction of a second. The sources need no header. Macros specialise a
kernel (for a hidden size, a norm).
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

#: A symbolic link in a checkout.
_FOLDER = Path(__file__).parents[1] / "csrc"
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
#: The first GPUs with instructions that only they have (wgmma): their target ends with an "a".
_FIRST_WITH_OWN_INSTRUCTIONS = (9, 0)
#: Of cuda.h: bytes, no interleaving, 128 bytes swizzled, 256 bytes at once into L2, zeros outside of the tensor.
_TENSOR_MAP_UINT8, _NOT_INTERLEAVED, _SWIZZLE_128_BYTES, _L2_PROMOTION_256_BYTES, _ZEROS_OUTSIDE = 0, 0, 3, 3, 0
_TENSOR_MAP_ALIGNMENT = 64
_INVALID_CONTEXT = 201


class ExtensionError(RuntimeError):
    """A kernel that cannot be compiled or loaded here, with the reason."""


class TensorMap(ctypes.Structure):
    """A CUtensorMap: how the copy engine finds a box of a tensor."""

    _fields_ = [("words", ctypes.c_uint64 * 16)]


def by_value(argument: TensorMap) -> TensorMap:
    """The type of a parameter that is a `TensorMap`, in `Kernel`'s list."""
    return argument


class Kernel:
    """A kernel loaded on torch's current GPU, launched on torch's current stream, from any thread.

    The driver wants the GPU's context to be current; a new thread has none until the CUDA runtime needs it.

    Args:
        cubin: the result of `compile_source`. function: the kernel's name in it.
        threads: of a block. shared_bytes: dynamic shared memory of a block.
        parameters: a ctypes type for each of the kernel's parameters, or `by_value`.
    """

    def __init__(
        self,
        cubin: bytes,
        function: str,
        *,
        threads: int,
        shared_bytes: int,
        parameters: Sequence[Callable[[Any], Any]],
    ) -> None:
        self._cubin = cubin  # the driver need not have copied it
        _enter_context(torch.cuda.current_device())
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(_driver().cuModuleLoadData(ctypes.byref(module), cubin), "cuModuleLoadData")
        _check(_driver().cuModuleGetFunction(ctypes.byref(self._function), module, function.encode()), function)
        status = _driver().cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
        _check(status, f"{shared_bytes} bytes of shared memory for {function}")
        self._threads, self._shared_bytes, self._parameters = threads, shared_bytes, tuple(parameters)

    def launch(self, blocks: int, device: torch.device, *arguments: int | TensorMap) -> None:
        """Queue the kernel. Addresses are plain numbers; the caller keeps the memory until the stream has run it."""
        values = [kind(argument) for kind, argument in zip(self._parameters, arguments, strict=True)]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        given = self._function, blocks, 1, 1, self._threads, 1, 1, self._shared_bytes, stream, pointers, None
        status = _driver().cuLaunchKernel(*given)
        if status == _INVALID_CONTEXT:
            _enter_context(device.index)
            status = _driver().cuLaunchKernel(*given)
        _check(status, "cuLaunchKernel")


def compile_source(name: str, macros: Mapping[str, int], capability: tuple[int, int]) -> bytes:
    """The cubin of csrc/`name` for GPUs of a compute capability.

    Raises:
        ExtensionError: no NVRTC, no such file, or NVRTC's own messages.
    """
    nvrtc = _nvrtc()
    target = f"sm_{capability[0]}{capability[1]}{'a' * (capability >= _FIRST_WITH_OWN_INSTRUCTIONS)}"
    options = [f"--gpu-architecture={target}", "--std=c++17"]
    options += [f"-D{macro}={int(value)}" for macro, value in macros.items()]
    program = ctypes.c_void_p()
    source = _source(name)
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, name.encode(), 0, None, None), name)
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), given):
            log = _read(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).rstrip(b"\0").decode()
            raise ExtensionError(f"csrc/{name} does not compile with {' '.join(options)}:\n{log}")
        return _read(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def tensor_map(address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> TensorMap:
    """The map of a tensor of bytes, whose boxes are swizzled by 128 bytes in shared memory, with zeros outside of it.

    Args:
        address: a multiple of 16.
        sizes: the innermost dimension first. strides: in bytes, of the dimensions behind it; multiples of 16.
        box: the size of a copy in each dimension; 128 in the innermost one.

    Raises:
        ExtensionError: the driver refuses.
    """
    rank = len(sizes)
    room = ctypes.create_string_buffer(ctypes.sizeof(TensorMap) + _TENSOR_MAP_ALIGNMENT)
    begin = -ctypes.addressof(room) % _TENSOR_MAP_ALIGNMENT
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.addressof(room) + begin,
        _TENSOR_MAP_UINT8,
        rank,
        address,
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        _NOT_INTERLEAVED,
        _SWIZZLE_128_BYTES,
        _L2_PROMOTION_256_BYTES,
        _ZEROS_OUTSIDE,
    )
    _check(status, f"cuTensorMapEncodeTiled of sizes {list(sizes)}, strides {list(strides)}, box {list(box)}")
    return TensorMap.from_buffer_copy(room, begin)


def _read(program, get_size, get) -> bytes:  # type: ignore[no-untyped-def]
    size = ctypes.c_size_t()
    _check(get_size(program, ctypes.byref(size)), "NVRTC")
    buffer = ctypes.create_string_buffer(size.value)
    _check(get(program, buffer), "NVRTC")
    return buffer.raw


def _source(name: str) -> bytes:
    try:
        return (_FOLDER / name).read_bytes()
    except OSError as error:
        raise ExtensionError(f"{error}: fp8_megatron is not installed whole; install it again") from error


def _check(status: int, what: str) -> None:
    if status:
        raise ExtensionError(f"{what} failed with CUDA error {status}")


def _enter_context(device: int) -> None:
    """Make the context that torch uses the thread's current one, as the CUDA runtime does when it is first needed."""
    _check(_driver().cuCtxSetCurrent(_context(device)), "cuCtxSetCurrent")


@functools.cache
def _context(device: int) -> ctypes.c_void_p:
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    _check(_driver().cuDeviceGet(ctypes.byref(handle), device), "cuDeviceGet")
    _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), "cuDevicePrimaryCtxRetain")
    return context


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    number, pointer = ctypes.c_uint, ctypes.c_void_p
    driver.cuLaunchKernel.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
    driver.cuTensorMapEncodeTiled.argtypes = [pointer, number, number, *[pointer] * 5, *[number] * 4]
    driver.cuModuleLoadData.argtypes = [pointer, ctypes.c_char_p]
    driver.cuModuleGetFunction.argtypes = [pointer, pointer, ctypes.c_char_p]
    driver.cuFuncSetAttribute.argtypes = [pointer, ctypes.c_int, ctypes.c_int]
    return driver


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """NVRTC of torch's CUDA, from the system's paths or from the wheel that torch depends on."""
    if torch.version.cuda is None:
        raise ExtensionError("this torch has no CUDA")
    major = torch.version.cuda.split(".")[0]
    name = f"libnvrtc.so.{major}"
    packages = Path(torch.__file__).parents[1] / "nvidia"
    beside = [packages / f"cu{major}" / "lib" / name, packages / "cuda_nvrtc" / "lib" / name]
    for candidate in [*(str(path) for path in beside if path.is_file()), name]:
        try:
            return ctypes.CDLL(candidate)
        except OSError as error:
            logger.debug("%s: %s", candidate, error)
    raise ExtensionError(f"there is no {name}: install nvidia-cuda-nvrtc")
