"""`initialize`: a model and its optimizer in FP8."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import TypeVar

import torch

from ..device.group import Group
from ..dtypes import LEVELS
from ..errors import UserError
from ..formats.recipes import RecipeName
from ..nn.module import NO_TENSOR_PARALLELISM, FP8Linear
from ..nn.recomputed import Recomputations
from ..quantization.recipe import Recipe
from .build import build_optimizer
from .kinds import is_fp8
from .left_out_masks import leave_out_masks
from .linears import LinearFilter, replace_linears
from .losses import take_16_bit_logits
from .optimizer import FP8Optimizer, is_fully_sharded, is_sharded
from .quantized_layers import find_quantized
from .torch_optimizers import Given, UserOptimizers, check_params, look_before_steps

logger = logging.getLogger(__name__)

LEVEL_NAMES = ("O1", "O2", "O3")

Model = TypeVar("Model", bound=torch.nn.Module)


def initialize(
    model: Model,
    optimizer: Given,
    opt_level: str = "O2",
    *,
    recipe: Recipe | RecipeName = "tensorwise",
    process_group: Group | None = None,
    filter: LinearFilter | None = None,
    gradient_accumulation_steps: int | None = None,
    recompute_activations: bool = False,
) -> tuple[Model, FP8Optimizer]:
    """Put a model's linear layers and its optimizer's state in FP8. Returns the same model, and a new optimizer.

    Language models of transformers with transformers' loss get one that reads 16-bit logits as they are (`losses`).

    The training loop stays as it is: autocast, gradient accumulation, clipping, GradScaler, learning-rate schedulers,
    checkpoints. Call it once, after the model is on its device and before the first step. Wrap or compile the model
    afterwards. torch's ``fully_shard`` comes before it, after `replace_linears` (docs/fsdp2.md).

    The trainer's defaults are O3 and delayed, which are faster. Nothing says here that a model runs the same layers in
    every step, as delayed scales want, or on several ranks, which O3 is for; on one, O2 takes the fewest bytes.

    Args:
        model: any module; its linear layers become `FP8Linear` in place (`replace_linears`), or are so already.
        optimizer: torch's AdamW or Adam, or another that `update_rules` knows, over the model's parameters, before its
            first step. Do not use it again; its param groups belong to the returned optimizer. Linear layers that are
            trained and that it does not have stay as they are, for another optimizer. Or a list of optimizers that
            share all trained parameters, one for matrices and one for the rest: the returned one steps for all of them.
        opt_level: storage of a trained linear layer. Bytes a parameter: O1 11 (weight FP16, gradient FP8, moments
            FP32), O2 6 (moments FP8 and FP16), O3 7 (weight FP8, master FP16, the rest as O2).
        recipe: how operands of the GEMMs are scaled: tensorwise (by each tensor's own values), delayed (by the last 16
            steps' values), blockwise (128 values share a scale), mxfp8 (32 values), nvfp4 (16
            values, of 4 bits).
        process_group: data-parallel ranks; None: all ranks of torch.distributed, if it is initialised.
        filter: (name, layer) → whether the layer may become FP8; None: all whose sizes an FP8 GEMM takes.
        gradient_accumulation_steps: backward passes per step. It saves the first step from moving its gradients to
            wider storage; None: found out.
        recompute_activations: less memory for a slower backward (`replace_linears`). The log has a warning at
            the first step if it does nothing.

    Raises:
        UserError: the model or the optimizer cannot be used, with its name and the fix.
    """
    _check_values(opt_level, filter, process_group, gradient_accumulation_steps)
    _check_model(model)
    if any(isinstance(one, FP8Optimizer) for one in (optimizer if isinstance(optimizer, Sequence) else (optimizer,))):
        raise UserError("the optimizer is an FP8Optimizer already: initialize is called once")
    users = UserOptimizers.of(optimizer)
    if is_fully_sharded(model):
        given = {
            "recipe": recipe != "tensorwise",
            "filter": filter is not None,
            "recompute_activations": recompute_activations,
            "process_group": process_group is not None,
        }
        unread = [name for name, is_given in given.items() if is_given]
        sharded = _initialize_sharded(model, optimizer, opt_level, unread)
        _suit_transformers(model)
        return model, sharded
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            raise UserError(f"{name} is a DTensor: {NO_TENSOR_PARALLELISM}")
    is_set = recipe != "tensorwise" or filter is not None or recompute_activations
    if is_set and any(is_fp8(module) for module in model.modules()):
        raise UserError(
            "the model has FP8 layers already: give recipe, filter and recompute_activations to replace_linears, which "
            "made them"
        )
    quantized = find_quantized(model)
    left_out = quantized.left_out
    names = {parameter: name for name, parameter in model.named_parameters() if parameter not in left_out}
    kept = [[one for one in group["params"] if one not in left_out] for group in users.param_groups]
    for group, params in zip(users.param_groups, kept, strict=True):
        check_params({**group, "params": params}, names, quantized.scales)
    users.check_shares(names)
    for group, params in zip(users.param_groups, kept, strict=True):
        group["params"] = params
    optimized = {parameter for params in kept for parameter in params}
    _check_memory(names, optimized)
    replaced = replace_linears(
        model,
        recipe=recipe,
        weight=LEVELS[opt_level].weight,
        filter=filter,
        recompute_activations=recompute_activations,
        optimized=optimized,
        quantized=quantized,
    )
    built = build_optimizer(
        model,
        optimizer,
        replaced,
        opt_level,
        value_of=quantized.value,
        process_group=process_group,
        gradient_accumulation_steps=gradient_accumulation_steps,
    )
    _suit_transformers(model)
    _warn_of_vain_recomputing(model, built)
    _warn_of_old_weights(names, replaced, built)
    return model, built


def _suit_transformers(model: torch.nn.Module) -> None:
    take_16_bit_logits(model)
    leave_out_masks(model)


def _check_values(opt_level: str, filter: object, process_group: object, gradient_accumulation_steps: object) -> None:
    """Check arguments of `initialize` that need no model.

    Raises:
        UserError: one has a value that it cannot have.
    """
    if opt_level not in LEVEL_NAMES:
        raise UserError(f"opt_level({opt_level!r}) is not one of {', '.join(LEVEL_NAMES)}")
    if filter is not None and not callable(filter):
        raise UserError(f"filter({filter!r}) is not a function: give one of (name, layer), such as a lambda")
    if process_group is not None and not (torch.distributed.is_available() and isinstance(process_group, Group)):
        raise UserError(
            f"process_group({process_group!r}) is no process group that has this rank: give one of "
            f"torch.distributed.new_group, or get_group() of a mesh with one dimension"
        )
    if gradient_accumulation_steps is None:
        return
    if not isinstance(gradient_accumulation_steps, Integral):
        raise UserError(
            f"gradient_accumulation_steps({gradient_accumulation_steps!r}) is not a whole number: give the backward "
            f"passes per step, or leave it out"
        )
    if gradient_accumulation_steps < 1:
        raise UserError(f"gradient_accumulation_steps({gradient_accumulation_steps}) is less than 1: leave it out")


def _check_model(model: object) -> None:
    """Check that the model is neither wrapped nor initialised, and that its parameters have shapes.

    Raises:
        UserError: it is, or a parameter has none, or it is no module.
    """
    if not isinstance(model, torch.nn.Module):
        kind = type(model).__name__
        raise UserError(f"model has the type {kind}: call initialize(model, optimizer) with a torch.nn.Module")
    wrappers = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in wrappers and type(module).__module__.startswith("torch."):
            fix = "call initialize first, then wrap the model"
            if kind == "FullyShardedDataParallel":
                fix = "it would flatten FP8 weights: use torch's fully_shard instead (docs/fsdp2.md)"
            raise UserError(f"{name or 'the model'} is a {kind}: {fix}")
    for name, parameter in model.named_parameters():
        if torch.nn.parameter.is_lazy(parameter):
            raise UserError(f"{name} has no shape yet: call the model once, so that its lazy layers see an input")
        if getattr(parameter, "main_grad", None) is not None:
            raise UserError(
                f"{name} has an FP8 optimizer already: initialize is called once for a model; if it has several "
                f"optimizers, give it a list of them, or each its own part, initialize(model.part, optimizer)"
            )


def _check_memory(names: Mapping[torch.nn.Parameter, str], optimized: Container[torch.nn.Parameter]) -> None:
    """Check that no trained parameter shares its memory with another one, as after ``b.data = a.data``.

    Raises:
        UserError: two do. Each would have memory of its own, and they would drift apart.
    """
    at: dict[tuple[torch.device, int], torch.nn.Parameter] = {}
    for parameter, name in names.items():
        if type(parameter) is not torch.nn.Parameter or parameter.is_meta or not parameter.numel():
            continue
        other = at.setdefault((parameter.device, parameter.data_ptr()), parameter)
        if other is not parameter and any(one.requires_grad and one in optimized for one in (parameter, other)):
            raise UserError(
                f"{names[other]} and {name} are two parameters in one memory, and training would separate them: make "
                f"them one parameter (b.weight = a.weight in place of b.weight.data = a.weight.data), or give each its "
                f"own memory (.clone())"
            )


def _initialize_sharded(model: torch.nn.Module, optimizer: Given, opt_level: str, given: Sequence[str]) -> FP8Optimizer:
    """The optimizer of a model that torch's ``fully_shard`` has sharded.

    Args:
        given: the arguments of `initialize` that the caller has given and that nothing here reads.

    Raises:
        UserError: there are such arguments.
    """
    from .fsdp import build_sharded_optimizer  # importing torch's FSDP2 takes seconds

    if given:
        raise UserError(
            f"{' and '.join(given)}: fully_shard has sharded the model already; give recipe, filter and "
            f"recompute_activations to replace_linears before it; the ranks are those of its mesh"
        )
    sharded = build_sharded_optimizer(model, optimizer, opt_level)
    _warn_of_vain_recomputing(model, sharded)
    return sharded


def _warn_of_old_weights(
    names: Mapping[torch.nn.Parameter, str],
    replaced: Iterable[torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Warn at the first step if weights of `replaced` are still alive.

    A list of parameters that was made before is the usual reason. Clipping that list leaves out the weights of the
    model, which have no gradient there, and the old weights keep their memory.
    """
    weights = {names[param]: weakref.ref(param) for param in replaced if param in names}

    def look(_: torch.optim.Optimizer) -> bool:
        alive = [name for name, weight in weights.items() if weight() is not None]
        if alive:
            logger.warning(
                "%d weights are still held as they were before FP8 (%s): the model has others now, so clipping or logs "
                "that go through a list of the old ones leave them out, and the old ones keep their memory. Take "
                "model.parameters() after initialize",
                len(alive),
                ", ".join(alive[:3]) + (", …" if len(alive) > 3 else ""),
            )
        return True

    look_before_steps(optimizer, look)


def _warn_of_vain_recomputing(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Warn at the first step with a gradient if the layers that should compute inputs again have found none."""
    layers = [module for module in model.modules() if isinstance(module, FP8Linear)]
    for recomputations in {layer.recomputations for layer in layers}:
        if recomputations is not None:
            look_before_steps(optimizer, partial(_look_for_recomputing, recomputations))


def _look_for_recomputing(recomputations: Recomputations, optimizer: torch.optim.Optimizer) -> bool:
    """Warn if a step has a gradient and nothing was found; whether the step has one."""
    if all(param.grad is None for group in optimizer.param_groups for param in group["params"]):
        return False
    if not recomputations.were_found:
        logger.warning(
            "recompute_activations does nothing: before the first step no trained FP8 layer took the output of "
            "GELU, SiLU or a product of two tensors of one shape, outside of hooks of saved tensors "
            "(torch.utils.checkpoint); leave it out"
        )
    return True
