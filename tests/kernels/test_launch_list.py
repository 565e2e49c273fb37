"""Launch lists on a CPU: csrc/launch_list.c compiled as it is, with functions of ours in the place of the driver's.

On a GPU, `tests/gpu/test_launch_lists.py` compares layers of models bit for bit.
"""

from __future__ import annotations

import ctypes
import importlib.util
import random
import shutil
import subprocess
import sys
import sysconfig
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8_megatron.kernels import launch_list, memory
from fp8_megatron.kernels.launch_list import LaunchLists

SOURCE = Path(__file__).parents[2] / "csrc" / "launch_list.c"
CPU, NO_STREAM = -1, 0
_POINTER = ctypes.c_void_p
_LAUNCH_KERNEL = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, *[ctypes.c_uint] * 7, _POINTER, _POINTER, _POINTER)
_MATMUL = ctypes.CFUNCTYPE(ctypes.c_int, *[_POINTER] * 14, ctypes.c_size_t, _POINTER)
_SET_ATTRIBUTE = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, ctypes.c_int, _POINTER, ctypes.c_size_t)


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    compiler, headers = shutil.which("cc"), Path(sysconfig.get_paths()["include"])
    if compiler is None or not (headers / "Python.h").is_file():
        pytest.skip("there is no C compiler with Python's headers")
    name = "fp8_megatron_launch_list"
    library = tmp_path_factory.mktemp("list") / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    options = ["-O2", "-Wall", "-Wextra", "-Werror", "-Wno-cast-function-type", "-shared", "-fPIC", f"-I{headers}"]
    subprocess.run([compiler, *options, str(SOURCE), "-o", str(library)], check=True, timeout=120)
    specification = importlib.util.spec_from_file_location(name, library)
    assert specification is not None and specification.loader is not None
    loaded = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(loaded)
    return loaded


class Operand:
    """What a list asks of a tensor."""

    def __init__(self, address: int, device: int = CPU) -> None:
        self.data_ptr, self.get_device = (lambda: address), (lambda: device)


class Driver:
    """Functions in the place of the driver's. A kernel adds: out [n] = a [n] + b [n] + number, FP32."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.status = 0
        self.device, self.stream, self.is_watched = CPU, NO_STREAM, False
        self.workspaces: dict[int, Tensor] = defaultdict(lambda: torch.empty(1))
        self.questions = (
            lambda: self.device,
            lambda device: self.stream,
            lambda: self.is_watched,
            lambda device, stream: self.workspaces[stream],
        )
        self._functions = (
            _LAUNCH_KERNEL(self._launch_kernel),
            _MATMUL(self._matmul),
            _SET_ATTRIBUTE(self._set_attribute),
        )
        self.addresses = [ctypes.cast(function, _POINTER).value or 0 for function in self._functions]

    def _launch_kernel(self, *arguments: Any) -> int:
        parameters = ctypes.cast(arguments[9], ctypes.POINTER(ctypes.POINTER(ctypes.c_uint64)))
        a, b, out, number, n = (parameters[place][0] for place in range(5))
        self.calls.append(("kernel", arguments[:9], (a, b, out, number, n)))
        if not self.status:
            add([as_vector(address, n) for address in (a, b, out)], number)
        return self.status

    def _matmul(self, *arguments: Any) -> int:
        factors = [ctypes.cast(arguments[place], ctypes.POINTER(ctypes.c_float))[0] for place in (2, 7)]
        algorithm = ctypes.string_at(arguments[12], 64)
        self.calls.append(("matmul", arguments, factors, algorithm))
        return self.status

    def _set_attribute(self, descriptor: int, attribute: int, value: int, size: int) -> int:
        address = ctypes.cast(value, ctypes.POINTER(ctypes.c_uint64))[0]
        self.calls.append(("attribute", descriptor, attribute, address, size))
        return 0


def as_vector(address: int, n: int) -> Any:
    return (ctypes.c_float * n).from_address(address)


def add(vectors: Sequence[Any], number: float) -> None:
    a, b, out = vectors
    for place in range(len(out)):
        out[place] = a[place] + b[place] + number


def launch(a: Tensor, b: Tensor, out: Tensor, number: int) -> None:
    """What a kernel's caller does: launch, and tell who records."""
    vectors = (a, b, out)
    add([as_vector(tensor.data_ptr(), out.numel()) for tensor in vectors], number)
    recording = launch_list.recording()
    if recording is not None:
        slots = tuple((recording.slot(tensor.data_ptr(), 4), 0) for tensor in vectors)
        parameters = (*slots, (-1, number), (-1, out.numel()))
        recording.add(lambda launches: launches.add_kernel(7, 3, 2, 128, 64, parameters), None)


