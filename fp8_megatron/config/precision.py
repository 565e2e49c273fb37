"""The section ``precision`` of the configuration: what is computed and stored in FP8 (`schema` says how fields become
flags).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ..storage import (
    FP8_GEMM_MULTIPLE,
    GEMM_BLOCK,
    LEVELS,
    MX_BLOCK,
    NV_BLOCK,
    RecipeName,
    StorageDtype,
    StorageFormats,
)
from .fields import BelowOne, Count, History, LayersOrZero, Margin

Precision = Literal["bf16", "fp16", "te", "fp8"]
OptLevel = Literal["O1", "O2", "O3"]

#: Elements along a GEMM's sum that share a scale, in recipes whose blocks do not cross ranks.
_BLOCKS: dict[RecipeName, int] = {"blockwise": GEMM_BLOCK, "mxfp8": MX_BLOCK, "nvfp4": NV_BLOCK}

#: The dtypes of each kind of storage. Each companded integer is made for one moment, split for masters of FP8 weights.
WeightDtype = Literal[StorageDtype.FP32, StorageDtype.BF16, StorageDtype.FP16, StorageDtype.FP8]
MasterDtype = Literal[StorageDtype.FP32, StorageDtype.BF16, StorageDtype.FP16, StorageDtype.FP8, StorageDtype.SPLIT]
MainGradDtype = Literal[StorageDtype.FP32, StorageDtype.BF16, StorageDtype.FP8]
ExpAvgDtype = Literal[StorageDtype.FP32, StorageDtype.BF16, StorageDtype.FP16, StorageDtype.FP8, StorageDtype.INT8]
ExpAvgSqDtype = Literal[StorageDtype.FP32, StorageDtype.BF16, StorageDtype.FP16, StorageDtype.FP8, StorageDtype.UINT8]


@dataclass(frozen=True)
class PrecisionConfig:
    """What is computed and stored in FP8. --opt-level sets all storage dtypes; other flags set them one by one."""

    precision: Precision = "fp8"
    """bf16; fp16 (with a loss scale); te (Transformer Engine's FP8 GEMMs, if installed); fp8 (this project's)."""
    opt_level: OptLevel = "O3"
    """Storage with fp8. O1: FP8 weight gradients. O2: also FP8 + FP16 moments. O3: also FP8 weights, FP16 master."""
    fp8_recipe: RecipeName = "delayed"
    """Scales of the operands of FP8 GEMMs. delayed: one per tensor, from past steps. tensorwise: one per tensor, from
    its values. blockwise: one per 1×128 elements of activations and gradients and per 128×128 of weights (Hopper).
    mxfp8: one per 32 elements, a power of two (Blackwell). nvfp4: 4 bits, emulated on a CPU."""
    fp8_fallback_recipe: Literal["tensorwise", "blockwise", "mxfp8"] | None = None
    """The recipe that layers leave --fp8-recipe delayed for in mid-run, when one of the next two flags says so."""
    fp8_fallback_iter: Count | None = None
    """Iteration from which on all layers have --fp8-fallback-recipe."""
    fp8_fallback_underflow: BelowOne | None = None
    """A layer takes --fp8-fallback-recipe when its outliers leave no range for small values: when more than this
    fraction of an input or output gradient becomes 0 in the cast, in a sample of --fp8-health-interval."""
    fp8_weight_grad_scaling: Literal["block", "delayed"] | None = None
    """Scales of FP8 weight gradients. block: one per 128 elements, from their values. delayed: one per tensor, from
    amaxes of past steps; the GEMM then writes FP8 directly. Default: delayed with --fp8-recipe delayed and
    --fp8-amax-compute-algo max, else block. Experts always have block."""
    fp8_lm_head: bool | None = None
    """Run the three GEMMs of the LM head in FP8, too. Its weight is stored in 16 bits and cast for each GEMM.
    Cross-entropy casts the gradient of the logits to FP8. Default: on with --precision fp8 and --fp8-recipe delayed,
    if all layers are in FP8 and the vocabulary size allows it."""
    fp8_dot_product_attention: bool = False
    """Run attention of FP8 layers in FP8, too, forward and backward. Meant for long sequences. Needs --fp8-recipe
    delayed, heads of 128 columns and no attention dropout. On a GPU it needs Hopper and nvidia-cudnn-frontend."""
    fp8_pipeline_communication: bool = False
    """Pipeline stages send activations and their gradients in E4M3, with one scale per 128 elements, instead of BF16.
    Needs --precision fp8."""
    fp8_context_communication: bool = False
    """Context-parallel ranks send keys, values and their gradients in E4M3, with one scale per 128 elements, instead of
    BF16. Needs --precision fp8 and --cp-comm-type all_gather."""
    first_last_layers_bf16: bool = False
    """Keep --num-layers-at-start-in-bf16 and --num-layers-at-end-in-bf16 layers out of FP8."""
    num_layers_at_start_in_bf16: LayersOrZero = 1
    """Number of first layers in BF16 with --first-last-layers-bf16."""
    num_layers_at_end_in_bf16: LayersOrZero = 1
    """Number of last layers in BF16 with --first-last-layers-bf16."""
    release_gradients: bool = False
    """Update each linear weight in backward, as soon as its gradient is computed. Gradients of linear weights are then
    not stored. Needs one data-parallel rank, one micro-batch per step and --clip-grad 0."""
    grad_accumulation: Literal["sharded", "local"] = "sharded"
    """How several replicas accumulate gradients of several micro-batches. sharded: reduce each micro-batch into the
    rank's shard. local: accumulate on each rank and reduce once per step (less traffic, more memory)."""
    grad_accumulation_dtype: Literal["fp32", "bf16"] | None = None
    """Dtype in which FP8 weight gradients are accumulated over micro-batches. fp32 takes 4 bytes per parameter, bf16
    2; a shard takes 1 / replicas of that. Default: bf16 for up to 32 micro-batches that a rank
    adds, up to 16 that replicas reduce one by one; fp32 for more."""
    keep_fp8_transpose_cache: LayersOrZero = 0
    """Number of layers per pipeline stage that keep transposed FP8 weights for all micro-batches of a step. It takes
    one byte per parameter. Other layers transpose in each backward."""
    fp8_amax_history_len: History = 16
    """Length of delayed scaling's amax history, in steps."""
    fp8_amax_compute_algo: Literal["max", "most_recent"] = "max"
    """How delayed scaling derives an amax from its history."""
    fp8_margin: Margin = 0
    """Headroom of delayed scales, in powers of two: values may grow by a factor of 2^margin between steps before they
    saturate. Casts inside a GEMM or attention kernel always have room for a factor of 4."""
    fp8_power_of_two_scales: bool = False
    """Round scales up to a power of two."""
    params_dtype: WeightDtype | None = None
    """Storage of linear weights. fp8: FP8 beside a master. fp16: scaled FP16 that is its own master."""
    main_params_dtype: MasterDtype | None = None
    """Storage of master weights. split: a one-byte correction to the FP8 weight."""
    main_grads_dtype: MainGradDtype | None = None
    """Storage of linear weight gradients with one micro-batch, and the dtype in which ranks send them."""
    exp_avg_dtype: ExpAvgDtype | None = None
    """Storage of state that averages gradients: Adam's first moment, or a momentum. int8 is companded."""
    exp_avg_sq_dtype: ExpAvgSqDtype | None = None
    """Storage of state that averages squares of gradients: Adam's second moment. uint8 is companded; use it for 8
    bits. fp8 is only for ablations."""

    @property
    def is_fp8(self) -> bool:
        """Whether layers are this project's FP8 layers."""
        return self.precision == "fp8"

    @property
    def gemm_multiple(self) -> int:
        """Sizes of FP8 GEMMs are multiples of this on every rank (`Recipe.size_multiple`)."""
        return max(_BLOCKS.get(name, FP8_GEMM_MULTIPLE) for name in self.recipes)

    @property
    def has_blocks(self) -> bool:
        """Whether elements of a matrix have scales of their own."""
        return any(name in _BLOCKS for name in self.recipes)

    @property
    def recipes(self) -> tuple[RecipeName, ...]:
        """All that layers of the run may have."""
        return (self.fp8_recipe, *([self.fp8_fallback_recipe] if self.fp8_fallback_recipe else []))

    @property
    def weight_grad_scaling(self) -> Literal["block", "delayed"]:
        """Scales of FP8 weight gradients: as asked for, or delayed where that is possible."""
        if self.fp8_weight_grad_scaling is not None:
            return self.fp8_weight_grad_scaling
        has_history = self.is_fp8 and self.fp8_recipe == "delayed" and self.fp8_amax_compute_algo == "max"
        return "delayed" if has_history and self.formats.main_grad is StorageDtype.FP8 else "block"

    @property
    def level(self) -> str:
        """The row of the level table: bf16, fp16, te, O1, O2 or O3."""
        return self.opt_level if self.is_fp8 else self.precision

    @property
    def formats(self) -> StorageFormats:
        """The level's storage with every dtype set on its own applied."""
        formats = LEVELS[self.level]
        if not self.is_fp8:
            return formats
        weight = self.params_dtype or formats.weight
        master = self.main_params_dtype or formats.master_weight
        if weight is StorageDtype.FP8 and master is None:
            master = StorageDtype.FP16
        return replace(
            formats,
            weight=weight,
            master_weight=master,
            main_grad=self.main_grads_dtype or formats.main_grad,
            average=self.exp_avg_dtype or formats.average,
            square=self.exp_avg_sq_dtype or formats.square,
        )
