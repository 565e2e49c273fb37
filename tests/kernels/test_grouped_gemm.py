"""Grouped GEMMs against float64: each expert's rows with its weight."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from fp8_megatron.dtypes import E4M3, E5M2, GROUP_ROWS
from fp8_megatron.kernels import ops
from fp8_megatron.kernels.reference import decode

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
#: An expert without rows, with one row, with all but one row of a whole group, and one with most of them.
COUNTS = ([37, 0, 1, 127, 300], [0, 0, 0, 0, 700], [128, 256, 128, 0, 0])
#: Behind the last expert's.
MORE_ROWS = 256
#: Of an output in BF16, and of one in E4M3 with a power of two as the scale: half a unit in the last place.
ROUNDING = {torch.bfloat16: 2.0**-8, E4M3: 2.0**-4}


def groups(counts: list[int]) -> tuple[Tensor, Tensor]:
    """Offsets of groups, and which rows are tokens."""
    padded = [-(-count // GROUP_ROWS) * GROUP_ROWS for count in counts]
    offsets = torch.tensor([0, *padded]).cumsum(0).int()
    is_row = torch.cat([torch.arange(size) < count for size, count in zip(padded, counts, strict=True)])
    return offsets, is_row


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(("n", "k"), [(48, 80), (384, 256)])
def test_products(device: str, counts: list[int], n: int, k: int) -> None:
    torch.manual_seed(0)
    offsets, is_row = groups(counts)
    a = (torch.randn(len(is_row), k) * is_row[:, None]).to(E5M2)
    b = torch.randn(len(counts), n, k).to(E4M3)
    scale_a, scale_b = torch.rand(1), torch.rand(len(counts), 4)[:, 0]
    out = ops.grouped_mm(*(tensor.to(device) for tensor in (a, b, scale_a, scale_b, offsets))).cpu()
    for e, (start, stop) in enumerate(pairwise(offsets)):
        exact = a[start:stop].double() @ b[e].double().t() * scale_a.double() * scale_b[e].double()
        assert_near(out[start:stop], exact, ROUNDING[torch.bfloat16])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(("n", "k"), [(128, 128), (384, 640)])
def test_products_of_blocks(device: str, counts: list[int], n: int, k: int) -> None:
    """Neighbouring blocks and tiles are of very different sizes."""
    torch.manual_seed(0)
    offsets, is_row = groups(counts)
    a, b = (torch.randn(len(is_row), k) * is_row[:, None]).to(E4M3), torch.randn(len(counts), n, k).to(E4M3)
    scale_a, tiles = random_scales(k // 128, len(is_row)), random_scales(len(counts), n // 128, k // 128)
    exact_a, exact_b = of_blocks(a, scale_a), b.double() * wide(wide(tiles, 1), 2)
    padded = torch.nn.functional.pad(tiles, (0, 3), value=torch.nan)
    for scale_b in (padded, padded.mT.contiguous().mT):  # of a weight, and of its transpose
        out = ops.grouped_mm(*(tensor.to(device) for tensor in (a, b, scale_a, scale_b, offsets))).cpu()
        for e, (start, stop) in enumerate(pairwise(offsets)):
            assert_near(out[start:stop], exact_a[start:stop] @ exact_b[e].t(), ROUNDING[torch.bfloat16])


def random_scales(*shape: int) -> Tensor:
    return 2.0 ** torch.randint(-6, 7, shape) * (1 + torch.rand(shape))


def wide(scales: Tensor, dim: int) -> Tensor:
    return scales.double().repeat_interleave(128, dim=dim)


def of_blocks(payload: Tensor, scales: Tensor) -> Tensor:
    """In float64."""
    return payload.double() * wide(scales.t(), 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("has_blocks", [False, True], ids=["tensors", "blocks"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, E4M3], ids=str)
def test_weight_gradients(device: str, counts: list[int], dtype: torch.dtype, has_blocks: bool) -> None:
    torch.manual_seed(0)
    n, k = 48, 256
    offsets, is_row = groups(counts)
    g_t = (torch.randn(n, len(is_row)) * is_row).to(E4M3 if has_blocks else E5M2)
    x_t = (torch.randn(k, len(is_row)) * is_row).to(E4M3)
    if has_blocks:
        scales = [random_scales(len(is_row) // 128, size) for size in (n, k)]
        g, x = (of_blocks(payload, own) for payload, own in zip((g_t, x_t), scales, strict=True))
    else:
        scales = [*torch.rand(2, 1)]
        g, x = (payload.double() * own.double() for payload, own in zip((g_t, x_t), scales, strict=True))
    before = torch.randn(len(counts), n, k).to(torch.float32 if dtype is E4M3 else dtype)
    operands = [tensor.to(device) for tensor in (g_t, x_t, *scales, offsets)]
    exact = torch.stack([g[:, start:stop] @ x[:, start:stop].t() for start, stop in pairwise(offsets)])
    if dtype is E4M3:
        out = torch.full(before.shape, 7.0, device=device).to(E4M3)
        block_scales = torch.empty(out.numel() // 128, device=device)
        ops.grouped_wgrad_to_fp8_(out, block_scales, *operands)
        decoded = decode(out.cpu().view(-1, 128), block_scales.cpu()[:, None]).view(exact.shape)
        largest = exact.view(-1, 128).abs().amax(dim=1).repeat_interleave(128).view(exact.shape)
        assert ((decoded - exact).abs() <= ROUNDING[E4M3] * exact.abs() + 2.0**-9 * largest).all()
        assert all((decoded[e] == 0).all() for e, count in enumerate(counts) if not count)
        return
    for adds in (False, True):
        out = before.to(device).clone()
        ops.grouped_wgrad_(out, *operands, adds=adds)
        assert_near(out.cpu(), exact + before.double() if adds else exact, ROUNDING[torch.bfloat16])


@pytest.mark.gpu
@pytest.mark.parametrize("has_blocks", [False, True], ids=["tensors", "blocks"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, E4M3], ids=str)
def test_weight_gradients_of_many_tiles(dtype: torch.dtype, has_blocks: bool) -> None:
    """Some 20 output tiles a multiprocessor, of 128 experts, a third of them without rows. All sums are exact, also
    in Hopper's short accumulator: of -1, 0 and 1, with powers of two as scales. Behind the last expert all is NaN."""
    generator = torch.Generator().manual_seed(0)
    n, k = 512, 768
    offsets = (128 * torch.randint(0, 3, (128,), generator=generator)).cumsum(0)
    offsets = torch.cat([torch.zeros(1), offsets]).int().cuda()
    end, rows = int(offsets[-1]), int(offsets[-1]) + MORE_ROWS
    g, x = (torch.randint(-1, 2, (size, rows), generator=generator).float().cuda() for size in (n, k))
    g[:, end:], x[:, end:] = torch.nan, torch.nan
    shapes = [(rows // 128, n), (rows // 128, k)] if has_blocks else [(1,), (1,)]
    scales = [2.0 ** torch.randint(-3, 4, shape, generator=generator).cuda() for shape in shapes]
    operands = [g.to(E5M2), x.to(E4M3), *scales, offsets]
    of_g, of_x = (wide(own.t(), 1) if has_blocks else own.double() for own in scales)
    g, x = g * of_g, x * of_x
    exact = torch.stack([g[:, start:stop] @ x[:, start:stop].t() for start, stop in pairwise(offsets.tolist())]).float()
    if dtype is E4M3:
        out, expected = (torch.full(exact.shape, 7.0, device="cuda").to(E4M3) for _ in range(2))
        its_scales, expected_scales = torch.full((2, exact.numel() // 128), torch.nan, device="cuda")
        ops.grouped_wgrad_to_fp8_(out, its_scales, *operands)
        ops.quantize_blockwise_(exact, expected.view(-1), expected_scales)
        assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(its_scales, expected_scales)
        return
    before = torch.randint(-64, 65, exact.shape, generator=generator).to(dtype).cuda()
    for adds in (False, True):
        out = before.clone()
        ops.grouped_wgrad_(out, *operands, adds=adds)
        assert torch.equal(out, (exact + before.float() if adds else exact).to(dtype))


def assert_near(actual: Tensor, exact: Tensor, rounding: float) -> None:
    """Within the rounding of the output and, of all values, Hopper's short accumulator (13 bits of a sum)."""
    spread = exact.abs().amax(dim=-1, keepdim=True) if exact.numel() else exact
    assert actual.shape == exact.shape
    assert ((actual.double() - exact).abs() <= rounding * exact.abs() + 2.0**-10 * spread).all()
