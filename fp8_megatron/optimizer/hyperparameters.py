"""Settings of the optimizer that are constant over a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AdamW:
    """AdamW (arXiv 1711.05101), or Adam with an L2 term.

    Attributes:
        lr: peak learning rate. min_lr: the one at the end of a schedule's decay.
        decoupled_lr, decoupled_min_lr: those of spaces with `has_decoupled_lr`; None: as for the others.
        beta1, beta2: decay of the first and the second moment.
        eps: added to the denominator.
        weight_decay: of matrices; norms and biases have none.
        clip_grad: the global gradient norm is clipped to this; 0: never.
        is_decoupled: weight decay acts on the weight (AdamW); False adds the L2 term to the gradient (Adam).
    """

    lr: float = 3e-4
    min_lr: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_grad: float = 1.0
    is_decoupled: bool = True
    decoupled_lr: float | None = None
    decoupled_min_lr: float | None = None

    def rates(self, *, decoupled: bool) -> tuple[float, float]:
        """(peak, end of the decay) of the learning rate of a space."""
        peak, least = (self.decoupled_lr, self.decoupled_min_lr) if decoupled else (None, None)
        return self.lr if peak is None else peak, self.min_lr if least is None else least
