"""Adam under MS-AMP's names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..refusals import refuse
from .adamw import LBAdamW

__getattr__ = refuse(__name__, {}, late={"FSDPAdam": "msamp.optim.fsdp"})


class AdamArguments:
    """The arguments of MS-AMP's Adam, whose weight decay is an L2 term of the gradient, in front of `Moments`."""

    decoupled_weight_decay = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(  # type: ignore[call-arg]
            params, lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, **kwargs
        )


class LBAdam(AdamArguments, LBAdamW):
    """Adam over FP8 weights, gradients and moments."""


class DSAdam(LBAdamW):
    """Adam with the arguments of DeepSpeed's FusedAdam. Other arguments are `LBAdamWBase`'s.

    Args:
        adam_w_mode: decay as AdamW does; otherwise as Adam's L2 term.
        set_grad_none: no effect; `zero_grad` says what becomes of gradients.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        **kwargs: Any,
    ) -> None:
        self.decoupled_weight_decay = adam_w_mode
        super().__init__(params, lr, bias_correction, betas, eps, weight_decay, amsgrad, **kwargs)
