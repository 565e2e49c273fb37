"""Ways of reducing gradients over virtual ranks, and their signal-to-noise ratio against FP64.

The collectives' own functions round and sum; only the wire is missing. Mode nccl is the emulated ring. The gradient
has eight tensors whose magnitudes lie a decade apart. Within each, blocks of 128 spread over two decades. The worst
tensor's ratio counts. `Kind` says how the ranks' gradients are related.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fp8_megatron.collectives.autoscale import AutoScale
from fp8_megatron.collectives.native_sum import mean_of_sum, ring_sum
from fp8_megatron.collectives.wire import WireTensor, accumulate_rows_
from fp8_megatron.dtypes import E4M3, GRAD_BLOCK, StorageDtype
from fp8_megatron.quantization.stats import snr_db

NUM_TENSORS = 8
BLOCKS_PER_TENSOR = 64
#: Power of each rank's own noise in correlated gradients; the shared gradient has power 1.
NOISE_POWER = 0.25
RANKS_PER_NODE = 8
ACCUMULATION_RANKS = 4
ACCUMULATION_OF_OURS = "each reduced in E4M3 into FP32"
ACCUMULATION_IN_BF16 = "each reduced in E4M3 into BF16"
#: How ranks' gradients are related. uncorrelated: normal and independent. correlated: a shared normal gradient with
#: noise of power `NOISE_POWER`. anti-correlated F: the mean over ranks is F times as large as a rank's gradient.
Kind = Literal["uncorrelated", "correlated", "anti-correlated 0.1", "anti-correlated 0.001"]
CPU = torch.device("cpu")


class GradientSource:
    """Random gradients from one seed; each element has its own fixed magnitude.

    Attributes:
        numel: elements of a gradient: eight tensors of `blocks_per_tensor` blocks.
    """

    def __init__(self, kind: Kind, *, seed: int = 0, blocks_per_tensor: int = BLOCKS_PER_TENSOR) -> None:
        self._kind = kind
        self._generator = torch.Generator().manual_seed(seed)
        tensors = torch.logspace(-7, 0, NUM_TENSORS).repeat_interleave(blocks_per_tensor)
        blocks = 10.0 ** (2.0 * torch.rand(tensors.numel(), generator=self._generator) - 1.0)
        self._magnitudes = (tensors * blocks).repeat_interleave(GRAD_BLOCK)
        self.numel = self._magnitudes.numel()
        has_common = kind != "uncorrelated"
        self._common = torch.randn(self.numel, generator=self._generator) if has_common else torch.zeros(self.numel)

    def draw(self, num_ranks: int) -> Tensor:
        """The next gradient of each rank, FP32 [num_ranks, numel]."""
        return self._values(num_ranks) * self._magnitudes

    def _values(self, num_ranks: int) -> Tensor:
        noise = torch.randn(num_ranks, self.numel, generator=self._generator)
        if self._kind == "uncorrelated":
            return noise
        if self._kind == "correlated":
            return self._common + NOISE_POWER**0.5 * noise
        mean = float(self._kind.split()[1])
        rest = noise - noise.mean(dim=0)  # of power 1 - 1 / num_ranks
        return mean * self._common + ((1 - mean**2) / (1 - 1 / num_ranks)) ** 0.5 * rest


def worst_snr_db(value: Tensor, exact: Tensor) -> float:
    """The lowest `snr_db` of the tensors in a gradient [numel]."""
    parts = zip(value.chunk(NUM_TENSORS), exact.chunk(NUM_TENSORS), strict=True)
    return min(snr_db(part, exact_part) for part, exact_part in parts)


def reduce_all_to_all(values: Tensor, dtype: StorageDtype = StorageDtype.FP8, *, factor: float | None = None) -> Tensor:
    """What `reduce_scatter_mean` computes of values FP32 [d, n]: the mean [n] (or `factor` times the sum)."""
    num_ranks, numel = values.shape
    rows = WireTensor.empty(num_ranks * numel, dtype, CPU)
    for rank, value in enumerate(values):
        rows.slice(rank * numel, (rank + 1) * numel).store_(value)
    mean = torch.empty(numel)
    accumulate_rows_(rows, num_ranks, mean, factor=1.0 / num_ranks if factor is None else factor, add=False)
    return mean


def reduce_hierarchical(values: Tensor, intra: StorageDtype) -> Tensor:
    """What `hierarchical_reduce_scatter_mean` computes on nodes of 8 ranks, or on two nodes for fewer than 16 ranks."""
    num_ranks = values.shape[0]
    nodes = values.split(min(RANKS_PER_NODE, num_ranks // 2))
    partial = torch.stack([reduce_all_to_all(node, intra, factor=1.0) for node in nodes])
    return reduce_all_to_all(partial, factor=1.0 / num_ranks)


def reduce_nccl(values: Tensor, *, num_reductions: int = 1, initial_mu: float = 1.0) -> tuple[Tensor, AutoScale]:
    """What mode nccl computes (emulated ring) at the last of several reductions of the same values; rank 0's μ."""
    num_ranks, numel = values.shape
    block_tensor = torch.arange(numel // GRAD_BLOCK) // (numel // GRAD_BLOCK // NUM_TENSORS)
    autoscales = [AutoScale(NUM_TENSORS, block_tensor, CPU, initial_mu=initial_mu) for _ in range(num_ranks)]
    sent = [WireTensor.empty(numel, StorageDtype.FP8, CPU) for _ in range(num_ranks)]
    for tensor, value in zip(sent, values, strict=True):
        tensor.store_(value)
    codes = torch.empty(num_ranks, numel, dtype=E4M3)
    mean = torch.empty(numel)
    for _ in range(num_reductions):
        shared = torch.stack([a.measure(*_parts(s)) for a, s in zip(autoscales, sent, strict=True)]).amax(dim=0)
        for rank, (autoscale, tensor) in enumerate(zip(autoscales, sent, strict=True)):
            autoscale.update(shared)
            autoscale.requantize_(*_parts(tensor), codes[rank])
        shard = numel // num_ranks
        for owner, autoscale in enumerate(autoscales):
            elements = slice(owner * shard, (owner + 1) * shard)
            blocks = slice(elements.start // GRAD_BLOCK, elements.stop // GRAD_BLOCK)
            total = ring_sum(codes[:, elements], first=(owner + 1) % num_ranks)
            autoscale.note_sum(total, blocks.start)
            mean[elements] = mean_of_sum(total, autoscale.block_scales[blocks], num_ranks)
    return mean, autoscales[0]


def _parts(tensor: WireTensor) -> tuple[Tensor, Tensor]:
    assert tensor.scales is not None
    return tensor.payload, tensor.scales


def measure_accumulation(
    num_micro_batches: int, kind: Kind, *, blocks_per_tensor: int = BLOCKS_PER_TENSOR
) -> dict[str, float]:
    """SNR in dB of the mean over micro-batches and ranks, by way of accumulating. The last two ways reduce every
    micro-batch; the others add on each rank and reduce once, in E4M3.
    """
    source = GradientSource(kind, blocks_per_tensor=blocks_per_tensor)
    numel = source.numel
    in_e4m3 = WireTensor.empty(ACCUMULATION_RANKS * numel, StorageDtype.FP8, CPU)
    in_e4m3.store_(torch.zeros(in_e4m3.numel))
    in_bf16 = torch.zeros(ACCUMULATION_RANKS, numel, dtype=torch.bfloat16)
    in_fp32 = torch.zeros(ACCUMULATION_RANKS, numel)
    sharded, sharded_bf16 = torch.zeros(numel), torch.zeros(numel, dtype=torch.bfloat16)
    exact = torch.zeros(numel, dtype=torch.float64)
    rows = WireTensor.empty(ACCUMULATION_RANKS * numel, StorageDtype.FP8, CPU)
    for _ in range(num_micro_batches):
        values = source.draw(ACCUMULATION_RANKS)
        exact += values.double().mean(dim=0)
        in_e4m3.store_(in_e4m3.load() + values.view(-1))
        in_bf16 += values.bfloat16()
        in_fp32 += values
        rows.store_(values.view(-1))
        for shard in (sharded, sharded_bf16):
            accumulate_rows_(rows, ACCUMULATION_RANKS, shard, factor=1.0 / ACCUMULATION_RANKS, add=True)
    results = {
        "added in E4M3": reduce_all_to_all(in_e4m3.load().view(ACCUMULATION_RANKS, numel)),
        "added in BF16, then E4M3 once": reduce_all_to_all(in_bf16.float()),
        "added in FP32, then E4M3 once": reduce_all_to_all(in_fp32),
        ACCUMULATION_OF_OURS: sharded,
        ACCUMULATION_IN_BF16: sharded_bf16,
    }
    return {way: worst_snr_db(result, exact) for way, result in results.items()}