def new(n: int = 4) -> Tensor:
    return memory.empty_vector(n, torch.float32, torch.device("cpu"))


@pytest.fixture
def driver(module: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver()
    device, stream, is_watched, workspace = made.questions
    launch_kernel, matmul, set_attribute = made.addresses
    symbols = launch_list._Symbols(launch_kernel, matmul, set_attribute, workspace, is_watched)
    monkeypatch.setattr(launch_list, "_symbols", lambda: symbols)
    monkeypatch.setattr(launch_list, "_module", lambda: module)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", device, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", stream, raising=False)
    yield made
    assert launch_list.running is None


def run(lists: LaunchLists, a: Tensor, b: Tensor, function: Callable[[], tuple[Tensor | None, ...]]) -> Any:
    return lists.run("key", (a, None, b), function)


def pairs(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Whole numbers, so that sums are exact. All are kept, so that addresses differ."""
    kept = [(torch.randint(-99, 99, (4,)).float(), torch.randint(-99, 99, (4,)).float()) for _ in range(count)]
    yield from kept


def test_a_list_computes_what_python_computes(driver: Driver) -> None:
    """(a + b + 1, a + (a + b + 1) + 2), and an input back."""
    lists = LaunchLists()

    def computed() -> tuple[Tensor | None, ...]:
        first, second = new(), new()
        launch(a, b, first, 1)
        launch(a, first, second, 2)
        return second, None, first, b

    results = []
    for call, (a, b) in enumerate(pairs(5)):
        second, nothing, first, again = run(lists, a, b, computed)
        assert nothing is None and again is b
        assert torch.equal(first, a + b + 1) and torch.equal(second, a + first + 2)
        assert len(driver.calls) == 2 * call, "the first call is recorded, later ones are lists"
        results.append((first, second))
    assert len({tensor.data_ptr() for pair in results for tensor in pair}) == 10, "outputs are new tensors"
    _, arguments, _ = driver.calls[0]
    function, width, height, depth, threads, *ones, shared_bytes, _ = arguments
    assert (function, width, height, depth, threads, ones, shared_bytes) == (7, 3, 2, 1, 128, [1, 1], 64)


def test_a_first_output_of_another_shape(driver: Driver) -> None:
    lists = LaunchLists()

    def computed() -> tuple[Tensor | None, ...]:
        out, rest = new(), new()
        launch(a, b, out, 1)
        launch(a, out, rest, 0)
        return out, rest

    for call, (a, b) in enumerate(pairs(6)):
        shape = (2, 1, 2) if call % 2 else (1, 4)
        out, rest = lists.run("key", (a, b), computed, shape)
        assert out.shape == shape and out.is_contiguous() and not out._is_view() and rest.shape == (4,)
        assert torch.equal(out.view(-1), a + b + 1) and torch.equal(rest, 2 * a + b + 1)
    assert len(driver.calls) == 2 * 4, "a list a shape"


def test_an_input_gets_no_other_shape(driver: Driver) -> None:
    lists = LaunchLists()

    def computed() -> tuple[Tensor | None, ...]:
        launch(a, b, new(), 1)
        return (a,)

    for a, b in pairs(5):
        assert lists.run("key", (a, b), computed, (2, 2))[0] is a
    assert not driver.calls


class Allocator:
    """Allocates; the memory stays, because launches come behind all allocations, as on a stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self._kept: list[Tensor] = []
        self._empty = memory._empty
        monkeypatch.setattr(memory, "_empty", self)

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        self._kept.append(self._empty(shape, dtype, device))
        self._kept[-1].view(torch.uint8).fill_(0xFF)
        self.sizes.append(self._kept[-1].nbytes)
        return self._kept[-1].view(shape)


def test_memory_that_is_not_returned_is_allocated_together(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third tensor lies where the first one was: two parts are enough for three."""
    lists, allocator = LaunchLists(), Allocator(monkeypatch)

    def computed() -> tuple[Tensor | None, ...]:
        first, second = new(100), new(100)
        launch(first, first, second, 0)
        del first
        third = new(100)
        launch(second, second, third, 0)
        out = new()
        launch(a, b, out, 3)
        return (out,)

    for a, b in pairs(4):
        allocator.sizes.clear()
        assert torch.equal(run(lists, a, b, computed)[0], a + b + 3)
    assert lists.num_lists == 1 and allocator.sizes == [16, 2 * 512]


def test_large_memory_that_python_gives_back_early_stays_alone(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together it would be held until the end, beside what is returned."""
    monkeypatch.setattr(launch_list, "_SMALL_BYTES", 400)
    lists, allocator = LaunchLists(), Allocator(monkeypatch)

    def computed() -> tuple[Tensor | None, ...]:
        large, small, other = new(100), new(10), new(10)
        launch(large, large, small, 0)
        del large
        launch(small, small, other, 0)
        out = new(200)
        launch(a, b, out, 3)
        return (out,)

    for _ in range(4):
        a, b = torch.ones(200), torch.ones(200)
        allocator.sizes.clear()
        assert torch.equal(run(lists, a, b, computed)[0], a + b + 3)
    assert lists.num_lists == 1 and allocator.sizes == [400, 800, 2 * 512]


@pytest.mark.parametrize("small_bytes", [0, 1000, 1 << 20])
@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_memory_computes_alike(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, seed: int, small_bytes: int
) -> None:
    """Tensors of many sizes, given back in any order: no value is written over before it is read."""
    monkeypatch.setattr(launch_list, "_SMALL_BYTES", small_bytes)
    lists, _ = LaunchLists(), Allocator(monkeypatch)

    def computed() -> tuple[Tensor | None, ...]:
        choose, made = random.Random(seed), [a, b]
        for number in range(12):
            out = new(choose.choice([1, 5, 130, 300]))
            wide = [tensor for tensor in made if len(tensor) >= len(out)]
            launch(choose.choice(wide), choose.choice(wide), out, number)
            made.append(out)
            del out, wide
            for _ in range(choose.choice([0, 1, 2])):
                if len(made) > 3:
                    del made[choose.randrange(2, len(made))]
        return tuple(choose.sample(made[2:], 1))

    for _ in range(5):
        a, b = (torch.randint(-9, 9, (300,)).float() for _ in "ab")
        expected = computed()
        assert torch.equal(run(lists, a, b, computed)[0], expected[0])
    assert lists.num_lists == 1


def test_memory_that_was_released_may_be_taken_again(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an allocator does: the third tensor lies where the first one was."""
    monkeypatch.setattr(launch_list, "_SMALL_BYTES", 0)
    lists = LaunchLists()
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    memory_of_all: list[Tensor] = []

    def allocate(*arguments: Any) -> Tensor:
        alive.append(sum(tensor() is not None for tensor in made))
        memory_of_all.append(torch.empty(4))  # stays: launches come behind all allocations, as on a stream
        tensor = memory_of_all[-1].view(4)
        made.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(memory, "_empty", allocate)

    def computed() -> tuple[Tensor | None, ...]:
        first = new()
        launch(a, b, first, 1)
        second = new()
        launch(first, b, second, 0)
        del first
        third = new()
        launch(second, second, third, 0)
        return (third,)

    for a, b in pairs(4):
        made.clear()
        alive.clear()
        (third,) = run(lists, a, b, computed)
        assert torch.allclose(third, 2 * (a + b + 1 + b))
        assert alive == [0, 1, 1], "the first tensor is gone when the third is made"
        del third
    assert lists.num_lists == 1


FAULTS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor | None, ...]]] = {}


def fault(function: Callable[[Tensor, Tensor], tuple[Tensor | None, ...]]) -> Any:
    FAULTS[function.__name__] = function
    return function


@fault
def an_operation_of_torch(a: Tensor, b: Tensor) -> tuple[Tensor | None, ...]:
    out = new()
    launch(a, b, out, 0)
    return (out.mul_(2.0),)


@fault
def memory_that_nobody_saw(a: Tensor, b: Tensor) -> tuple[Tensor | None, ...]:
    out = new()
    launch(a, _CONSTANT, out, 0)
    return (out,)


@fault
def an_output_that_nobody_saw(a: Tensor, b: Tensor) -> tuple[Tensor | None, ...]:
    launch(a, b, new(), 0)
    return (_CONSTANT,)


@fault
def nothing_launched(a: Tensor, b: Tensor) -> tuple[Tensor | None, ...]:
    return (a,)


_CONSTANT = torch.ones(4)


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_what_is_not_seen_whole_is_left_to_python(driver: Driver, name: str) -> None:
    lists = LaunchLists()
    for a, b in pairs(6):
        computed = partial(FAULTS[name], a, b)
        assert torch.equal(run(lists, a, b, computed)[0], computed()[0])  # type: ignore[arg-type]
    assert not driver.calls
    assert lists._known["key", None] == 3, "three calls are looked at, no more"


def test_one_tensor_twice_is_left_to_python(driver: Driver) -> None:
    lists = LaunchLists()
    for a, _ in pairs(5):

        def computed() -> tuple[Tensor | None, ...]:
            out = new()
            launch(a, a, out, 1)  # noqa: B023
            return (out,)

        assert torch.equal(run(lists, a, a, computed)[0], a + a + 1)
    assert not driver.calls


def test_a_misaligned_input_is_left_to_python(driver: Driver) -> None:
    lists = LaunchLists()

    def computed() -> tuple[Tensor | None, ...]:
        out = new()
        launch(a, b, out, 1)
        return (out,)

    for a, b in pairs(3):
        run(lists, a, b, computed)
    replay: Any = lists._known["key", None]
    calls = len(driver.calls)
    memory_of_a = torch.randn(64).view(torch.uint8)
    a = memory_of_a[2:18]
    assert a.data_ptr() % 4
    assert replay((a, None, b)) is None
    assert len(driver.calls) == calls, "nothing was queued"


def test_other_devices_and_hooks_are_left_to_python(driver: Driver) -> None:
    lists = LaunchLists()

    def computed() -> tuple[Tensor | None, ...]:
        out = new()
        launch(a, b, out, 1)
        return (out,)

    for a, b in pairs(3):
        run(lists, a, b, computed)
    replay: Any = lists._known["key", None]
    assert replay((a, None, b)) is not None
    driver.is_watched = True
    assert replay((a, None, b)) is None
    driver.is_watched, driver.device = False, 0
    assert replay((a, None, b)) is None
    assert lists.num_refused == 0
    assert torch.equal(run(lists, a, b, computed)[0], a + b + 1)
    assert lists.num_refused == 1


def test_each_stream_has_a_workspace(module: Any, driver: Driver) -> None:
    launches = module.LaunchList(*driver.addresses, (1,) * 4)
    launches.add_matmul(11, 12, (21, 22, 23, 24), 0.0, bytes(64), 4096, (0, 1, 2, 3), ())
    launches.surround(CPU, driver.questions, 4, (), (), None)
    operands = tuple(torch.ones(4) for _ in range(4))
    seen = []
    for stream in (5, 5, 6, 5):
        driver.stream = stream
        assert launches.replay(operands) == ()
        seen.append((driver.calls[-1][1][15], driver.calls[-1][1][13]))
    assert seen == [(stream, driver.workspaces[stream].data_ptr()) for stream in (5, 5, 6, 5)]


@pytest.mark.parametrize("place", range(4))
def test_an_error_of_python_is_raised(module: Any, driver: Driver, place: int) -> None:
    """Of any question, and of an allocation; nothing is queued, and nothing is left behind."""

    def fails(*arguments: object) -> Any:
        raise MemoryError("out of memory")

    launches = module.LaunchList(*driver.addresses, (1, 1, 1))
    launches.add_kernel(7, 1, 1, 32, 0, ((0, 0), (1, 0), (2, 0), (-1, 0), (-1, 4)))
    a, first = torch.ones(4), torch.ones(4)
    references = sys.getrefcount(first)
    questions = [*driver.questions]
    questions[place] = fails
    launches.surround(CPU, tuple(questions), 1, ((lambda: first, ()), (lambda: first, (0,))), (1,), None)
    with pytest.raises(MemoryError):
        launches.replay((a,))
    launches.surround(CPU, driver.questions, 1, ((lambda: first, ()), (fails, ())), (1,), None)
    with pytest.raises(MemoryError):
        launches.replay((a,))
    with pytest.raises(AttributeError, match="get_device"):
        launches.replay((7,))
    assert not driver.calls and sys.getrefcount(first) == references


def test_a_function_that_raises_leaves_no_recording(driver: Driver) -> None:
    lists = LaunchLists()

    def fails() -> tuple[Tensor | None, ...]:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run(lists, torch.ones(4), torch.ones(4), fails)
    assert launch_list.running is None


def test_memory_does_not_grow(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_list, "_MOST_KNOWN", 3)
    lists = LaunchLists()
    for key in range(10):
        lists.run(key, (torch.ones(4),), lambda: (None,))
    assert len(lists._known) <= 3


def test_a_gemm_gets_its_addresses_before_it_is_launched(module: Any, driver: Driver) -> None:
    launches = module.LaunchList(*driver.addresses, (256, 256, 1, 256, 16))
    algorithm = bytes(range(64))
    launches.add_matmul(11, 12, (21, 22, 23, 24), 1.0, algorithm, 4096, (0, 1, 2, 3), ((17, 4), (8, -1)))
    launches.surround(CPU, driver.questions, 5, (), (1, -1), None)
    driver.stream = 5
    operands = tuple(Operand(address) for address in (256, 512, 777, 1024, 48))
    assert launches.replay(operands) == (operands[1], None)
    scale, bias, (_, arguments, factors, kept) = driver.calls
    assert scale == ("attribute", 12, 17, 48, 8) and bias == ("attribute", 12, 8, 0, 8)
    assert factors == [1.0, 1.0] and kept == algorithm
    handle, descriptor, _, a, layout_a, b, layout_b, _, c, layout_c, d, layout_d, _, workspace, size, stream = arguments
    assert (handle, descriptor, size, stream) == (11, 12, 4096, 5)
    assert workspace == driver.workspaces[5].data_ptr()
    assert (a, b, c, d) == (256, 512, 777, 1024) and (layout_a, layout_b, layout_c, layout_d) == (21, 22, 23, 24)
    driver.calls.clear()
    assert launches.replay((Operand(128), *operands[1:])) is None and not driver.calls
    assert launches.replay((Operand(256, device=0), *operands[1:])) is None and not driver.calls


def test_a_failed_launch_is_an_error(module: Any, driver: Driver) -> None:
    launches = module.LaunchList(*driver.addresses, (1,))
    launches.add_kernel(7, 1, 1, 32, 0, ((-1, 0),) * 5)
    launches.surround(CPU, driver.questions, 1, (), (), None)
    driver.status = 9
    with pytest.raises(RuntimeError, match="launch 0 of a list, a kernel, failed with status 9"):
        launches.replay((None,))
    launches = module.LaunchList(*driver.addresses, (1,))
    launches.add_matmul(1, 2, (3, 4, 5, 6), 0.0, bytes(64), 0, (0, 0, -1, 0), ())
    launches.surround(CPU, driver.questions, 1, (), (), None)
    with pytest.raises(RuntimeError, match="launch 0 of a list, a GEMM, failed with status 9"):
        launches.replay((None,))


def test_what_makes_no_list_is_an_error(module: Any, driver: Driver) -> None:
    with pytest.raises(ValueError, match="an alignment of 3 bytes"):
        module.LaunchList(1, 2, 3, (3,))
    with pytest.raises(ValueError, match="65 slots"):
        module.LaunchList(1, 2, 3, (1,) * 65)
    launches = module.LaunchList(1, 2, 3, (1, 1))
    with pytest.raises(ValueError, match="there is no slot 2"):
        launches.add_kernel(7, 1, 1, 32, 0, ((2, 0),))
    with pytest.raises(ValueError, match="49 parameters"):
        launches.add_kernel(7, 1, 1, 32, 0, ((-1, 0),) * 49)
    with pytest.raises(ValueError, match="64 bytes"):
        launches.add_matmul(1, 2, (3, 4, 5, 6), 0.0, bytes(63), 0, (0, 0, -1, 0), ())
    surround = partial(launches.surround, CPU, driver.questions)
    with pytest.raises(TypeError, match="after surround"):
        launches.replay((None, None))
    with pytest.raises(ValueError, match="1 inputs and 0 allocations for 2 slots"):
        surround(1, (), (), None)
    with pytest.raises(ValueError, match="allocation 0 cannot follow the release of 0"):
        surround(1, ((new, (0,)),), (), None)
    with pytest.raises(ValueError, match="there is no output 2"):
        surround(2, (), (2,), None)
    surround(2, (), (), None)
    with pytest.raises(TypeError, match="a tuple of 2 tensors"):
        launches.replay((None,))
    assert launches.replay((None, None)) == (), "an empty list queues nothing"
