"""Muon (https://kellerjordan.github.io/posts/muon, arXiv 2502.16982): each matrix's momentum, made orthogonal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...device.group import Group
from ...errors import UserError
from ...kernels import ops
from ...storage import StateSpec
from ..newton_schulz import COEFFICIENTS, Coefficients, polar_factor, steps_of
from .rule import MatrixRule

#: (rows, columns) → what the orthogonal matrix is multiplied by; by Megatron's names.
SCALES: Mapping[str, Callable[[int, int], float]] = {
    "spectral": lambda rows, columns: max(rows, columns) ** 0.5,
    "unit_rms_norm": lambda rows, columns: (rows / columns) ** 0.5,
    "shape_scaling": lambda rows, columns: max(1.0, rows / columns) ** 0.5,
}
#: Above what the coefficients make of any singular value, and BF16's rounding of it. No element is larger.
_LARGEST_SINGULAR_VALUE = 1.3
#: The least norm of a matrix, as in torch and in Megatron.
_EPS = 1e-7
#: What ranks do that have parts of the same matrix.
TP_MODES = ("duplicated", "distributed", "blockwise")
#: What https://github.com/KellerJordan/Muon does without naming it, by torch's names. Older copies name some.
_JORDANS = {
    "weight_decay": 0.0,
    "nesterov": True,
    "ns_coefficients": COEFFICIENTS["simple"][0],
    "ns_steps": 5,
    "eps": _EPS,
    "adjust_lr_fn": "original",
}
_ADAMWS = {"weight_decay": 0.0, "decoupled_weight_decay": True}
_SHARED_FIELDS = {"params", "lr", "initial_lr", "use_muon"}


class Muon(MatrixRule):
    """Options: ``momentum``, ``nesterov``; ``num_ns_steps``, ``coefficient_type`` (`newton_schulz.COEFFICIENTS`);
    ``scale_mode`` (`SCALES`), ``extra_scale_factor``; ``tp_mode``. Or torch's: ``ns_coefficients``, ``ns_steps``,
    ``eps``, ``adjust_lr_fn``.

    The momentum is an average: m ← μ·m + (1 − μ)·g. Weight decay is decoupled, by lr alone. Jordan's optimizers come as
    torch's, with AdamW in the groups without ``use_muon``.
    """

    states = (StateSpec("momentum_buffer", "momentum"),)
    required_options = ("momentum",)
    counts_steps = False

    def __init__(self, options: Mapping[str, Any]) -> None:
        for option, known in (("scale_mode", SCALES), ("coefficient_type", COEFFICIENTS), ("tp_mode", TP_MODES)):
            if options[option] not in known:
                raise UserError(f"{option}({options[option]}) is none of {', '.join(known)}")

    @classmethod
    def refusal(cls, optimizer: torch.optim.Optimizer) -> str | None:
        if _is_torchs(optimizer):
            return None
        if type(optimizer).__name__ == "MuonAdamW":
            return (
                "nanochat's has a second moment (NorMuon), equal norms of rows before Newton-Schulz, a fixed norm "
                "after it and cautious weight decay, which this Muon does not do: give [torch.optim.Muon(…), "
                "torch.optim.AdamW(…)]"
            )
        for index, group in enumerate(optimizer.param_groups):
            needed, added = _jordans(group)
            if unknown := sorted(group.keys() - needed - added.keys() - _SHARED_FIELDS):
                return f"param_groups[{index}] has {', '.join(unknown)}, which is not read: take torch's Muon"
            if missing := sorted(needed - group.keys()):
                return f"param_groups[{index}] has no {', '.join(missing)}: take torch's Muon"
        return None

    @classmethod
    def take_groups(cls, optimizer: torch.optim.Optimizer, name: str) -> list[str]:
        if _is_torchs(optimizer):
            return super().take_groups(optimizer, name)
        for group in optimizer.param_groups:
            group.update({option: value for option, value in _jordans(group)[1].items() if option not in group})
        if optimizer.defaults:  # one rule for all groups, and for those to come
            optimizer.defaults = {**_JORDANS, **optimizer.defaults}
        return [name if group.get("use_muon", True) else "adamw" for group in optimizer.param_groups]

    def direct(
        self,
        operands: ops.FlatOperands,
        direction: Tensor,
        group: Mapping[str, Any],
        *,
        grad_factor: Tensor,
        step: Tensor,
    ) -> None:
        ops.momentum_step_(
            ops.MomentumState(operands.grad, operands.states[0], operands.places),
            direction,
            beta=float(group["momentum"]),
            nesterov=bool(group["nesterov"]),
            grad_factor=grad_factor,
            step=step,
        )

    def orthogonal(
        self,
        matrices: Tensor,
        group: Mapping[str, Any],
        ranks: Group | None = None,
        axis: int | None = None,
        *,
        errors: list[Tensor] | None = None,
    ) -> Tensor:
        steps = _steps(group)
        # The trainer's group has the eps of AdamW, for the other parameters.
        eps = float(group["eps"]) if "ns_steps" in group else _EPS
        mode = "blockwise" if ranks is None else group["tp_mode"]
        rows, columns = matrices.shape[1:]
        if mode == "blockwise":
            result = polar_factor(matrices, steps, eps=eps, errors=errors)
        else:
            assert ranks is not None and axis is not None
            rows, columns = (size * (ranks.size() if axis == dim else 1) for dim, size in ((1, rows), (2, columns)))
            if mode == "distributed":
                result = polar_factor(matrices, steps, eps=eps, group=ranks, axis=axis, errors=errors)
            else:
                parts = [torch.empty_like(matrices) for _ in range(ranks.size())]
                torch.distributed.all_gather(parts, matrices.contiguous(), group=ranks)
                whole = polar_factor(torch.cat(parts, dim=axis), steps, eps=eps, errors=errors)
                result = whole.chunk(ranks.size(), axis)[ranks.rank()]
        return result * _scale(group, rows, columns)

    def largest_update(self, shapes: Sequence[tuple[int, int]], group: Mapping[str, Any]) -> float:
        return _LARGEST_SINGULAR_VALUE * max(_scale(group, *shape) for shape in shapes)


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.")


def _jordans(group: Mapping[str, Any]) -> tuple[set[str], dict[str, Any]]:
    """What a group of Jordan's has at least, and what it does without naming it."""
    return ({"momentum"}, _JORDANS) if group.get("use_muon", True) else ({"betas", "eps"}, _ADAMWS)


def _steps(group: Mapping[str, Any]) -> list[Coefficients]:
    if "ns_coefficients" in group:  # torch's
        a, b, c = map(float, group["ns_coefficients"])
        return [(a, b, c)] * int(group["ns_steps"])
    return steps_of(group["coefficient_type"], int(group["num_ns_steps"]))


def _scale(group: Mapping[str, Any], rows: int, columns: int) -> float:
    if "adjust_lr_fn" in group:  # torch's
        matches_adamw = group["adjust_lr_fn"] == "match_rms_adamw"
        return 0.2 * SCALES["spectral"](rows, columns) if matches_adamw else SCALES["shape_scaling"](rows, columns)
    return SCALES[group["scale_mode"]](rows, columns) * float(group["extra_scale_factor"])
