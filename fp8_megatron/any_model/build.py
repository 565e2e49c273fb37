"""The FP8 optimizer of a model, from the user's optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..device.group import Group
from ..dtypes import LEVELS, StorageDtype
from ..nn.module import NO_TENSOR_PARALLELISM
from ..nn.scaled_module import Layout, ScaledModule
from ..quantization.amax_history import AmaxHistory
from ..sharding.storage import ModelStorage
from .data_parallel import ModelHook, Replication
from .optimizer import SHARDED_SINCE, FP8Optimizer, is_fully_sharded, is_sharded
from .replica_hooks import MeetsForState, RefusesDDP, allow_ddp
from .te_modules import plain_value
from .torch_optimizers import Given, OptimizerError, UserOptimizers, look_before_steps


def build_optimizer(
    model: torch.nn.Module,
    optimizer: Given,
    replaced: Mapping[torch.nn.Parameter, torch.nn.Parameter],
    opt_level: str,
    *,
    value_of: Callable[[torch.nn.Parameter], Tensor] = plain_value,
    process_group: Group | None = None,
    gradient_accumulation_steps: int | None = None,
) -> FP8Optimizer:
    """The FP8 optimizer in place of the user's, with its param groups and hyperparameters.

    Args:
        optimizer: one or several that `update_rules` knows, over parameters of the model, before their first step.
        replaced: weights that were replaced in the model → the new ones. The new ones start with the old ones' values.
        opt_level: O1, O2 or O3.
        value_of: the value of a weight that was replaced.
        process_group: the model's replicas, if there are several; None: all ranks of an initialised
            `torch.distributed`. They start with the first one's values.
        gradient_accumulation_steps: backward passes per step, if known; else the first step with several finds out.

    Raises:
        OptimizerError: the optimizer or a parameter cannot be used, with the reason and the fix.
    """
    users = UserOptimizers.of(optimizer)
    names = {param: name for name, param in model.named_parameters()}
    if not names:
        raise OptimizerError("the model has no parameters")
    device = next(iter(names)).device
    replication = _replication(process_group, device)
    if replication is not None:
        replication.broadcast([*model.parameters(), *model.buffers()])
    built = FP8Optimizer(
        users.use_params(replaced),
        users.defaults,
        names=names,
        values=_initial_values(model, replaced, value_of),
        storage=ModelStorage(LEVELS[opt_level], accumulator=StorageDtype.FP32),
        histories=delayed_scales(model, device),
        num_gradients=gradient_accumulation_steps or 1,
        ranks=replication,
        layouts=layouts(model),
        rules=users.rules,
    )
    users.give_place_to(built)
    built.zero_grad()  # weights that were replaced have left theirs behind
    _watch_loads(model, built, names)
    _watch_shards(model, built, names)
    if torch.distributed.is_available() and torch.distributed.is_initialized():  # DDP wraps models of one rank too
        allow_ddp(model, [space.buffer for space in built._spaces], replication)
    else:
        model._ddp_params_and_buffers_to_ignore = RefusesDDP()  # type: ignore[assignment]
    if replication is not None:
        model.register_forward_pre_hook(_TakesUnfrozen(built))
    if replication is not None and LEVELS[opt_level].master_weight is not None:
        model.register_state_dict_pre_hook(MeetsForState(replication, lambda: built.is_consolidated))
    return built


class _TakesUnfrozen(ModelHook):
    """Forward pre-hook: replicas share gradients of parameters that were unfrozen since the last forward."""

    def __init__(self, optimizer: FP8Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)

    def __call__(self, *unused: Any) -> None:
        optimizer = None if torch.compiler.is_compiling() else self._optimizer()
        if optimizer is not None and torch.is_grad_enabled():
            optimizer.take_unfrozen()


class _KeepsParams(ModelHook):
    """Hook behind a module's ``load_state_dict``: its own parameters are still those that the optimizer updates.

    Args:
        params: name in the module → the parameter and its name in the model.
        optimizer: groups may be added to it.
    """

    def __init__(self, params: Mapping[str, tuple[torch.nn.Parameter, str]], optimizer: FP8Optimizer) -> None:
        self._params = params
        self._optimizer = optimizer

    def __call__(self, module: torch.nn.Module, *unused: Any) -> None:
        for name, (param, name_in_model) in self._params.items():
            if module._parameters.get(name, param) is not param and self._optimizer.holds(param):
                raise OptimizerError(
                    f"load_state_dict(assign=True) has replaced {name_in_model}, which the optimizer would not update: "
                    f"call it before initialize, or without assign"
                )


def _watch_loads(model: torch.nn.Module, optimizer: FP8Optimizer, names: Mapping[torch.nn.Parameter, str]) -> None:
    """Make a load that replaces a parameter of the optimizer an error, in whichever module it is called."""
    for module in model.modules():
        own = {name: (param, names[param]) for name, param in module._parameters.items() if param is not None}
        if own:
            module.register_load_state_dict_post_hook(_KeepsParams(own, optimizer))


def _watch_shards(model: torch.nn.Module, optimizer: FP8Optimizer, names: Mapping[torch.nn.Parameter, str]) -> None:
    """Make the first step an error if ``fully_shard`` or torch's older FSDP has put shards in the place of the
    optimizer's parameters: their gradients would reach nobody."""
    reference = weakref.ref(model)
    held = {names[param] for group in optimizer.param_groups for param in group["params"]}

    def look(_: torch.optim.Optimizer) -> bool:
        now = reference()
        if now is None:
            return True
        for name, param in now.named_parameters():
            if name in held and param.requires_grad and is_sharded(param):
                since = (
                    SHARDED_SINCE
                    if is_fully_sharded(now)
                    else f"it is a DTensor since initialize. {NO_TENSOR_PARALLELISM}"
                )
                raise OptimizerError(f"{name}: {since}")
            if name.rpartition(".")[2] == "_flat_param":
                raise OptimizerError(
                    "torch's FullyShardedDataParallel has flattened the model since initialize, so the optimizer has "
                    "none of its parameters: use fully_shard instead (docs/fsdp2.md)"
                )
        return True

    look_before_steps(optimizer, look)


