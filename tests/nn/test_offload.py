"""Activations on the host: what comes back is what left, and the device holds two layers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from fp8_megatron.nn import offload
from fp8_megatron.nn.offload import PAGE_BYTES, ActivationOffload
from fp8_megatron.training.rank_build import LiveBytes

CPU, META = torch.device("cpu"), torch.device("meta")
#: FP32 elements of a row block that is large enough to leave.
SIZE = 2**16
LAYER_BYTES = 4 * SIZE


class Square(torch.autograd.Function):
    """x² that keeps two views of x, one with strides, and the output."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        y = x * x
        ctx.save_for_backward(x[: SIZE // 2], x.view(2, -1).t(), y)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        half, rows, y = ctx.saved_tensors
        assert (
            rows.stride() == (1, SIZE // 2) and half.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()
        )
        x = rows.t().reshape(-1)
        if not x.is_meta:
            assert torch.equal(x[: SIZE // 2], half) and torch.equal(y, x * x)
        return 2 * x * grad


def forward(moved: ActivationOffload | None, x: Tensor, num_layers: int, num_leaving: int) -> Tensor:
    if moved is None:
        for _ in range(num_layers):
            x = Square.apply(x)
        return x
    with moved.running([]):
        for index in range(num_layers):
            moved.enter_layer(leaves=index < num_leaving)
            x = Square.apply(x)
    return x


def gradients(moved: ActivationOffload | None, num_leaving: int) -> list[Tensor]:
    """Two micro-batches in flight at once, backward in the order of 1F1B."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.rand(SIZE, generator=generator).add_(0.5).requires_grad_() for _ in range(3)]
    cotangent = torch.randn(SIZE, generator=generator)
    outputs: list[Tensor] = []
    for index, x in enumerate(inputs):
        outputs.append(forward(moved, x, 4, num_leaving))
        if index:
            outputs[index - 1].backward(cotangent)
    outputs[-1].backward(cotangent)
    return [x.grad for x in inputs if x.grad is not None]


class Late:
    """Copies run as late as a stream may run them: when somebody waits for them."""

    def __init__(self) -> None:
        self.pending: list[Callable[[], None]] = []
        self.num_run = self.most = 0

    def launch(self, copies: Callable[[], None]) -> int:
        self.pending.append(copies)
        self.most = max(self.most, len(self.pending))
        return self.num_run + len(self.pending)

    def wait(self, end: int) -> None:
        while self.num_run < end:
            self.pending.pop(0)()
            self.num_run += 1


@pytest.mark.parametrize("num_leaving", [1, 3, 4])
def test_every_copy_is_waited_for(monkeypatch: pytest.MonkeyPatch, num_leaving: int) -> None:
    """Values are read after their copy ran, and memory is given back after it."""
    stream, free = Late(), ActivationOffload._free

    def checked(moved: ActivationOffload, layer: offload._Layer) -> None:
        free(moved, layer)
        assert stream.num_run >= layer.departure

    monkeypatch.setattr(ActivationOffload, "_free", checked)
    moved = ActivationOffload(CPU, stream)
    for own, expected in zip(gradients(moved, num_leaving), gradients(None, 0), strict=True):
        assert torch.equal(own, expected)
    assert stream.most <= 3  # nobody runs ahead of what was waited for


@pytest.mark.parametrize("num_leaving", [1, 3, 4])
@pytest.mark.parametrize(("page_bytes", "pages"), [(PAGE_BYTES, 1), (3 * LAYER_BYTES // 8, 6)], ids=["whole", "cut"])
def test_the_bits_come_back(monkeypatch: pytest.MonkeyPatch, num_leaving: int, page_bytes: int, pages: int) -> None:
    """Also of storages that begin and end within pages: two of 8/3 pages each, in one run."""
    monkeypatch.setattr(offload, "PAGE_BYTES", page_bytes)
    moved = ActivationOffload(CPU)
    for own, expected in zip(gradients(moved, num_leaving), gradients(None, 0), strict=True):
        assert torch.equal(own, expected)
    # Two micro-batches are in flight, and a layer's two storages share their pages.
    assert moved.host.nbytes == 2 * num_leaving * pages * page_bytes


def test_the_device_holds_two_layers() -> None:
    """Counted on the meta device. Each layer's output is the next one's input, so it has a storage of its own."""
    peaks = []
    for num_layers in (8, 16):
        live = LiveBytes()
        with live:
            moved = ActivationOffload(META)
            x = torch.empty(SIZE, device=META, requires_grad=True)
            y = forward(moved, x, num_layers, num_layers - 1)
            after_forward = live.now
            live.peak = 0
            torch.autograd.backward(y, torch.empty(SIZE, device=META), inputs=[x])
        peaks.append((after_forward, live.peak))
    assert peaks[0] == peaks[1]
    # The caller's input, and the last layer's input and output. Backward has two layers of two storages, the caller's
    # input, output and cotangent, the gradients of both layers, and a temporary one.
    after_forward, peak = peaks[0]
    assert after_forward == 3 * LAYER_BYTES and peak <= 10 * LAYER_BYTES


def test_parameters_and_small_tensors_stay() -> None:
    weight = torch.nn.Parameter(torch.rand(SIZE))
    shared, small = torch.rand(SIZE), torch.rand(8)
    moved = ActivationOffload(CPU)
    with moved.running([weight, shared]):
        moved.enter_layer(leaves=True)
        y = (weight * shared).sum() + (small * weight[:8]).sum()
        moved.enter_layer(leaves=False)
    assert moved.host.nbytes == 0
    y.backward()
    expected = shared.clone()
    expected[:8] += small
    assert weight.grad is not None and torch.equal(weight.grad, expected)


def test_a_graph_without_backward_frees_its_pages() -> None:
    moved = ActivationOffload(CPU)
    x = torch.rand(SIZE, requires_grad=True)
    sizes = []
    for _ in range(3):
        forward(moved, x, 3, 2)
        sizes.append(moved.host.nbytes)
    assert sizes[0] == 2 * PAGE_BYTES and all(before == after for before, after in pairwise(sizes))
