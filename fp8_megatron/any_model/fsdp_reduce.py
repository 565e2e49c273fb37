"""Gradients of torch's ``fully_shard`` reduced in FP8: one byte an element between ranks, FP32 in the sum.

FSDP2 hands a module's gradients to its reduce-scatter as one tensor, where every parameter's rows for every rank have a
fixed place. `FP8ReduceScatter` sends the gradients of FP8 weights in E4M3 with a scale for each 128 elements
(`collectives.reduce_scatter`), and the others in their own dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from ..collectives.reduce_scatter import ReduceScatterWork, reduce_scatter_mean
from ..collectives.wire import WireTensor
from ..device.group import Group
from ..dtypes import GRAD_BLOCK, StorageDtype
from ..errors import UserError
from ..quantization.weight_shards import stored_part

_MEAN, _SUM = torch.distributed.ReduceOp.AVG, torch.distributed.ReduceOp.SUM


@dataclass(frozen=True)
class Run:
    """Elements [start, stop) of each rank's part of the gradients, of parameters that travel alike."""

    start: int
    stop: int
    is_fp8: bool

    @property
    def numel(self) -> int:
        """Elements."""
        return self.stop - self.start

    @property
    def padded(self) -> int:
        """Elements up to the next block."""
        return -(-self.numel // GRAD_BLOCK) * GRAD_BLOCK


class FP8ReduceScatter:
    """The reduce-scatter of one FSDP module, for ``FSDPModule.set_custom_reduce_scatter``.

    If only some of the module's parameters have a gradient, their places are not known, and all of them travel in their
    own dtype.

    Args:
        runs: the parts of one rank, in order, without gaps.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory of this shape and dtype for FSDP2 to gather gradients in, or to receive its rows in."""
        return torch.empty(*size, dtype=dtype, device=device)

    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Group, op: Any, async_op: bool = False
    ) -> None:
        """Reduce `input_tensor` [ranks · n] to this rank's part [n], in stream order. Called by every rank.

        Args:
            op: the mean, the sum, or the sum times a factor, which ``set_gradient_divide_factor`` asks for.
        """
        numel, ranks = output_tensor.numel(), group.size()
        runs = self._runs if self._runs[-1].stop == numel else [Run(0, numel, False)]
        rows = input_tensor.view(ranks, numel)
        works = [(kind, _start(rows, kind, group)) for kind in _by_wire(runs) if kind]
        for kind, work in works:
            _finish(output_tensor, kind, work)
        if op != _MEAN:
            output_tensor.mul_(ranks * _factor(op))


def reduce_in_fp8(model: torch.nn.Module) -> None:
    """Let every FSDP module of `model` that has FP8 weights reduce their gradients in FP8.

    `fp8_megatron.initialize` does so. A module whose reduce-scatter somebody has replaced keeps that one.
    `reduce_in_own_dtype` goes back to torch's.
    """
    for module in _modules(model):
        runs = _runs(module)
        if any(run.is_fp8 for run in runs) and type(_comm(module)).__name__ == "DefaultReduceScatter":
            module.set_custom_reduce_scatter(FP8ReduceScatter(runs))  # type: ignore[arg-type]


def reduce_in_own_dtype(model: torch.nn.Module) -> None:
    """Let every FSDP module of `model` reduce gradients as torch does, in the dtype of its `MixedPrecisionPolicy`."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    for module in _modules(model):
        if isinstance(_comm(module), FP8ReduceScatter):
            module.set_custom_reduce_scatter(DefaultReduceScatter())


def check_reshard(module: FSDPModule) -> None:
    """Check that `module` gathers its FP8 weights from all ranks.

    Raises:
        UserError: it was sharded with a number of ranks as ``reshard_after_forward``.
    """
    for group in _param_groups(module):
        kept_by = getattr(group.post_forward_mesh_info, "shard_mesh_size", None)
        if kept_by in (None, group.mesh_info.shard_mesh_size):
            continue
        if any(stored_part(fsdp_param.sharded_param) is not None for fsdp_param in group.fsdp_params):
            raise UserError(
                f"reshard_after_forward={kept_by}: torch does not gather FP8 weights from fewer ranks; give "
                f"fully_shard True or False"
            )


def _modules(model: torch.nn.Module) -> list[FSDPModule]:
    """FSDP modules with parameters of their own, over one mesh."""
    found = (module for module in model.modules() if isinstance(module, FSDPModule))
    return [module for module in found if len(_param_groups(module)) == 1]


def _param_groups(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.13 a module has one at most
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(groups)


def _comm(module: FSDPModule) -> Any:
    return _param_groups(module)[0]._reduce_scatter_comm


def _runs(module: FSDPModule) -> list[Run]:
    """How one rank's part of a module's gradients is laid out."""
    runs: list[Run] = []
    start = 0
    for fsdp_param in _param_groups(module)[0].fsdp_params:
        param = fsdp_param.sharded_param
        if not param.requires_grad:
            continue
        stop, is_fp8 = start + fsdp_param.padded_sharded_param_size.numel(), stored_part(param) is not None
        if runs and runs[-1].is_fp8 == is_fp8:
            start = runs.pop().start
        runs.append(Run(start, stop, is_fp8))
        start = stop
    return runs


def _factor(op: Any) -> float:
    """What a reduction multiplies the sum with."""
    if op == _SUM:
        return 1.0
    kind, factor = op.__getstate__()
    assert kind == torch.distributed.ReduceOp.PREMUL_SUM, kind
    return float(factor)


def _by_wire(runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    return [run for run in runs if run.is_fp8], [run for run in runs if not run.is_fp8]


def _start(rows: Tensor, runs: Sequence[Run], group: Group) -> ReduceScatterWork:
    """Start to reduce some runs of every rank's row."""
    own = StorageDtype.BF16 if rows.dtype == torch.bfloat16 else StorageDtype.FP32
    dtype = StorageDtype.FP8 if runs[0].is_fp8 else own
    numel = sum(run.padded for run in runs)
    sent, received = (WireTensor.empty(len(rows) * numel, dtype, rows.device) for _ in range(2))
    for rank, row in enumerate(rows):
        start = rank * numel
        for run in runs:
            place, values = sent.slice(start, start + run.padded), row[run.start : run.stop]
            if dtype is StorageDtype.FP8:
                place.store_(values)  # its rest becomes zero
            else:
                place.payload[: run.numel].copy_(values)
                place.payload[run.numel :].zero_()
            start += run.padded
    return reduce_scatter_mean(sent, received, group)


def _finish(output: Tensor, runs: Sequence[Run], work: ReduceScatterWork) -> None:
    """Wait, and put the means where FSDP2 reads them."""
    if len(runs) == 1 and runs[0].padded == runs[0].numel and output.dtype in (torch.float32, torch.bfloat16):
        work.wait_into(output[runs[0].start : runs[0].stop], add=False)
        return
    mean, start = work.wait(), 0
    for run in runs:
        output[run.start : run.stop].copy_(mean[start : start + run.numel])
        start += run.padded
