"""The optimizer's section of the configuration (`schema` says how fields become flags)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Le

from ..update_rules import RULES
from .fields import BelowOne, Count, CountOrZero, NotNegative, Positive, Samples, SamplesOrZero
from .words import flag_name

if TYPE_CHECKING:
    RuleName = str
else:
    RuleName = Literal[tuple(RULES)]


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its schedule."""

    optimizer: RuleName = "adam"
    """The update rule. adam and adamw are AdamW, as in Megatron. muon: for the weights of linear layers; AdamW has the
    rest."""
    optimizer_options: tuple[str, ...] = ()
    """Options of --optimizer that have no flags of their own, as name=value: nesterov=true."""
    decoupled_weight_decay: bool = True
    """On: AdamW. Off: the L2 term is added to the gradient, so it enters both moments."""
    lr: Positive = 3e-4
    """Peak learning rate."""
    min_lr: NotNegative = 0.0
    """Learning rate at the end of the decay."""
    decoupled_lr: Positive | None = None
    """Peak learning rate of the embedding and the output layer. Default: --lr."""
    decoupled_min_lr: NotNegative | None = None
    """Learning rate of the embedding and the output layer at the end of the decay. Default: --min-lr."""
    lr_decay_style: Literal["cosine", "linear", "constant", "inverse-square-root", "WSD"] = "linear"
    """Shape of the decay. WSD: warm up, stay constant, decay over the last --lr-wsd-decay-iters steps."""
    lr_warmup_fraction: BelowOne | None = None
    """Length of the linear warm-up, as a fraction of the decay's length. Replaces --lr-warmup-iters and -samples."""
    lr_warmup_iters: CountOrZero = 0
    """Linear warm-up steps. If --train-iters is too short, the warm-up ends one step before the last."""
    lr_warmup_samples: SamplesOrZero = 0
    """Linear warm-up in samples, with --train-samples."""
    lr_warmup_init: NotNegative = 0.0
    """Learning rate at the start of the warm-up."""
    lr_decay_iters: Count | None = None
    """Step at which the decay ends. Default: train-iters."""
    lr_decay_samples: Samples | None = None
    """Samples after which the decay ends, with --train-samples. Default: train-samples."""
    lr_wsd_decay_iters: CountOrZero | None = None
    """Steps of WSD's final decay; 0: there is none."""
    lr_wsd_decay_samples: SamplesOrZero | None = None
    """Samples of WSD's final decay, with --train-samples; 0: there is none."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of WSD's final decay."""
    override_opt_param_scheduler: bool = False
    """With --load: if the checkpoint has another schedule, use the schedule of the flags without a warning."""
    use_checkpoint_opt_param_scheduler: bool = False
    """With --load: use the checkpoint's schedule of learning rate and weight decay, and ignore the flags."""
    weight_decay: NotNegative = 0.01
    """Weight decay of matrices; norms and biases have none."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """constant: always --weight-decay. Others: from --start-weight-decay to --end-weight-decay over the run."""
    start_weight_decay: NotNegative | None = None
    """Weight decay of the first step, with --weight-decay-incr-style."""
    end_weight_decay: NotNegative | None = None
    """Weight decay at the end of the run, with --weight-decay-incr-style."""
    adam_beta1: BelowOne = 0.9
    """Decay of the first moment."""
    adam_beta2: BelowOne = 0.999
    """Decay of the second moment."""
    adam_eps: Positive = 1e-8
    """Term added to the denominator."""
    sgd_momentum: BelowOne = 0.9
    """Momentum of --optimizer sgd; 0: none."""
    lion_beta1: BelowOne = 0.95
    """Share of the momentum in the step of --optimizer lion."""
    lion_beta2: BelowOne = 0.98
    """Decay of the momentum of --optimizer lion."""
    muon_momentum: BelowOne = 0.9
    """Decay of the momentum of --optimizer muon."""
    muon_nesterov: bool = False
    """Nesterov's form of the momentum."""
    muon_split_qkv: bool = True
    """Query, key and value are matrices of their own, and so are gate and up."""
    muon_num_ns_steps: Annotated[int, Ge(1), Le(99)] = 5
    """Steps of Newton-Schulz."""
    muon_coefficient_type: Literal["quintic", "simple", "polar_express", "cans", "aol", "deepseekv4"] = "quintic"
    """Coefficients of Newton-Schulz. simple: the same at each step. polar_express has 8 steps, deepseekv4 10: fewer are
    the first ones."""
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = "spectral"
    """What a matrix [N, K] of the update is multiplied by. spectral: √max(N, K). unit_rms_norm: √(N / K).
    shape_scaling: √max(1, N / K)."""
    muon_extra_scale_factor: Positive = 1.0
    """Multiplies the update too. With spectral, 0.2 gives it about the size of Adam's."""
    muon_tp_mode: Literal["duplicated", "distributed", "blockwise"] = "duplicated"
    """What tensor-parallel ranks do. duplicated: each one computes whole matrices. distributed: they share the work.
    blockwise: each one takes its part for a matrix."""
    clip_grad: NotNegative = 1.0
    """Clip the global gradient norm to this; 0 turns clipping off."""
    loss_scale: Positive | None = None
    """Constant loss scale for --precision fp16. Default: a dynamic one."""
    initial_loss_scale: Positive = 65536.0
    """First dynamic loss scale. Megatron starts at 2^32, which overflows for 16 steps before it is halved to this."""
    min_loss_scale: Positive = 1.0
    """Smallest dynamic loss scale."""
    loss_scale_window: Count = 1000
    """Steps without an overflow after which the dynamic loss scale doubles."""
    hysteresis: Count = 2
    """Overflows before the dynamic loss scale halves."""

    def decay_counts(self, train_counts: int) -> int:
        """Where the decay ends, in the counts of the run (`Config.train_counts`), with the default filled in."""
        given = self.lr_decay_samples if self.lr_decay_iters is None else self.lr_decay_iters
        return train_counts if given is None else given

    def warmup_counts(self, counts_samples: bool) -> int:
        """The warm-up that was asked for without a fraction, in the counts of the run."""
        return self.lr_warmup_samples if counts_samples else self.lr_warmup_iters

    @property
    def rule_options(self) -> dict[str, Any]:
        """The options of the update rule: those with flags, and those of `optimizer_options`.

        Raises:
            ValueError: a word of `optimizer_options` gives no option of the rule, with the options that there are.
        """
        rule = RULES[self.optimizer]
        options: dict[str, Any] = {}
        for option, names in rule.settings.items():
            values = tuple(getattr(self, name) for name in names)
            options[option] = values if isinstance(rule.options[option], tuple) else values[0]
        return options | dict(self._option(word) for word in self.optimizer_options)

    def _option(self, word: str) -> tuple[str, Any]:
        rule = RULES[self.optimizer]
        without_flags = {name: default for name, default in rule.options.items() if name not in rule.settings}
        name, _, text = word.partition("=")
        if name in without_flags:
            value = _option_value(text, without_flags[name])
            if value is not None:
                return name, value
        flags = [flag_name(setting) for names in rule.settings.values() for setting in names]
        known = ", ".join(flags + [f"--optimizer-options {name}={_shown(it)}" for name, it in without_flags.items()])
        raise ValueError(f"optimizer_options({word}) is none of optimizer({self.optimizer}), which has {known}")


def _option_value(text: str, default: Any) -> Any:
    """A value of the kind of `default`, numbers from 0 to 1; None: it is none."""
    if isinstance(default, bool):
        return {"true": True, "false": False}.get(text.lower())
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        return None
    if len(numbers) != (len(default) if isinstance(default, tuple) else 1) or not all(0.0 <= x <= 1.0 for x in numbers):
        return None
    return numbers if isinstance(default, tuple) else numbers[0]


def _shown(value: Any) -> str:
    """An option's value as it is given."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value).lower()
