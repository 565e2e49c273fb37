"""Parts of a ScaledTensor: views of rows, writes to them, and the scale that parts on several ranks share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8_megatron.dtypes import E4M3, STATE_BLOCK
from fp8_megatron.kernels import ops
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from fp8_megatron.quantization.weight_shards import agree_on_scale_
from tests.harness.ranks import RankPool, on_default_group


def random_matrix(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fp16_blockwise(value: Tensor) -> ScaledTensor:
    payload, scales = torch.empty(value.numel(), dtype=torch.float16), torch.empty(value.numel() // STATE_BLOCK)
    ops.quantize_blockwise_(value.reshape(-1), payload, scales)
    return ScaledTensor(payload.view(value.shape), scales)


@pytest.mark.parametrize("make", [ScaledTensor.quantize, fp16_blockwise], ids=["fp8", "fp16"])
def test_rows_are_views_with_the_same_values(make) -> None:
    whole = make(random_matrix(64, 32))
    values = whole.dequantize()
    parts = [*whole.split(16), whole[8:24], whole.narrow(0, 56, 8), *torch.chunk(whole, 2)]
    starts = [0, 16, 32, 48, 8, 56, 0, 32]
    for part, start in zip(parts, starts, strict=True):
        assert isinstance(part, ScaledTensor)
        assert torch.equal(part.dequantize(), values[start : start + part.shape[0]])
        assert part.payload.untyped_storage().data_ptr() == whole.payload.untyped_storage().data_ptr()
    assert torch.equal(whole.view(-1).dequantize(), values.view(-1))
    assert torch.equal(whole.view(-1).as_strided((2048,), (1,)).dequantize(), values.view(-1))


def test_columns_of_one_scale_are_views_too() -> None:
    whole = ScaledTensor.quantize(random_matrix(64, 32))
    part = whole.chunk(2, dim=1)[1]
    assert part.stride() == (32, 1) and torch.equal(part.dequantize(), whole.dequantize()[:, 16:])


def test_rows_that_cut_a_block_are_refused_with_the_numbers() -> None:
    with pytest.raises(NotImplementedError, match=r"128 elements from 0 .*\(64, 32\).* blocks of 256"):
        fp16_blockwise(random_matrix(64, 32)).split(4)


def test_a_shard_padded_as_fully_shard_pads_keeps_its_bits() -> None:
    whole = ScaledTensor.quantize(random_matrix(16, 32))
    last = whole.split(6)[2]
    padded = whole.new_zeros(6, 32)
    padded.narrow(0, 0, 4).copy_(last)
    shard = padded.narrow(0, 0, 4)
    assert torch.equal(shard.payload.view(torch.uint8), whole.payload[12:].view(torch.uint8))
    assert torch.equal(shard.scale, whole.scale) and shard.scale.data_ptr() != whole.scale.data_ptr()
    assert torch.equal(padded.dequantize()[4:], torch.zeros(2, 32))
    assert shard.part is not None and not shard.part.scales_alone


def test_writing_rows_leaves_the_others_their_values() -> None:
    """Rows share one scale: with a larger amax beside them they move to a larger one, and keep their values to the
    rounding of E4M3: half of 2⁻³ relative, or half of the least number above zero, 2⁻⁹ · scale."""
    whole = ScaledTensor.quantize(random_matrix(64, 32))
    before, new = whole.dequantize(), 100.0 * random_matrix(16, 32, seed=1)
    whole[16:32].copy_(new)
    after, scale = whole.dequantize(), whole.scale.item()
    kept = torch.cat([after[:16], after[32:]]) - torch.cat([before[:16], before[32:]])
    assert (kept.abs() <= torch.cat([before[:16], before[32:]]).abs() * 2**-4 + 2**-10 * scale).all()
    assert ((after[16:32] - new).abs() <= new.abs() * 2**-4 + 2**-10 * scale).all()
    assert scale == 2.0 ** torch.tensor(scale).log2().round().item()


@pytest.mark.parametrize("init", ["uniform_", "normal_", "zero_", "fill_"])
def test_initialisers_write_the_values_they_draw(init: str) -> None:
    arguments = {"uniform_": (-0.1, 0.3), "normal_": (0.0, 0.02), "zero_": (), "fill_": (0.5,)}[init]
    weight = torch.nn.Parameter(ScaledTensor.quantize(random_matrix(64, 32)))
    plain = torch.empty(64, 32)
    torch.manual_seed(3)
    getattr(plain, init)(*arguments)
    torch.manual_seed(3)
    with torch.no_grad():
        getattr(weight, init)(*arguments)
    assert torch.equal(weight.dequantize(), ScaledTensor.quantize(plain).dequantize())


def test_initialisers_of_torch_on_meta_do_nothing() -> None:
    weight = torch.nn.Parameter(ScaledTensor(torch.empty(64, 32, dtype=E4M3, device="meta"), torch.ones(1)))
    torch.nn.init.kaiming_uniform_(weight)
    assert weight.is_meta


def write_shard(group: torch.distributed.ProcessGroup, values: list[Tensor]) -> tuple[Tensor, Tensor]:
    """This rank's rows of a weight after plain values were written: dequantised, and its scale."""
    rank = group.rank()
    shard = ScaledTensor.quantize(torch.ones_like(values[rank])).new_zeros(values[rank].shape).narrow(0, 0, 4)
    shard.copy_(values[rank])
    agree_on_scale_(shard, group)
    scale = shard.scale.clone()
    agree_on_scale_(shard, group)  # the second time there is nothing to agree on
    assert torch.equal(shard.scale, scale)
    return shard.dequantize(), scale


