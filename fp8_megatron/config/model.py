"""The section ``model`` of the configuration: the shape of the GPT (`schema` says how fields become flags)."""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass, fields
from typing import Literal

from ..activation_functions import GELUS, KINDS, Activation
from .fields import AtLeastOne, BelowOne, Count, Layers, NotNegative, Positive, Size, UpToOne
from .moe import MoeConfig
from .mup import MupConfig
from .words import number, whole_number

#: Layers that a pattern may describe: `fields.Layers`' limit.
_MOST_LAYERS = 100_000
#: Settings that `layer_pattern` reads: texts, where Megatron has numbers and lists.
LAYER_PATTERNS = ("window_attn_skip_freq", "moe_layer_freq")
#: Kinds of position embedding that rotate query and key.
ROTARY_KINDS = ("rope", "yarn")
#: What RoPE reads unless it is scaled by YaRN.
SETTINGS_WITHOUT_YARN = (
    "rotary_percent",
    "rotary_interleaved",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
)
#: What YaRN alone reads.
YARN_SETTINGS = (
    "rotary_scaling_factor",
    "yarn_original_max_position_embeddings",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_correction_range_round_to_int",
    "mscale",
    "mscale_all_dim",
)


def window_sizes(text: str) -> tuple[int, int]:
    """``128,0`` or ``(128,0)``: tokens to the left and to the right of a token, which it attends to beside itself.

    Raises:
        ValueError: it is not two whole numbers.
    """
    words = text.strip().removeprefix("(").removesuffix(")").split(",")
    if len(words) != 2:
        raise ValueError(text)
    return whole_number(words[0].strip()), whole_number(words[1].strip())


def layer_pattern(text: str) -> int | list[int]:
    """``4``, or a Python expression of lists such as ``[1]*3+[0]``: which layers have something.

    A list has a 1 for each layer that has it and a 0 for each other. What a number means `has_window` and
    `layers_with_experts` say.

    Raises:
        ValueError: it is neither.
    """
    try:
        return whole_number(text.strip())
    except ValueError:
        pass
    try:
        pattern = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(text) from error
    if not isinstance(pattern, list) or not all(value in (0, 1) for value in pattern):
        raise ValueError(text)
    return pattern


def has_window(pattern: int | list[int] | None, layer: int) -> bool:
    """Whether a layer has a window; 0 is the first layer. `pattern` None: all do. N: every N-th layer has none."""
    if pattern is None:
        return True
    return bool(pattern[layer]) if isinstance(pattern, list) else (layer + 1) % pattern != 0


