"""Blocks of attention and their sums: against float64, and the GPU's kernels against the specification."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8_megatron.kernels import ops

SCALE = 0.2


def summands(dtype: torch.dtype, rows: list[int], *, at_end: bool = True) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and log-sum-exps of blocks; one has the weight of all others, one has almost none."""
    generator = torch.Generator().manual_seed(len(rows))
    outs = [torch.randn(n, 2, 3, 40, generator=generator).to(dtype) for n in rows]
    log_sum_exps = [4 * torch.randn(2, 3, n, generator=generator) for n in rows]
    log_sum_exps[-1][0, 0, :3] += torch.tensor([100.0, -100.0, 0.0])
    return outs, log_sum_exps


def merged_in_float64(outs: list[Tensor], log_sum_exps: list[Tensor]) -> tuple[Tensor, Tensor]:
    rows = outs[0].shape[0]
    weights = torch.zeros(2, 3, rows, dtype=torch.float64)
    total = torch.zeros(2, 3, rows, 40, dtype=torch.float64)
    for out, log_sum_exp in zip(outs, log_sum_exps, strict=True):
        weight = log_sum_exp.double().exp()
        weights[..., rows - out.shape[0] :] += weight
        total[..., rows - out.shape[0] :, :] += weight[..., None] * out.double().permute(1, 2, 0, 3)
    return (total / weights[..., None]).permute(2, 0, 1, 3), weights.log()


ROWS = [[48], [48, 48], [48, 24], [48, 48, 24], [48, 24, 24, 24], [48, 48, 48, 24, 24, 24]]


@pytest.mark.parametrize("rows", ROWS)
def test_merged_outputs(rows: list[int]) -> None:
    """Weights are exp of differences of about 10, off by 10 · 2⁻²⁴ each, and sum to one: 2⁻¹⁹ of the largest output."""
    outs, log_sum_exps = summands(torch.bfloat16, rows)
    out, log_sum_exp = ops.merge_attention(outs, log_sum_exps, dtype=torch.float32)
    expected, expected_log = merged_in_float64(outs, log_sum_exps)
    largest = float(torch.cat([one.abs().flatten() for one in outs]).max())
    torch.testing.assert_close(out.double(), expected, rtol=0.0, atol=2**-19 * largest)
    torch.testing.assert_close(log_sum_exp.double(), expected_log, rtol=2**-22, atol=2**-22)
    rounded, _ = ops.merge_attention(outs, log_sum_exps, dtype=torch.bfloat16)
    assert torch.equal(rounded, out.bfloat16())


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_sums_of_parts(rows: list[int], at_end: bool) -> None:
    """In FP32, in order, rounded once. The first part stays as it is."""
    parts, _ = summands(torch.bfloat16, rows)
    before = parts[0].clone()
    expected = parts[0].float()
    for part in parts[1:]:
        (expected[-part.shape[0] :] if at_end else expected[: part.shape[0]]).add_(part.float())
    assert torch.equal(ops.sum_partials(parts, at_end=at_end, dtype=torch.bfloat16), expected.bfloat16())
    assert torch.equal(ops.sum_partials([x.float() for x in parts], at_end=at_end, dtype=torch.float32), expected)
    assert torch.equal(parts[0], before)


@pytest.mark.parametrize("rows", ROWS)
class TestOnAGPU:
    pytestmark = pytest.mark.gpu

    def test_merged_outputs(self, rows: list[int]) -> None:
        """The GPU's exponentials differ in their last bits: a weight by 2⁻²⁰, and a BF16 output by one rounding."""
        outs, log_sum_exps = summands(torch.bfloat16, rows)
        expected, expected_log = ops.merge_attention(outs, log_sum_exps, dtype=torch.float32)
        on_gpu = [x.cuda() for x in outs], [x.cuda() for x in log_sum_exps]
        out, log_sum_exp = ops.merge_attention(*on_gpu, dtype=torch.float32)
        torch.testing.assert_close(out.cpu(), expected, rtol=0.0, atol=2**-17)
        torch.testing.assert_close(log_sum_exp.cpu(), expected_log, rtol=2**-20, atol=2**-20)
        rounded, _ = ops.merge_attention(*on_gpu, dtype=torch.bfloat16)
        if len(rows) <= 4:  # one launch: the same numbers, rounded
            assert torch.equal(rounded, out.bfloat16())

    @pytest.mark.parametrize("at_end", [False, True])
    def test_sums_of_parts(self, rows: list[int], at_end: bool) -> None:
        parts, _ = summands(torch.bfloat16, rows)
        expected = ops.sum_partials(parts, at_end=at_end, dtype=torch.bfloat16)
        found = ops.sum_partials([x.cuda() for x in parts], at_end=at_end, dtype=torch.bfloat16)
        assert torch.equal(found.cpu(), expected)


#: (causal, queries, keys, groups of 4 heads, batch, whether query, key and value lie in one tensor).
BLOCKS = [
    (True, 256, 256, 4, 1, True),
    (True, 256, 256, 2, 2, False),
    (False, 256, 128, 2, 1, False),
    (False, 128, 512, 4, 2, False),
    (False, 128, 768, 1, 1, False),
]


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["cudnn", "flash"])
@pytest.mark.parametrize(("causal", "length", "keys", "groups", "batch", "in_one"), BLOCKS)
def test_kernels_compute_blocks(
    kernel: ops.BlockKernel, causal: bool, length: int, keys: int, groups: int, batch: int, in_one: bool
) -> None:
    """Against the dense specification in float64, by rms.

    The kernels round the probabilities to BF16, by 2⁻⁹ each, and their results: some 50 dB of an output. A gradient
    takes four roundings: of the probabilities, of dP's summands, of dS and of itself.
    """
    torch.manual_seed(1)
    width = 64
    query = torch.randn(length, batch, 4, width, device="cuda").bfloat16()
    key, value = torch.randn(2, keys, batch, groups, width, device="cuda").bfloat16()
    if in_one:
        query, key, value = torch.cat([query, key, value], dim=3).split(width, dim=3)
    grad = torch.randn(length, batch, 4, width, device="cuda").bfloat16()
    wide = [x.double() for x in (query, key, value)]
    out, log_sum_exp = ops.attention_block(*wide, causal=causal, scale=SCALE, kernel="dense")
    found = ops.attention_block(query, key, value, causal=causal, scale=SCALE, kernel=kernel)
    assert snr_db(found[0], out) > 45.0
    torch.testing.assert_close(found[1].double(), log_sum_exp, rtol=0.0, atol=1e-3)
    # The row's other keys have as much weight as this block's: the probabilities here sum to a half.
    halves = (out * 0.5).contiguous(), log_sum_exp + torch.log(torch.tensor(2.0))
    expected = ops.attention_block_backward(grad.double(), *wide, *halves, causal=causal, scale=SCALE, kernel="dense")
    rounded = halves[0].bfloat16().contiguous(), halves[1].float().contiguous()
    grads = ops.attention_block_backward(grad, query, key, value, *rounded, causal=causal, scale=SCALE, kernel=kernel)
    for one, wanted in zip(grads, expected, strict=True):
        assert one.shape == wanted.shape and snr_db(one, wanted) > 38.0


def snr_db(value: Tensor, exact: Tensor) -> float:
    return float(10 * torch.log10(exact.double().square().sum() / (value.double() - exact).square().sum()))
