"""The products of Newton-Schulz on a GPU: against float64, symmetric bit for bit, and the same in any batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8_megatron.kernels import ops
from fp8_megatron.optimizer import newton_schulz
from fp8_megatron.optimizer.newton_schulz import polar_factor, steps_of
from fp8_megatron.quantization.stats import snr_db
from tests.optimizer.test_muon import exact

pytest.importorskip("triton")

from fp8_megatron.kernels.muon import products_triton
from fp8_megatron.kernels.muon.products_triton import Tiling

pytestmark = pytest.mark.gpu

#: Matrices, rows and columns: whole tiles, an odd number of them, less than one, and ends inside of a tile.
SHAPES = [(2, 256, 512), (3, 384, 64), (1, 40, 24), (2, 776, 328)]
TILINGS = [Tiling(128, 2, 64, 8, 3, 1), Tiling(128, 1, 64, 8, 3, 1), Tiling(64, 2, 64, 4, 4, 2)]


def stack(*shape: int, seed: int, is_transposed: bool = False) -> Tensor:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return matrices.mT.contiguous().mT if is_transposed else matrices


def rounded(got: Tensor, exact: Tensor) -> bool:
    """Half a unit of BF16 in the last place, 2⁻⁹ of a number, is 53 dB below it at least; FP32 sums add nothing."""
    return snr_db(got.cpu().float(), exact.float()) > 50.0


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(
    shape: tuple[int, int, int], is_transposed: bool, tiling: Tiling, monkeypatch: pytest.MonkeyPatch
) -> None:
    for choice in ("_lower_tiling", "_whole_tiling"):
        monkeypatch.setattr(products_triton, choice, lambda *_: tiling)
    b, m, _ = shape
    x = stack(*shape, seed=1, is_transposed=is_transposed)
    on_gpu, gram = x.cuda(), torch.full((b, m, m), torch.nan, dtype=torch.bfloat16).cuda()
    ops.symmetric_mm_(gram, on_gpu, alpha=0.5)
    assert rounded(gram, 0.5 * (x.double() @ x.double().mT))
    assert torch.equal(gram.cpu(), gram.cpu().mT)
    factor = torch.full_like(gram, torch.nan)
    ops.symmetric_mm_(factor, gram, addend=gram, alpha=0.25, beta=-2.0)
    a = gram.cpu().double()
    assert rounded(factor, 0.25 * (a @ a) - 2.0 * a)
    assert torch.equal(factor.cpu(), factor.cpu().mT)
    made = torch.full_like(on_gpu, torch.nan)
    ops.symmetric_times_(made, factor, on_gpu, beta=-3.0)
    assert made.stride() == on_gpu.stride()
    assert rounded(made, factor.cpu().double() @ x.double() - 3.0 * x.double())


def test_a_nan_is_not_hidden() -> None:
    x = stack(2, 256, 128, seed=2)
    x[1, 200, 7] = torch.nan
    gram = torch.zeros(2, 256, 256, dtype=torch.bfloat16).cuda()
    ops.symmetric_mm_(gram, x.cuda())
    found = gram.cpu().isnan()
    assert not found[0].any() and found[1, 200].all() and found[1, :, 200].all() and found.sum() == 2 * 256 - 1


@pytest.mark.parametrize("shape", [(3, 128, 192), (3, 192, 128)], ids=str)
def test_a_matrix_has_the_same_bits_in_any_batch(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """And those of the iteration, 30 dB as with torch's products (tests/optimizer/test_muon.py)."""
    monkeypatch.setattr(newton_schulz, "_HALVED_FROM", 128)
    x, steps = stack(*shape, seed=3), steps_of("quintic", 5)
    whole = polar_factor(x.cuda(), steps).cpu()
    for one, matrix in zip(whole, x, strict=True):
        assert torch.equal(polar_factor(matrix[None].cuda(), steps).cpu()[0], one)
        assert snr_db(one.float(), exact(matrix).float()) > 30.0