@pytest.mark.parametrize("case", ["random", "outlier", "zeros on a rank", "all zeros"])
def test_shards_written_alone_agree_on_one_scale(ranks: RankPool, case: str) -> None:
    """The values are those of one cast with the common power of two, to one more rounding of subnormals: half of
    2⁻⁹ · scale each."""
    values = [random_matrix(4, 32, seed=rank) for rank in range(2)]
    if case == "outlier":
        values[1][2, 3] = 1000.0
    elif case == "zeros on a rank":
        values[0].zero_()
        values[1] *= 1e-4
    elif case == "all zeros":
        values = [torch.zeros(4, 32)] * 2
    results = ranks.run(on_default_group, write_shard, values, num_ranks=2)
    scales = [scale for _, scale in results]
    assert torch.equal(*scales)
    largest = max(value.abs().max().item() for value in values)
    assert largest / 448 <= scales[0].item() < max(4 * largest / 448, 1.1)
    for value, (seen, scale) in zip(values, results, strict=True):
        assert ((seen - value).abs() <= value.abs() * 2**-4 + 2 * 2**-10 * scale).all()


class Master:
    """Owns a weight and keeps its values in FP32."""

    def __init__(self, weight: ScaledTensor) -> None:
        self.kept = weight.dequantize()

    def write(self, value: Tensor) -> None:
        self.kept = value.clone()

    def value(self) -> Tensor:
        return self.kept


def test_a_view_writes_through_the_owner_of_the_whole() -> None:
    weight = ScaledTensor.quantize(random_matrix(64, 32))
    weight.owner = owner = Master(weight)
    expected, rows, column = owner.kept.clone(), random_matrix(8, 32, seed=1), random_matrix(64, seed=2)
    weight[16:24].copy_(rows)
    expected[16:24] = rows
    assert torch.equal(owner.kept, expected)
    weight.chunk(32, dim=1)[3].copy_(column[:, None])
    expected[:, 3] = column
    assert torch.equal(owner.kept, expected)
    assert torch.equal(weight.view(-1).split(32)[2].master_value(), expected[2])
    weight.view(-1).zero_()
    assert torch.equal(owner.kept, torch.zeros(64, 32))
