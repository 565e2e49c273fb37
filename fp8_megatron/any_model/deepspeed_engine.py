"""A DeepSpeed engine over a model with FP8 weights: DeepSpeed runs the loop, this package reduces and updates.

DeepSpeed's ZeRO optimizers copy all parameters into flat buffers of 16 or 32 bits and keep FP32 masters of them. That
is the memory that FP8 weights and states save, so they do not take part: DeepSpeed runs with stage 0, and
`FP8Optimizer` keeps the states. Gradient accumulation, learning-rate schedules, data loaders and checkpoints are
DeepSpeed's.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import UserError
from .clip_grads import clip_grad_norm_
from .initialize import initialize as initialize_model
from .te_modules import te_kind

_LEVELS = ("O1", "O2", "O3")
#: The norm to which DeepSpeed clips if its configuration does not say.
_CLIPPING_DEFAULT = 1.0
_OPTIMIZERS = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}


class DeepSpeedConfigError(UserError):
    """A DeepSpeed configuration that cannot work with FP8 weights."""


@dataclass(frozen=True)
class DeepSpeedSection:
    """The configuration's ``"msamp"`` section.

    Attributes:
        opt_level: O1, O2 or O3.
        config: the configuration for DeepSpeed itself.
        max_norm: the ``gradient_clipping`` that the optimizer takes over from DeepSpeed; 0: none.
        use_te: only Transformer Engine's linear modules become FP8.
    """

    opt_level: str
    config: dict[str, Any]
    max_norm: float
    use_te: bool


def initialize(
    *,
    model: torch.nn.Module,
    config: Mapping[str, Any] | str | Path,
    optimizer: torch.optim.Optimizer | None = None,
    model_parameters: Any = None,
    **arguments: Any,
) -> tuple[Any, torch.optim.Optimizer, Any, Any]:
    """`deepspeed.initialize` for a model in FP8; without an enabled ``"msamp"`` section, that function itself.

    Args:
        config: DeepSpeed's, with ``"msamp": {"enabled": true, "opt_level": "O1" | "O2" | "O3"}``.
        optimizer: torch's Adam or AdamW; the ``"optimizer"`` section's if there is none.
        model_parameters: what that section's optimizer updates; all of the model's without.
        arguments: further ones of `deepspeed.initialize`.

    Returns:
        engine, optimizer, data loader, learning-rate scheduler.

    Raises:
        DeepSpeedConfigError: a setting that cannot work with FP8 weights, with the reason.
    """
    import deepspeed

    loaded = json.loads(Path(config).read_text()) if isinstance(config, (str, Path)) else dict(config)
    section = read_section(loaded)
    if section is None:
        return deepspeed.initialize(
            model=model, optimizer=optimizer, model_parameters=model_parameters, config=loaded, **arguments
        )
    if not torch.distributed.is_initialized():
        deepspeed.init_distributed()
    if optimizer is None:
        optimizer = _configured_optimizer(section.config, model_parameters or model.parameters())
    section.config.pop("optimizer", None)
    model.to(deepspeed.get_accelerator().current_device_name())
    model, fp8_optimizer = initialize_model(
        model, optimizer, opt_level=section.opt_level, filter=_takes_te if section.use_te else None
    )
    if section.max_norm:
        fp8_optimizer.register_step_pre_hook(_Clipping(model, section.max_norm))
    _keep_out_of_broadcasts(model)
    engine, _, loader, scheduler = deepspeed.initialize(
        model=model, optimizer=fp8_optimizer, config=section.config, **arguments
    )
    # The optimizer reduces gradients, in FP8 and during backward, and knows where they are stored.
    engine.enable_backward_allreduce = False
    engine.zero_grad = fp8_optimizer.zero_grad
    return engine, fp8_optimizer, loader, scheduler


def read_section(config: Mapping[str, Any]) -> DeepSpeedSection | None:
    """What the ``"msamp"`` section asks for; None if there is none, or it is not enabled.

    BF16 becomes torch's autocast: linear layers compute in FP8 and the rest in BF16, and other parameters keep their
    dtype. ZeRO stages 1 and 2 become stage 0.

    Raises:
        DeepSpeedConfigError: see `initialize`.
    """
    asked = config.get("msamp", {})
    if not asked.get("enabled", False):
        return None
    level = asked.get("opt_level", "O1")
    if level not in _LEVELS:
        raise DeepSpeedConfigError(f'"msamp": opt_level({level!r}) is not one of {", ".join(_LEVELS)}')
    zero = dict(config.get("zero_optimization", {}))
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2):
        raise DeepSpeedConfigError(
            f'"zero_optimization": stage({stage}) flattens weights into 16 bits: use stage 0, 1 or 2, or FSDP2'
        )
    for name in ("offload_optimizer", "offload_param"):
        if (zero.get(name) or {}).get("device", "none") not in (None, "none"):
            raise DeepSpeedConfigError(f'"zero_optimization": {name} moves FP32 states: FP8 states stay on the GPU')
    if config.get("fp16", {}).get("enabled", False):
        raise DeepSpeedConfigError('"fp16": its loss scale is DeepSpeed\'s own optimizer\'s: use "bf16"')
    taken = copy.deepcopy({key: value for key, value in config.items() if key not in ("msamp", "zero_optimization")})
    if taken.pop("bf16", {}).get("enabled", False):
        taken["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    max_norm = float(taken.pop("gradient_clipping", _CLIPPING_DEFAULT))
    return DeepSpeedSection(level, taken | {"gradient_clipping": 0.0}, max_norm, bool(asked.get("use_te", False)))


def _takes_te(name: str, module: torch.nn.Module) -> bool:
    return te_kind(module) is not None


def _configured_optimizer(config: Mapping[str, Any], params: Any) -> torch.optim.Optimizer:
    """torch's optimizer of the ``"optimizer"`` section; as in DeepSpeed, Adam decays as AdamW unless told otherwise."""
    section = config.get("optimizer", {})
    kind, options = section.get("type"), dict(section.get("params", {}))
    if kind not in _OPTIMIZERS:
        raise DeepSpeedConfigError(f'"optimizer": type({kind!r}) is not one of {", ".join(_OPTIMIZERS)}')
    options.pop("torch_adam", None)
    decoupled = options.pop("adam_w_mode", True) or kind == "AdamW"
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    return (torch.optim.AdamW if decoupled else torch.optim.Adam)(params, **options)


class _Clipping:
    """Clips before each step, and leaves the norm where the engine looks for it."""

    def __init__(self, model: torch.nn.Module, max_norm: float) -> None:
        self._model, self._max_norm = model, max_norm

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        optimizer._global_grad_norm = clip_grad_norm_(self._model, self._max_norm)


def _keep_out_of_broadcasts(model: torch.nn.Module) -> None:
    """Mark parameters that `initialize` has sent to all ranks already, as DeepSpeed marks shards of its own layers.

    DeepSpeed would send the bytes of each parameter; a `ScaledTensor` has two tensors of them.
    """
    for parameter in model.parameters():
        parameter.ds_optim_param = True  # type: ignore[attr-defined]
