"""`msamp.initialize`."""

from __future__ import annotations

import sys
from types import FrameType

import torch

import fp8_megatron

from .nn.linear import _takes_fp8
from .optim import named_class
from .te.replacer import check_has_te, takes_te

#: MS-AMP's levels, and O3, which MS-AMP has in its DeepSpeed and FSDP parts.
opt_levels = ["O1", "O2", "O3"]


def initialize(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    opt_level: str = "O1",
    use_te: bool = False,
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The model with FP8 linear layers, and the optimizer over FP8 state, as `fp8_megatron.initialize` makes them.

    The model is moved to the current GPU first, if there is one.

    Args:
        optimizer: torch's AdamW or Adam, or DeepSpeed's FusedAdam; AdamW with its defaults if there is none.
        opt_level: O1, O2 or O3.
        use_te: turn Transformer Engine's linear modules into FP8 layers, in place of `torch.nn.Linear`.

    Raises:
        ValueError: an unknown level, a model that is no module, an optimizer that cannot be used, `use_te` without a
            module of Transformer Engine.
    """
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"the model is a {type(model).__name__}, not a torch.nn.Module")
    if opt_level not in opt_levels:
        raise ValueError(f"opt_level({opt_level!r}) is not one of {', '.join(opt_levels)}")
    if use_te:
        check_has_te(model)
    _leave_gradients_unscaled(sys._getframe(1))
    if torch.cuda.is_available():
        model.cuda()
    optimizer = torch.optim.AdamW(model.parameters()) if optimizer is None else torch_optimizer(optimizer)
    kind = named_class(optimizer)
    takes = takes_te if use_te else _takes_fp8
    model, fp8_optimizer = fp8_megatron.initialize(model, optimizer, opt_level=opt_level, filter=takes)
    fp8_optimizer.__class__ = kind
    return model, fp8_optimizer


def torch_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """torch's Adam or AdamW in place of DeepSpeed's FusedAdam, with its groups; other optimizers as they are.

    Raises:
        ValueError: it was built without bias correction.
    """
    if type(optimizer).__name__ != "FusedAdam":
        return optimizer
    groups = optimizer.param_groups
    if not all(group.get("bias_correction", True) for group in groups):
        raise ValueError("FusedAdam(bias_correction=False): the FP8 optimizer corrects its moments; leave it out")
    kind = torch.optim.AdamW if getattr(optimizer, "adam_w_mode", True) else torch.optim.Adam
    names = ("lr", "betas", "eps", "weight_decay")
    built = kind([{"params": group["params"], **{name: group[name] for name in names}} for group in groups])
    built.defaults.update({name: optimizer.defaults[name] for name in names})
    return built


def _leave_gradients_unscaled(caller: FrameType | None) -> None:
    """Take the GradScaler from the `Accelerator` that called, if one did.

    With this backend Accelerate multiplies the loss by its scaler's factor, and hands the scaler to no optimizer. The
    factor would stay in the gradients: `accelerator.clip_grad_norm_` would clip every step, and Adam's eps would count
    65,536 times less. BF16 and FP8 gradients need no loss scale.
    """
    accelerate = sys.modules.get("accelerate")
    accelerator = caller.f_locals.get("self") if caller is not None else None
    if accelerate is not None and isinstance(accelerator, accelerate.Accelerator):
        accelerator.scaler = None
