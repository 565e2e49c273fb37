"""The schedule of learning rate and weight decay."""

from __future__ import annotations

from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from ..config.schema import OptimizerConfig


def build_scheduler(optimizer: Any, config: OptimizerConfig, train_iters: int) -> OptimizerParamScheduler:
    """megatron-core's schedule, counted in optimizer steps.

    Args:
        optimizer: any object with torch's `param_groups`; the schedule writes `lr` and `weight_decay` into them.
    """
    return OptimizerParamScheduler(
        optimizer,
        init_lr=config.lr_warmup_init,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.warmup_iters(train_iters),
        lr_decay_steps=config.decay_iters(train_iters),
        lr_decay_style=config.lr_decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=train_iters,
        wd_incr_style="constant",
        wsd_decay_steps=config.lr_wsd_decay_iters,
        lr_wsd_decay_style=config.lr_wsd_decay_style,
    )