def _value(node: ast.expr) -> int | list[int]:
    """Lists of numbers, sums of lists, products of a list and a number."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        items = [_value(item) for item in node.elts]
        if all(isinstance(item, int) for item in items):
            return [item for item in items if isinstance(item, int)]
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, int) and isinstance(right, list):
            left, right = right, left
        if not isinstance(node.op, ast.Mult) or not isinstance(left, list) or not isinstance(right, int):
            raise ValueError(ast.dump(node))
        if len(left) * right <= _MOST_LAYERS:
            return left * right
    raise ValueError(ast.dump(node))


def layers_with_experts(text: str, num_layers: int) -> tuple[int, ...]:
    """The layers that --moe-layer-freq names: the first of every N, or those with a 1 in a list (`layer_pattern`).

    Raises:
        ValueError: it is neither.
    """
    pattern = layer_pattern(text)
    if isinstance(pattern, int):
        if pattern < 1:
            raise ValueError(text)
        return tuple(range(0, num_layers, pattern))
    if len(pattern) != num_layers:
        raise ValueError(text)
    return tuple(layer for layer, has_experts in enumerate(pattern) if has_experts)


@dataclass(frozen=True)
class DecoderConfig:
    """The GPT without experts."""

    num_layers: Layers = 24
    """Transformer layers."""
    hidden_size: Size = 1024
    """Width of the residual stream."""
    ffn_hidden_size: Size | None = None
    """Width of the MLP. Default: 4 × hidden-size; with --swiglu 8/3 × hidden-size rounded down to a
    multiple of 64, as in Megatron."""
    num_attention_heads: Size = 16
    """Attention (query) heads."""
    kv_channels: Size | None = None
    """Width of one head. Default: hidden-size / num-attention-heads."""
    group_query_attention: bool = False
    """Grouped-query attention: all query heads share --num-query-groups key/value heads."""
    num_query_groups: Size = 1
    """Key/value heads with --group-query-attention."""
    seq_length: Size = 1024
    """Tokens in a training sequence."""
    max_position_embeddings: Size | None = None
    """Rows of the learned position table. Default: seq-length."""
    position_embedding_type: Literal["learned_absolute", "rope", "yarn", "none"] = "learned_absolute"
    """Kind of position embedding. yarn: RoPE scaled by YaRN (arXiv 2309.00071). none: only the causal mask
    tells positions apart."""
    rotary_base: Count = 10000
    """Base period of RoPE."""
    rotary_percent: UpToOne = 1.0
    """Fraction of each head that RoPE rotates."""
    rotary_interleaved: bool = False
    """On: RoPE rotates pairs of neighbouring columns. Off: it pairs the first half of a head with the second half."""
    rotary_seq_len_interpolation_factor: Size = 1
    """Divides the positions of RoPE (linear scaling, arXiv 2306.15595)."""
    use_rope_scaling: bool = False
    """Scale RoPE's frequencies as in Llama 3.1, from an original context of 8192."""
    rope_scaling_factor: AtLeastOne = 8.0
    """For --use-rope-scaling: how many times longer the context becomes (Llama 3.1: 8; Llama 3.2: 32)."""
    rotary_scaling_factor: AtLeastOne = 1.0
    """For YaRN: how many times longer the context becomes."""
    yarn_original_max_position_embeddings: Size = 4096
    """For YaRN: context length that the model was trained with."""
    yarn_beta_fast: Positive = 32.0
    """For YaRN: pairs of columns that rotate more often than this within the original context are not scaled."""
    yarn_beta_slow: Positive = 1.0
    """For YaRN: pairs that rotate less often than this are scaled by the whole factor. Pairs between both limits are
    interpolated."""
    yarn_correction_range_round_to_int: bool = True
    """For YaRN: round the first and the last interpolated pair to whole numbers."""
    mscale: NotNegative = 1.0
    """For YaRN: with factor s, query and key are multiplied by (0.1 · mscale · ln s + 1) / (0.1 · mscale-all-dim ·
    ln s + 1)."""
    mscale_all_dim: NotNegative = 0.0
    """For YaRN: see --mscale."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Kind of norm."""
    norm_epsilon: Positive = 1e-5
    """Added to the variance inside the norm."""
    swiglu: bool = False
    """Gated MLP with SiLU (SwiGLU) instead of GELU."""
    squared_relu: bool = False
    """The MLP's activation is max(z, 0)² instead of GELU."""
    quick_geglu: bool = False
    """Gated MLP with the sigmoid form of GELU instead of GELU."""
    activation_func_clamp_value: Positive | None = None
    """The most of gate and of the magnitude of up: with --swiglu, against outliers of its output, or as in gpt-oss with
    --quick-geglu and --glu-linear-offset 1."""
    glu_linear_offset: NotNegative = 0.0
    """For gpt-oss's MLP: what is added to up."""
    bias_gelu_fusion: bool = True
    """On: GELU is its tanh form, as in Megatron's kernel that also adds a bias. Off, or with --disable-bias-linear: the
    exact form, with erf."""
    use_te_activation_func: bool = False
    """On: GELU is its tanh form, as in Transformer Engine, with and without biases."""
    disable_bias_linear: bool = False
    """Leave out the biases of every linear layer."""
    add_qkv_bias: bool = False
    """Keep the bias of the QKV projection with --disable-bias-linear."""
    qk_layernorm: bool = False
    """Normalise every head of query and key before RoPE, with the model's kind of norm (Qwen3)."""
    untie_embeddings_and_output_weights: bool = False
    """Give the LM head its own weight instead of the word embedding's."""
    attention_dropout: BelowOne = 0.1
    """Dropout on attention probabilities."""
    hidden_dropout: BelowOne = 0.1
    """Dropout on the embedding and on each residual branch."""
    init_method_std: Positive = 0.02
    """Standard deviation of the initial weights (normal); for output projections, divided by sqrt(2 · num-layers)."""
    vocab_size: Size | None = None
    """Size of the vocabulary before padding. Default: the tokenizer's."""
    make_vocab_size_divisible_by: Size = 128
    """The vocabulary is padded to a multiple of this × tensor-model-parallel-size."""
    window_size: str | None = None
    """LEFT,RIGHT: sliding-window attention. A token attends to itself and LEFT tokens before it; RIGHT is 0."""
    window_attn_skip_freq: str | None = None
    """Layers without the window. N: every N-th layer. A list such as [1]*3+[0]: layers with a 0. Default: none."""
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = "vanilla"
    """Attention sinks: a logit of each head in the softmax's denominator that no token has. learnable: a parameter, as
    in gpt-oss. off-by-one: 0. vanilla: none."""
    attention_backend: Literal["auto", "cudnn", "flash", "math"] = "auto"
    """Kernel of core attention. auto: cuDNN if the GPU and the shape allow it (the fastest on Hopper), else flash.
    Windows and --reset-attention-mask run in flash."""

    @property
    def given_activations(self) -> list[str]:
        """Those of `ACTIVATIONS` that are set. A model has one at most."""
        return [name for name in ACTIVATIONS if getattr(self, name)]

    @property
    def activation(self) -> Activation:
        """The MLP's activation."""
        given, limit = self.given_activations, self.activation_func_clamp_value
        if limit is not None and (given, self.glu_linear_offset) in ((["quick_geglu"], 1.0), (["swiglu"], 0.0)):
            own = {"alpha": 1.0, "offset": 0.0} if self.swiglu else {}
            return Activation("clamped_swiglu").with_parameters({"limit": limit, **own})
        if given:
            return Activation(given[0])
        is_fused = self.bias_gelu_fusion and not self.disable_bias_linear
        return Activation("gelu" if is_fused or self.use_te_activation_func else "gelu_erf")

    @property
    def has_gelu(self) -> bool:
        """Whether the MLP's activation is GELU, in one of its forms."""
        return self.activation.kind in GELUS

    @property
    def uses_rope(self) -> bool:
        """Whether query and key are rotated."""
        return self.position_embedding_type in ROTARY_KINDS

    @property
    def is_gated(self) -> bool:
        """Whether the MLP multiplies its activation with a second projection of the input."""
        return self.activation.row.is_gated

    @property
    def windows(self) -> list[int | None]:
        """For each layer, how many earlier tokens a token attends to; None: all."""
        if self.window_size is None:
            return [None] * self.num_layers
        pattern = None if self.window_attn_skip_freq is None else layer_pattern(self.window_attn_skip_freq)
        left = window_sizes(self.window_size)[0]
        return [left if has_window(pattern, layer) else None for layer in range(self.num_layers)]

    @property
    def padded_ffn_hidden_size(self) -> int:
        """The MLP's width with the default filled in."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.swiglu:
            return max(8 * self.hidden_size // 3 // 64 * 64, 64)
        return 4 * self.hidden_size

    @property
    def head_dim(self) -> int:
        """Width of one head with the default filled in."""
        return self.kv_channels if self.kv_channels is not None else self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Number of key/value heads: all heads unless they are grouped."""
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads

    @property
    def rope_magnitude(self) -> float:
        """What multiplies cosines and sines under YaRN of factor s: (0.1 · mscale · ln s + 1) /
        (0.1 · mscale_all_dim · ln s + 1).

        With the defaults it is the paper's √(1/t) (section 3.4). Attention's logits grow by its square.
        """
        if self.position_embedding_type != "yarn":
            return 1.0
        log = 0.1 * math.log(self.rotary_scaling_factor)
        return (self.mscale * log + 1.0) / (self.mscale_all_dim * log + 1.0)

    @property
    def num_positions(self) -> int:
        """Positions that a sequence may have, which a learned table has rows for."""
        return self.max_position_embeddings or self.seq_length

    @property
    def query_width(self) -> int:
        """Columns of all query heads."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Columns of all key heads; those of value heads are as many."""
        return self.query_groups * self.head_dim

    @property
    def mlp_columns(self) -> int:
        """Columns of the MLP's first linear layer: gate and up, or the hidden state."""
        return self.activation.row.num_inputs * self.padded_ffn_hidden_size


