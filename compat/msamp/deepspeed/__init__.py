"""DeepSpeed with the ``"msamp"`` section of its configuration."""

from __future__ import annotations

from typing import Any

import torch

from fp8_megatron.any_model import deepspeed_engine

from ..initialize import torch_optimizer

__all__ = ["initialize"]


def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    *,
    config: Any = None,
    config_params: Any = None,
    **arguments: Any,
) -> tuple[Any, torch.optim.Optimizer, Any, Any]:
    """`deepspeed.initialize`; see `fp8_megatron.any_model.deepspeed_engine.initialize` for what the section does.

    Args:
        config, config_params: the configuration, a dict or a path; or ``args.deepspeed_config``.

    Raises:
        ValueError: no model, no configuration, or a setting that cannot work with FP8 weights.
    """
    given = config if config is not None else config_params
    given = given if given is not None else getattr(args, "deepspeed_config", None)
    if model is None or given is None:
        raise ValueError("msamp.deepspeed.initialize needs a model and a config (or args.deepspeed_config)")
    return deepspeed_engine.initialize(
        model=model,
        config=given,
        optimizer=None if optimizer is None else torch_optimizer(optimizer),
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        **arguments,
    )
