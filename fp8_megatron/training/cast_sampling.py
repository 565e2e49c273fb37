"""Samples the casts of a step: every layer's FP8 operands are measured on the device and read one step later."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from ..device.memory import cpu_copy
from ..dtypes import DTYPE_NAMES
from ..kernels import ops
from ..mcore.lm_head import FP8OutputLayer
from ..mcore.tensor_parallel import FallsBack
from ..quantization.cast_health import CastProbe
from ..quantization.recipe import LinearQuantizers
from ..reporting.cast_statistics import CastName, CastStatistics, HealthSample
from ..reporting.metrics_file import ROLES
from ..sharding.gradient import GradBuffer
from ..sharding.sharded_grads import ShardedGradBuffer

#: The linear layers of a transformer layer, in order.
_LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


class PendingSample:
    """The statistics of a step, which are being copied to the host."""

    def __init__(self, iteration: int, names: Sequence[CastName], values: Tensor) -> None:
        self._iteration, self._names = iteration, names
        self._host = cpu_copy(values)

    def result(self) -> HealthSample:
        """The sample. Call it once the step's results have been waited for."""
        rows = self._host.tolist()
        casts = (CastStatistics.of_row(name, row[1:], row[0]) for name, row in zip(self._names, rows, strict=True))
        return HealthSample(self._iteration, tuple(cast for cast in casts if cast is not None))


class CastSampler:
    """Measures the casts of a step's first micro-batch on this rank, and merges the statistics of all ranks.

    All ranks build one and sample the same steps. A step that is sampled has two collectives more, of 0.5 KiB a cast
    in all.

    Args:
        chunks: this rank's model chunks, built with `Recipe.has_probes`.
        buffers: their gradients.
        world_size: ranks of the run.
    """

    def __init__(
        self,
        chunks: Iterable[torch.nn.Module],
        buffers: Sequence[GradBuffer],
        device: torch.device,
        *,
        world_size: int,
    ) -> None:
        self._chunks, self._buffers, self._device, self._world_size = list(chunks), buffers, device, world_size
        self.find_casts()

    def find_casts(self) -> None:
        """Find what to measure, anew if layers have other formats now. All ranks call it together."""
        buffers = self._buffers
        found = _probes(self._chunks, buffers)
        self.names = _names_of_all_ranks([name for name, _ in found], self._world_size)
        index = {name: place for place, name in enumerate(self.names)}
        self._statistics = torch.zeros(len(self.names), ops.NUM_STATISTICS, dtype=torch.float64, device=self._device)
        self._probes = [probe for _, probe in found]
        for name, probe in found:
            probe.statistics = self._statistics[index[name]]
        self._autoscaled = _autoscaled(buffers, index)

    def begin(self) -> None:
        """Measure the next forward and backward. It may be recorded."""
        self._statistics.zero_()
        for probe in self._probes:
            probe.is_due = True

    def end(self) -> None:
        """End what `begin` began."""
        for probe in self._probes:
            probe.is_due = False

    def collect(self, iteration: int) -> PendingSample:
        """Merge the statistics of all ranks; called by all of them, after the step was queued. No host sync."""
        maxima = torch.cat([self._inverse_mu(), self._statistics[:, : ops.NUM_MAXIMA]], dim=1)
        sums = self._statistics[:, ops.NUM_MAXIMA :].contiguous()
        if self._world_size > 1:
            torch.distributed.all_reduce(maxima, torch.distributed.ReduceOp.MAX)
            torch.distributed.all_reduce(sums)
        return PendingSample(iteration, self.names, torch.cat([maxima, sums], dim=1))

    def _inverse_mu(self) -> Tensor:
        """FP64 [casts, 1]: 1 / μ of auto-scaling; 0 where there is none."""
        inverse = self._statistics.new_zeros(len(self.names), 1)
        for place, mu in self._autoscaled:
            inverse[place] = torch.maximum(inverse[place], mu.double().reciprocal())
        return inverse


def _probes(chunks: Iterable[torch.nn.Module], buffers: Sequence[GradBuffer]) -> list[tuple[CastName, CastProbe]]:
    """Every probe of this rank with its name. Gradients get theirs."""
    gradients = {gradient.param: gradient for buffer in buffers for gradient in buffer.gradients}
    found: list[tuple[CastName, CastProbe | None]] = []
    for chunk in chunks:
        for name, layer in fp8_layers(chunk):
            own = layer.quantizers
            weight = DTYPE_NAMES[own.weight.dtype]
            found.append((CastName(name, "input", DTYPE_NAMES[own.input.format.dtype]), own.input.probe))
            found.append((CastName(name, "weight", weight), own.weight_probe))
            if isinstance(own, LinearQuantizers):
                format = DTYPE_NAMES[own.grad_output.format.dtype]
                found.append((CastName(name, "grad_output", format), own.grad_output.probe))
                found.append((CastName(name, "weight_grad", "E4M3"), own.weight_grad_probe))
                gradients[layer.weight].probe = own.weight_grad_probe
            else:
                found.append((CastName(name, "grad_output", DTYPE_NAMES[own.grad_output.dtype]), own.grad_output_probe))
    return [(name, probe) for name, probe in found if probe is not None]


def _names_of_all_ranks(own: list[CastName], world_size: int) -> list[CastName]:
    """The casts of all ranks in the model's order, numbers compared as numbers."""
    names = set(own)
    if world_size > 1:
        gathered: list[list[CastName]] = [[] for _ in range(world_size)]
        torch.distributed.all_gather_object(gathered, own)
        names = {name for names in gathered for name in names}
    return sorted(names, key=_place_in_model)


def _place_in_model(name: CastName) -> tuple[float, int, str, int]:
    number = re.search(r"\d+", name.layer)
    linear = name.layer.rpartition(".")[2]
    place = _LINEARS.index(linear) if linear in _LINEARS else len(_LINEARS)
    return float(number[0]) if number else math.inf, place, name.layer, ROLES.index(name.role)


def _autoscaled(buffers: Sequence[GradBuffer], index: dict[CastName, int]) -> list[tuple[int, Tensor]]:
    """(the cast's place, μ [1]) of every span of an auto-scaled weight gradient."""
    place_of = {f"{name.layer}.weight": place for name, place in index.items() if name.role == "weight_grad"}
    return [
        (place_of[name], autoscale.mu[span : span + 1])
        for buffer in buffers
        if isinstance(buffer, ShardedGradBuffer)
        for name, autoscale, span in buffer.autoscaled_spans()
        if name in place_of
    ]


def fp8_layers(chunk: torch.nn.Module) -> Iterator[tuple[str, FallsBack | FP8OutputLayer]]:
    """(name, layer) of every linear layer and LM head in FP8. Layers are counted over all stages."""
    offset = next((m.layer_number - 1 for m in chunk.modules() if isinstance(m, TransformerLayer)), 0)
    for name, module in chunk.named_modules():
        if isinstance(module, (FallsBack, FP8OutputLayer)) and hasattr(module, "quantizers"):
            parts = name.split(".")
            if "layers" in parts:
                position = parts.index("layers") + 1
                parts[position] = str(int(parts[position]) + offset)
            yield ".".join(parts), module
