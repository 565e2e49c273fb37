"""Hooks of a model whose replicas share gradients.

torch's DDP may wrap the model (`allow_ddp`): it then leaves out the gradients that `Replication` exchanges. The
replicas meet where a state dict gathers their shards (`MeetsForState`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..nn.module import FP8Linear
from ..nn.scaled_module import ScaledModule
from ..quantization.scaled_tensor import ScaledTensor
from .data_parallel import ModelHook, ReplicaError, Replication
from .gradients import ParamGrad, ReadableGradBuffer
from .te_layers import FP8LayerNormMLP


def allow_ddp(model: torch.nn.Module, buffers: Sequence[ReadableGradBuffer], replication: Replication | None) -> None:
    """Let torch's DDP wrap `model`: it reduces nothing twice.

    DDP leaves out what a model lists. It refuses a model without a gradient of its own, so it keeps one plain
    parameter: it averages that one's ``p.grad``, and the mean of the means over replicas is the mean. In a model of FP8
    layers alone it is a bias.

    Args:
        buffers: the gradients of all trained parameters.
        replication: follows DDP's ``no_sync``; None: there is one replica.
    """
    layers = [module for module in model.modules() if isinstance(module, (ScaledModule, FP8LayerNormMLP))]
    owned = {param for layer in layers for param in layer.parameters()}
    free = [grad for buffer in buffers for grad in buffer.gradients if grad.param not in owned]
    if not free:
        biases = {layer.bias for layer in layers if isinstance(layer, FP8Linear)}
        free = [grad for buffer in buffers for grad in buffer.gradients if grad.param in biases]
    kept = min(free, key=lambda grad: (grad.param.ndim > 1, grad.param.numel()), default=None)
    model._ddp_params_and_buffers_to_ignore = _LeftOut(model, kept)  # type: ignore[assignment]
    model.register_forward_pre_hook(_FollowsDDP(kept, replication))


class _LeftOut:
    """The names of the parameters that torch's DDP leaves out: those of the FP8 optimizer, FP8 weights, frozen ones. It
    asks once, when it wraps the model.

    From then on the gradient that it keeps is left to it, until `_FollowsDDP` sees a forward without it. A compiled
    model runs no such hook.

    Raises:
        ReplicaError: nothing would be left for DDP, in a model of FP8 layers without a bias.
    """

    def __init__(self, model: torch.nn.Module, kept: ParamGrad | None) -> None:
        self._model = weakref.ref(model)
        self._kept = kept

    def __iter__(self) -> Iterator[str]:
        model = self._model()
        assert model is not None
        if self._kept is not None:
            self._kept.leave_to_others()
            if not self._kept.param._backward_hooks:  # DDP sees autograd's gradients alone
                self._kept.param.register_hook(_unchanged)
        has_any = self._kept is not None
        for name, param in model.named_parameters(remove_duplicate=False):
            own = getattr(param, "main_grad", None)
            if own is None and param.requires_grad and not isinstance(param, ScaledTensor):
                param.reduced_by_ddp = has_any = True  # type: ignore[attr-defined]  # it may be another optimizer's
            elif own is None or own is not self._kept:
                # DDP looks for a root's own parameters under another name, and torch.compile adds a name.
                yield from (name, f".{name}", f"_orig_mod.{name}")
        if not has_any:
            raise ReplicaError(
                "torch's DDP has nothing to reduce here, because the FP8 optimizer shares all gradients: call the "
                "model itself, and give accelerator.prepare the optimizer and the data alone"
            )

    def __reduce__(self) -> tuple[type[list[str]], tuple[()]]:
        """Nobody reduces the gradients of a copy: DDP leaves nothing out."""
        return list, ()


def _unchanged(grad: Tensor) -> None:
    """A hook for which a layer gives a bias's gradient to autograd (`nn.operands.delivered`)."""


class RefusesDDP:
    """In the place of the names that DDP leaves out, for a model whose optimizer was built before there were ranks.

    Raises:
        ReplicaError: torch's DDP wraps the model.
    """

    def __iter__(self) -> Iterator[str]:
        raise ReplicaError(
            "torch's DDP wraps a model that initialize has seen before init_process_group, so its optimizer knows no "
            "ranks: call init_process_group (or make the Accelerator, or Trainer's TrainingArguments) before "
            "initialize. With PyTorch Lightning call initialize in configure_model"
        )

    def __reduce__(self) -> tuple[type[list[str]], tuple[()]]:
        """See `_LeftOut`."""
        return list, ()


class _FollowsDDP(ModelHook):
    """Forward pre-hook: whether torch's DDP runs the model, and so reduces the gradient that it keeps; and whether it
    does so inside of its ``no_sync``. DDP, too, asks in forward.

    Args:
        kept: the gradient that a DDP around the model reduces.

    Raises:
        ReplicaError: DDP wrapped the model before `initialize` replaced its parameters, or is inside of ``join()``; or
            the step is recorded.
    """

    def __init__(self, kept: ParamGrad | None, replication: Replication | None) -> None:
        self._kept = kept
        self._replication = replication
        self._accepted: weakref.ref[torch.nn.Module] | None = None

    def __call__(self, *unused: Any) -> None:
        if torch.compiler.is_compiling():
            return
        ddp = torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()
        if ddp is not None and (self._accepted is None or self._accepted() is not ddp):
            self._check_age(ddp)
            self._accepted = weakref.ref(ddp)
        kept, replication = self._kept, self._replication
        if kept is None:
            return
        if ddp is not None and replication is not None and replication.is_recorded:
            raise ReplicaError(
                "torch's DDP reduces gradients during backward, which record_step cannot record: call the model of "
                "initialize itself, which shares its gradients without DDP"
            )
        kept.is_left_to_others = ddp is not None
        if ddp is not None and torch.is_grad_enabled():  # one replica alone may evaluate
            kept.leave_to_others()
        if replication is not None and torch.is_grad_enabled():
            replication.ddp_holds_back = ddp is not None and not ddp.require_backward_grad_sync
            if ddp is not None and ddp._join_config.enable and not ddp._join_config.throw_on_early_termination:
                raise ReplicaError(
                    "join() of torch's DDP lets a rank without data answer for DDP alone; the others would wait for "
                    "its FP8 gradients: give all ranks equally many batches (DistributedSampler, drop_last=True, "
                    "even_batches=True), or end all at the first: join(throw_on_early_termination=True)"
                )

    def _check_age(self, ddp: torch.nn.parallel.DistributedDataParallel) -> None:
        held, kept = set(ddp.module.parameters()), None if self._kept is None else self._kept.param
        if any(
            param not in held or (param is not kept and getattr(param, "main_grad", None) is not None)
            for param in ddp._module_parameters
        ):
            raise ReplicaError(
                "torch's DDP wrapped the model before initialize, and would reduce its old parameters: call initialize "
                "first, then wrap it (PyTorch Lightning wraps before configure_optimizers: call initialize in "
                "configure_model)"
            )


class MeetsForState(ModelHook):
    """State-dict pre-hook: the replicas meet, because a weight's value is gathered from shards of its master.

    Args:
        is_consolidated: whether state dicts ask no other replica.
    """

    def __init__(self, replication: Replication, is_consolidated: Callable[[], bool]) -> None:
        self._replication = replication
        self._is_consolidated = is_consolidated

    def __call__(self, module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
        if not prefix and not keep_vars:
            self.meet("model.state_dict()")

    def meet(self, what: str) -> None:
        """Wait for the other replicas, which do `what` too."""
        if not self._is_consolidated():
            self._replication.meet(what)