@dataclass(frozen=True)
class ModelConfig(MupConfig, MoeConfig, DecoderConfig):
    """The GPT: GPT-3 style by default (learned positions, LayerNorm, GELU, biases, tied head), Llama style by flags,
    and its experts, if it has any."""

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Layers with experts."""
        return () if self.num_experts is None else layers_with_experts(self.moe_layer_freq, self.num_layers)

    @property
    def has_dense_mlps(self) -> bool:
        """Whether some layer has an MLP without experts; also of layers that checks refuse."""
        try:
            return len(self.expert_layers) < self.num_layers
        except ValueError:
            return True

    @property
    def expert_ffn_hidden_size(self) -> int:
        """Width of an expert, with the default filled in."""
        return self.padded_ffn_hidden_size if self.moe_ffn_hidden_size is None else self.moe_ffn_hidden_size

    @property
    def expert_columns(self) -> int:
        """Columns of an expert's first linear layer: gate and up, or the hidden state."""
        return self.activation.row.num_inputs * self.expert_ffn_hidden_size

    @property
    def balancing_losses(self) -> dict[str, float]:
        """The factors of the losses that balance experts, by name."""
        if self.moe_router_load_balancing_type in ((), ("none",)):
            return {}
        factors = zip(self.moe_router_load_balancing_type, self.moe_aux_loss_coeff, strict=True)
        return {name: number(factor) for name, factor in factors}

    @property
    def width_mult(self) -> float:
        """muP's m: the width over that of the base; 1 without muP."""
        return self.hidden_size / (self.mup_base_hidden_size or self.hidden_size) if self.use_mup else 1.0

    @property
    def hidden_init_std(self) -> float:
        """Standard deviation with which matrices of layers start; embeddings and output layer have init_method_std."""
        return self.init_method_std / math.sqrt(self.width_mult)

    @property
    def softmax_scale(self) -> float:
        """What attention's scores are multiplied by: 1 / √d for heads of width d, or what muP has in its place."""
        if not self.use_mup:
            return 1.0 / math.sqrt(self.head_dim)
        base = 1.0 if self.mup_base_head_dim is None else math.sqrt(self.mup_base_head_dim)
        return base / float(self.head_dim) ** self.mup_attn_scale_power

    @property
    def embedding_mult(self) -> float:
        """What the embedding is multiplied by."""
        return self.mup_embedding_mult if self.use_mup else 1.0

    @property
    def output_mult(self) -> float:
        """What the logits are multiplied by."""
        given = self.mup_output_mult if self.use_mup else 1.0
        return 1.0 / self.width_mult if given == 1.0 else given


#: Switches that choose the MLP's activation. Without one it is GELU.
ACTIVATIONS = tuple(each.name for each in fields(ModelConfig) if each.name in KINDS)
