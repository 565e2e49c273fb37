"""A block-scaled weight cast to FP8 in one launch: the bits of decoding it first, for every shape and block."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8_megatron.dtypes import E4M3, E5M2, MAX_FINITE, STATE_BLOCK
from fp8_megatron.formats.tensorwise import Tensorwise
from fp8_megatron.kernels import ops
from fp8_megatron.kernels.quantize import blockwise
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from fp8_megatron.quantization.weight_views import CastScale
from tests.kernels.test_triton import Guards, assert_same, guards  # noqa: F401

#: Parts of a tile, one tile, tiles whose rows start inside a block, several tiles, columns that are no whole tile.
SHAPES = ((16, 16), (64, 64), (128, 128), (48, 272), (272, 336), (132, 640), (256, 256), (144, 1040), (384, 512))
BLOCKS = (16, 32, 64, 128, 256, 512, 4096)
CASES = [(shape, block) for shape in SHAPES for block in BLOCKS if shape[0] * shape[1] % block == 0]


def stored(shape: tuple[int, int], block: int) -> tuple[Tensor, Tensor]:
    """FP16 [N, K] with scales that differ from block to block, zeros, values that saturate, and a NaN block."""
    generator = torch.Generator().manual_seed(shape[0] * shape[1] + block)
    numel = shape[0] * shape[1]
    exponents = torch.randint(-8, 9, (numel // block,), generator=generator)
    x = torch.randn(numel, generator=generator) * torch.exp2(exponents.float()).repeat_interleave(block)
    x[::97] = 0.0
    if numel // block > 4:
        x[3 * block + 1] = torch.nan
    payload, scales = torch.empty(numel, dtype=torch.float16), torch.empty(numel // block)
    blockwise.quantize_blockwise_(x, payload, scales)
    return payload.view(shape), scales


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize(("shape", "block"), CASES, ids=str)
def test_the_bits_of_decoding_first(shape: tuple[int, int], block: int, dtype: torch.dtype, guards: Guards) -> None:  # noqa: F811
    weight, scales = stored(shape, block)
    scale = torch.tensor([8.0 / MAX_FINITE[dtype]])
    on_gpu = [guards.copy(tensor) for tensor in (weight, scales, scale)]
    for transposed in (False, True):
        expected = ops.quantize_weight(weight, scales, scale, dtype, transposed=transposed)
        assert_same(ops.quantize_weight(*on_gpu, dtype, transposed=transposed), expected)
    decoded = ops.dequantize_blockwise(on_gpu[0].view(-1), on_gpu[1]).view(shape)
    both = ops.quantize_with_scale(decoded, on_gpu[2], dtype, transposed=True)
    for transposed, payload in enumerate(both):
        assert_same(ops.quantize_weight(*on_gpu, dtype, transposed=bool(transposed)), payload.cpu())


@pytest.mark.gpu
def test_large_weight(guards: Guards) -> None:  # noqa: F811
    """More programs than multiprocessors, in the block that the optimizer stores."""
    weight, scales = stored((4096, 1024), STATE_BLOCK)
    scale = torch.tensor([0.5])
    for transposed in (False, True):
        expected = ops.quantize_weight(weight, scales, scale, E4M3, transposed=transposed)
        actual = ops.quantize_weight(weight.cuda(), scales.cuda(), scale.cuda(), E4M3, transposed=transposed)
        assert_same(actual, expected)


@pytest.mark.gpu
def test_rows_in_no_fours_have_no_transpose() -> None:
    weight, scales = stored((18, 128), 256)
    with pytest.raises(ValueError, match="M=18"):
        ops.quantize_weight(weight.cuda(), scales.cuda(), torch.ones(1).cuda(), E4M3, transposed=True)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("shape", "block"), CASES, ids=str)
def test_specification(shape: tuple[int, int], block: int, transposed: bool) -> None:
    weight, scales = stored(shape, block)
    scale = torch.tensor([0.02])
    value = weight.float().view(-1, block) * scales[:, None]
    expected = (value.view(shape) * scale.reciprocal()).clamp(-448.0, 448.0).to(E4M3)
    payload = ops.quantize_weight(weight, scales, scale, E4M3, transposed=transposed)
    assert payload.is_contiguous()
    assert_same(payload.t() if transposed else payload, expected)


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=pytest.mark.gpu,
        ),
    ],
)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(3, 64, 128), (5, 48, 272), (1, 64, 64)], ids=str)
def test_each_expert_has_its_own_scale(shape: tuple[int, int, int], transposed: bool, device: str) -> None:
    """Scales lie four floats apart, as the optimizer keeps them."""
    experts, rows, columns = shape
    weight, scales = (tensor.to(device) for tensor in stored((experts * rows, columns), 64))
    weight, table = weight.view(shape), torch.rand(experts, 4, device=device).add_(0.01)
    payload = ops.quantize_weight(weight, scales, table[:, 0], E4M3, transposed=transposed)
    assert payload.is_contiguous()
    parts = zip(weight, scales.view(experts, -1), table, strict=True)
    for cast, (matrix, own, scale) in zip(payload, parts, strict=True):
        expected = ops.quantize_weight(matrix, own, scale[:1], E4M3, transposed=transposed)
        assert_same(cast, expected.cpu())


@pytest.mark.parametrize("transposed", [False, True])
def test_a_weight_with_a_kept_scale_is_cast_with_it(transposed: bool) -> None:
    """The operand of a layer's GEMM has the bits of the weight's FP32 values under the scale that its owner keeps."""
    payload, scales = stored((48, 272), 16)
    payload, scales = payload.nan_to_num(), scales.nan_to_num()
    weight = ScaledTensor(payload, scales)
    weight.cast_scale = CastScale(torch.tensor([0.03]), payload.numel())
    weight.cast_scale.is_current = True
    operand = weight.gemm_operand(Tensorwise(E4M3), transposed=transposed)
    value = weight.dequantize()
    expected, _ = ops.quantize_with_scale(value.t().contiguous() if transposed else value, torch.tensor([0.03]), E4M3)
    assert_same(operand.payload, expected)
    assert operand.scale is weight.cast_scale.scale and operand.payload_t is None
    weight.cast_scale.is_current = False
    assert weight.gemm_operand(Tensorwise(E4M3)).scale is not weight.cast_scale.scale