def _replication(group: Group | None, device: torch.device) -> Replication | None:
    if group is None and torch.distributed.is_available() and torch.distributed.is_initialized():
        group = torch.distributed.group.WORLD
    return None if group is None or group.size() == 1 else Replication(group, device)


def delayed_scales(model: torch.nn.Module, device: torch.device) -> list[AmaxHistory]:
    """The delayed scales of a model's FP8 layers, ready for the first step."""
    layers: dict[AmaxHistory, dict[str, list[int]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, ScaledModule):
            for quantizers in module.all_quantizers():
                if quantizers.input.history is not None:
                    layers.setdefault(quantizers.input.history, {}).setdefault(name, []).extend(quantizers.slots())
    for history, slots in layers.items():
        if history.record is None:
            history.name_layers(slots)
            history.allocate(device)
    return list(layers)


def layouts(model: torch.nn.Module) -> dict[Tensor, Layout]:
    """The weights that the user's model has in another shape, as transformers' ``Conv1D``."""
    return {
        getattr(module, name): layout
        for module in model.modules()
        if isinstance(module, ScaledModule)
        for name in module.scaled_names
        if (layout := module.layout(name)) is not None
    }


def _initial_values(
    model: torch.nn.Module,
    replaced: Mapping[torch.nn.Parameter, torch.nn.Parameter],
    value_of: Callable[[torch.nn.Parameter], Tensor],
) -> dict[torch.nn.Parameter, Callable[[], Tensor]]:
    """What computes the value of each new weight before it was rounded. Old weights that became one are its rows, in
    order."""
    known = layouts(model)
    parts: dict[torch.nn.Parameter, list[torch.nn.Parameter]] = {}
    for old, new in replaced.items():
        parts.setdefault(new, []).append(old)

    def value(new: torch.nn.Parameter, olds: Sequence[torch.nn.Parameter]) -> Tensor:
        values, layout = [value_of(old) for old in olds], known.get(new)
        values = values if layout is None else [layout.to_stored(one) for one in values]
        return torch.cat(values) if len(values) > 1 else values[0]

    return {new: partial(value, new, olds) for new, olds in parts.items()}
