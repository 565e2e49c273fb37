"""Launches without Triton's argument binder: the kernel that Triton would take, with the same arguments."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu

if torch.cuda.is_available():
    import triton
    import triton.language as tl

    from fp8_megatron.kernels import launch
    from fp8_megatron.kernels.launch import PreparedLaunch

    @triton.jit
    def _add(x, out, n, factor, TILE: tl.constexpr, DOUBLE: tl.constexpr):  # type: ignore[no-untyped-def]
        offsets = tl.program_id(0) * TILE + tl.arange(0, TILE)
        value = tl.load(x + offsets, mask=offsets < n, other=0.0).to(tl.float32) + factor
        if DOUBLE:
            value *= 2
        tl.store(out + offsets, value, mask=offsets < n)


class Counted:
    """Counts Triton's own launches of a kernel."""

    def __init__(self) -> None:
        self.kernel = _add
        self.ordinary = 0
        self.run = self.kernel.run
        self.launches: dict[object, PreparedLaunch] = {}

        def run(*args, **options):  # type: ignore[no-untyped-def]
            self.ordinary += 1
            return self.run(*args, **options)

        self.kernel.run = run

    def launch(self, n: int, factor: float = 3, *, double: bool = False, num_warps: int = 4) -> PreparedLaunch:
        """The one launch with these numbers."""
        made = PreparedLaunch(self.kernel, (triton.cdiv(n, 128),), n, factor, 128, double, num_warps=num_warps)
        return self.launches.setdefault((n, factor, double, num_warps), made)

    def __call__(self, x: Tensor, factor: float = 3, *, double: bool = False, num_warps: int = 4) -> Tensor:
        """x [n] + factor, twice that if `double`."""
        out = torch.full((x.numel() + 64,), -1.0, device=x.device)
        n = x.numel()
        self.launch(n, factor, double=double, num_warps=num_warps)(x, out)
        expected = (x.float() + factor) * (2 if double else 1)
        assert torch.equal(out[:n].cpu(), expected.cpu()), (n, x.dtype, factor, double)
        assert bool((out[n:] == -1).all())
        return out


@pytest.fixture
def counted() -> Iterator[Counted]:
    made = Counted()
    yield made
    made.kernel.run = made.run


def numbers(n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randint(-50, 50, (n,), generator=torch.Generator().manual_seed(n)).to(dtype).cuda()


def test_repeated_launches_leave_the_binder_out(counted: Counted) -> None:
    """Each launch has new memory."""
    for seed in range(5):
        counted(numbers(1000) + seed)
    assert counted.ordinary == 1


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 128, 1000, 1024, 4096, 4097])
def test_numbers_that_triton_specialises(counted: Counted, n: int) -> None:
    """1 becomes a constant, and multiples of 16 give wider loads: no kernel of one serves another."""
    for _ in range(3):
        counted(numbers(n))
        for other in (1, 16, 33, 2048):
            counted(numbers(other))
    assert counted.ordinary == len({n, 1, 16, 33, 2048})


def test_other_dtypes_options_and_constants_are_other_kernels(counted: Counted) -> None:
    for _ in range(2):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int32):
            for double in (False, True):
                for num_warps in (1, 4):
                    counted(numbers(1000, dtype), double=double, num_warps=num_warps)
        for factor in (1, 2, 16, -5, 2**40):
            counted(numbers(64, torch.float32) * 0, factor)
    assert counted.ordinary == 4 * 2 * 2 + 5


def test_unaligned_addresses_take_tritons_launch(counted: Counted) -> None:
    x = numbers(1001)
    for _ in range(3):
        counted(x[:1000])
        counted(x[1:])  # 4 bytes behind a multiple of 16
        counted(x[:1000])
    assert counted.ordinary == 1 + 3
    fresh = Counted()
    try:
        for _ in range(2):
            fresh(x[1:])
        assert fresh.ordinary == 2, "an unaligned launch must not be the one that is kept"
        fresh(x[:1000])
    finally:
        fresh.kernel.run = fresh.run


def test_current_stream(counted: Counted) -> None:
    counted(numbers(1000))
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    x = numbers(1000)
    out = torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        counted.launch(1000)(x, out)
    assert bool((out == 0).all()), "the launch was recorded, not run"
    graph.replay()
    assert torch.equal(out, x + 3)
    assert counted.ordinary == 1


def test_a_tensor_of_the_cpu_is_an_error(counted: Counted) -> None:
    counted(numbers(1000))
    out = torch.zeros(1064)
    with pytest.raises(ValueError, match="cpu tensor"):
        counted.launch(1000)(numbers(1000), out)


def test_hooks_see_every_launch(counted: Counted) -> None:
    seen: list[str] = []

    def hook(metadata) -> None:  # type: ignore[no-untyped-def]
        seen.append(metadata.get()["name"])

    counted(numbers(1000))
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        counted(numbers(1000))
        counted(numbers(1000))
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert seen == ["_add", "_add"]
    counted(numbers(1000))
    assert counted.ordinary == 3 and len(seen) == 2


def test_unknown_versions_take_tritons_launch(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_VERSIONS", ())
    out = torch.zeros(1000, device="cuda")
    for _ in range(3):
        counted.launch(1000)(numbers(1000), out)
    assert torch.equal(out, numbers(1000) + 3)
    assert counted.ordinary == 3
