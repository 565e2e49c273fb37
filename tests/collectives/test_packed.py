"""A tensor in FP8 as one run of bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8_megatron.collectives.packed import packed, packed_bytes, packed_rows, unpacked, unpacked_rows
from fp8_megatron.dtypes import E4M3, E5M2, FP8_DTYPES
from fp8_megatron.quantization.stats import snr_db

#: The last has a block that is not full.
SHAPES = [(4, 2, 64), (3, 1, 128), (5, 3, 50)]


def values(shape: tuple[int, ...], device: str = "cpu") -> Tensor:
    """BF16 whose rows differ by powers of ten, as gradients of tokens do."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    sizes = 10.0 ** torch.randint(-6, 3, shape[:2], generator=torch.Generator().manual_seed(1))
    return (x * sizes[..., None]).bfloat16().to(device)


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_keep_the_formats_precision(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Half a unit in the last place: 2⁻⁴ of a value in E4M3, 2⁻³ in E5M2; or of the smallest normal of a block.

    E4M3's smallest subnormal is 2⁻⁹, and a block's amax is at least 224 of its scale: half a unit of subnormals is
    2⁻¹⁰ / 224 of the block's amax.
    """
    x = values(shape)
    run = packed(x, dtype)
    assert run.dtype is torch.uint8 and len(run) == packed_bytes(x.numel())
    assert packed_bytes(x.numel()) < 0.52 * x.nbytes or x.numel() < 1000
    back = unpacked(run, shape, dtype)
    assert back.dtype is torch.bfloat16 and back.shape == x.shape and back.is_contiguous()
    relative = 2.0**-4 if dtype is E4M3 else 2.0**-3
    flat, got = x.double().view(-1), back.double().view(-1)
    for start in range(0, x.numel(), 128):
        block = flat[start : start + 128]
        bound = relative * block.abs() * (1 + 2.0**-8) + block.abs().max() * 2.0**-17
        assert ((got[start : start + 128] - block).abs() <= bound).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_rows_are_packed_by_themselves(shape: tuple[int, int, int], count: int) -> None:
    parts = [(10.0**index * values(shape)).bfloat16() for index in range(count)]
    whole = torch.cat(parts) if parts else torch.empty(0, *shape[1:]).bfloat16()
    numel = shape[0] * shape[1] * shape[2]
    rows = packed_rows(whole, numel, E4M3)
    assert rows.shape == (count, packed_bytes(numel))
    assert all(torch.equal(row, packed(part, E4M3)) for row, part in zip(rows, parts, strict=True))
    back = unpacked_rows(rows, shape, E4M3)
    assert back.shape == (count * shape[0], *shape[1:]) and back.is_contiguous()
    for got, row in zip(back.split(shape[0]), rows, strict=count > 0):
        assert torch.equal(got, unpacked(row, shape, E4M3))


def test_gaussians_keep_31_db() -> None:
    """A mantissa of 3 bits errs by up to 2⁻⁴ at the bottom of a binade, evenly: 31.5 dB."""
    x = torch.randn(64, 2, 256).bfloat16()
    assert snr_db(unpacked(packed(x, E4M3), x.shape, E4M3), x) == pytest.approx(31.5, abs=0.3)
    assert snr_db(unpacked(packed(x, E5M2), x.shape, E5M2), x) == pytest.approx(25.5, abs=0.3)


def test_what_is_not_finite_stays_so_in_its_block() -> None:
    x = torch.randn(1, 4, 128).bfloat16()
    x[0, 1, 7], x[0, 3, 9] = torch.inf, torch.nan
    back = unpacked(packed(x, E4M3), x.shape, E4M3)
    assert back[0, 1].isnan().all() and back[0, 3].isnan().all() and back[0, ::2].isfinite().all()
    assert not unpacked(packed(torch.zeros_like(x), E4M3), x.shape, E4M3).any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("shape", [*SHAPES, (1024, 4, 512)])
def test_a_gpus_bytes_are_a_cpus(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x = values(shape)
    run, on_gpu = packed(x, dtype), packed(x.cuda(), dtype)
    assert torch.equal(run, on_gpu.cpu())
    assert torch.equal(unpacked(run, shape, dtype), unpacked(on_gpu, shape, dtype).cpu())
