"""What the rest of the package asks of a kind of model; `registry` finds the kind from the configuration."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..activation_functions import Activation
from ..config.model import ModelConfig
from ..config.schema import Config

if TYPE_CHECKING:
    from .hugging_face import HuggingFace  # imports torch


class Stages(Enum):
    """Which pipeline stages hold a parameter."""

    FIRST = "first"
    LAYERS = "layers"
    LAST = "last"


@dataclass(frozen=True)
class Parameter:
    """One row of an architecture's table: a parameter outside the layers, or one that layers have.

    Attributes:
        key: its key in checkpoints, which stack the layers that have it along a first axis, in their order
            (``decoder.layers.mlp.linear_fc2.weight``).
        shape: of the whole tensor, in one layer: [M, N, K], or [M, N] beside it, if the parameter holds `matrices`.
        stages: that hold it. The last stage has a copy of an embedding that is also the head (`is_tied`).
        axis: the axis that tensor-parallel ranks share. None: each of them holds the whole.
        pieces: equal parts of the axis, each of which is shared (2: gate and up of a gated MLP).
        is_linear: a layer's linear weight, which is in FP8 if the layer is.
        layers: that have it, counted over the whole model; None: all.
        matrices: that axis 0 counts, which ranks may share. All parameters of a model that hold several hold as many.
            None: it does not.
        matrices_of_token: of these, how many a token is multiplied with.
        is_buffer: the model computes it itself: it has neither gradient nor optimizer state.
    """

    key: str
    shape: tuple[int, ...]
    stages: Stages = Stages.LAYERS
    axis: int | None = None
    pieces: int = 1
    is_linear: bool = False
    is_tied: bool = False
    layers: tuple[int, ...] | None = None
    matrices: int | None = None
    matrices_of_token: int = 1
    is_buffer: bool = False

    @property
    def numel(self) -> int:
        """Elements of the whole tensor, in one layer."""
        return prod(self.shape)

    @property
    def numel_of_token(self) -> int:
        """Elements that a token is multiplied with, in one layer."""
        return self.numel // (self.matrices or 1) * self.matrices_of_token

    def layers_of(self, layers: Sequence[int]) -> list[int]:
        """Those of the layers `layers` that have it."""
        if self.stages is not Stages.LAYERS:
            return []
        return [layer for layer in layers if self.layers is None or layer in self.layers]

    def whole_shape(self, num_layers: int) -> tuple[int, ...]:
        """The shape in a checkpoint of a model of so many layers."""
        return (len(self.layers_of(range(num_layers))), *self.shape) if self.stages is Stages.LAYERS else self.shape

    def numel_of_rank(self, tensor_parallel_size: int, matrix_holders: int = 1) -> int:
        """Elements that one rank holds, in one layer.

        Args:
            matrix_holders: ranks that share a parameter with `matrices`.
        """
        if self.matrices is not None:
            return self.numel // matrix_holders
        return self.numel // (1 if self.axis is None else tensor_parallel_size)

    def copies(self, layers: Sequence[int], *, is_first: bool, is_last: bool) -> int:
        """How many a stage holds.

        Args:
            layers: of the stage.
            is_first, is_last: whether the stage is the first, the last. One stage is both.
        """
        if self.stages is Stages.LAYERS:
            return len(self.layers_of(layers))
        if self.stages is Stages.FIRST:
            return int(is_first or (is_last and self.is_tied))
        return int(is_last)


@dataclass(frozen=True)
class LayerShape:
    """What the kernels between the GEMMs of a layer work on: columns of a token, of all tensor-parallel ranks.

    Attributes:
        stream: of the residual stream.
        head: of one attention head.
        queries, keys: of all query heads, of all key heads; values have as many as keys.
        mlp: of the MLP's hidden state, with all that a token takes part in.
        mlp_input: of the input to the MLP's activation: `mlp`, or twice as many if it is gated.
        activation: of the MLP.
        has_windows: attention leaves tokens out.
    """

    stream: int
    head: int
    queries: int
    keys: int
    mlp: int
    mlp_input: int
    activation: Activation
    has_windows: bool

    @property
    def is_gated(self) -> bool:
        """Whether the MLP multiplies its activation with a second projection of the input."""
        return self.mlp_input > self.mlp


class LayoutSize(NamedTuple):
    """A size that layouts of the ranks vary beside the tensor- and pipeline-parallel ones.

    Attributes:
        setting: its name in the section ``parallel``.
        heading: of its column in a table of layouts.
        shared: how many parts of a layer are shared. A size divides them, and the ranks with tokens of their own.
    """

    setting: str
    heading: str
    shared: int


class ForwardBeside(NamedTuple):
    """A forward that runs beside the backward of another micro-batch, in turns.

    Attributes:
        layer_bytes: the most that one of its layers holds.
        ahead: by which share of a micro-batch's activations it is ahead of the backward when it ends.
    """

    layer_bytes: int
    ahead: float


class Architecture(Protocol):
    """A kind of model: a package of `models` that has these names."""

    def describes(self, model: ModelConfig) -> bool:
        """Whether the settings are those of a model of this kind."""

    def parameters(self, model: ModelConfig, padded_vocab_size: int) -> list[Parameter]:
        """The table of parameters, in the order of the forward pass."""

    def layer_shape(self, model: ModelConfig) -> LayerShape:
        """The widths of a layer."""

    def attention_flops(self, model: ModelConfig, *, causal: bool) -> float:
        """FLOPs of core attention in the forward of one token, of all layers.

        It is two GEMMs of ``2 · seq · heads · head_dim`` per token and layer with ``causal=False``, the convention of
        all TFLOP/s that Megatron and FP8-LM (arXiv 2310.18313) publish. ``causal=True`` gives half of that: it counts
        only the positions that a token sees, also of a window. With --reset-attention-mask both are upper bounds: how
        many positions a token sees depends on the text.
        """

    def kept_bytes(self, config: Config, layer: int) -> float:
        """Bytes that a layer keeps of each token of the micro-batch for its backward, on one rank.

        Args:
            layer: counted over the whole model.
        """

    def recomputed_bytes(self, config: Config, layer: int) -> float:
        """Bytes that exist of each token while a layer's parts of --recompute-modules are computed again, on one rank.

        Attention's scores and MLPs in chunks are not among them.
        """

    def forward_bytes(self, config: Config, layer: int) -> int:
        """The most that a layer's forward holds of a micro-batch if nothing is kept for backward, on one rank."""

    def backward_bytes(self, config: Config, layer: int) -> int:
        """The most that a layer's backward makes of a micro-batch beside what forward kept, on one rank."""

    def table_bytes(self, config: Config) -> int:
        """Bytes of tables that all layers of a rank read."""

    def forward_beside(self, config: Config) -> ForwardBeside | None:
        """The forward of a micro-batch that runs beside the backward of the one before; None: none does."""

    @property
    def cuts_mlps(self) -> bool:
        """Whether --mlp-chunks-for-training cuts its MLPs."""

    def mlp_modules(self, model: ModelConfig) -> Sequence[str]:
        """The words of --recompute-modules that name all of its MLPs.

        Raises:
            ValueError: the settings do not say which layers have which.
        """

    def layout_sizes(self, model: ModelConfig) -> Sequence[LayoutSize]:
        """The sizes that layouts of its ranks vary."""

    def assumptions(self, config: Config) -> Sequence[str]:
        """What a predicted peak takes for granted, a line each."""

    def why_no_rates(self, model: ModelConfig) -> str | None:
        """Why no rates of its layers' kernels are known; None if they are."""

    @property
    def other_matrices(self) -> str | None:
        """What the matrices of its layers are that are no linear weights; None: there are none."""

    @property
    def sizes(self) -> Sequence[str]:
        """Settings that are compared first, because others mean something beside them alone."""

    @property
    def arguments_without_setting(self) -> Mapping[str, tuple[object, ...]]:
        """Megatron's arguments that change what a model computes and that no setting here stands for, each with the
        values under which it changes nothing. A setting that comes to stand for one replaces its row by a name in
        `computed_settings`."""

    @property
    def computed_settings(self) -> Sequence[str]:
        """Settings of the model that change what weights of the same shapes compute."""

    def changed_setting(self, saved: Mapping[str, Any], model: ModelConfig, *, finetune: bool = False) -> str | None:
        """The first of `computed_settings` under which saved weights compute something else in this model.

        Args:
            saved: settings; one that is not in it counts as equal.
            finetune: allow another base and scaling of RoPE, YaRN too, for a longer context.
        """

    def single_layer(self, model: ModelConfig, layer: int) -> ModelConfig:
        """A model whose one layer computes what a layer of this one does, without what is set for training alone."""

    def problems(self, config: Config) -> Iterable[str]:
        """One line for each problem of the model's settings: what cannot work, the values, the fix."""

    def hugging_face(self) -> HuggingFace:
        """Its names in Hugging Face's transformers."""

    @property
    def layer_orders(self) -> Sequence[Sequence[str]]:
        """The orders in which Megatron's optimizer may lay out a layer's parameters, by the ends of their keys. Those
        that hold several matrices follow each other: their own order is `checkpoint.megatron_layout.MatrixOrder`."""

    @property
    def linear_weights(self) -> Collection[str]:
        """Keys of linear weights in layers."""

    @property
    def shared_axes(self) -> Mapping[str, int]:
        """The axis that tensor-parallel ranks share, by key, of every parameter that they share in any model."""

    @property
    def matrix_axes(self) -> Mapping[str, int | None]:
        """Keys of parameters that hold several matrices a layer in any model (`Parameter.matrices`), each with the axis
        of one of them that ranks may share; None: they do not."""

    @property
    def matrices_name(self) -> str | None:
        """What users call the matrices of a parameter that holds several; None: none does."""

    @property
    def stored_keys(self) -> Mapping[str, str]:
        """Keys, layers stacked, by the names under which megatron-core's own layers save them, if those are others."""

    def stored_names(self, model: ModelConfig, key: str, layer: int) -> Sequence[str]:
        """The names, layers stacked, under which megatron-core's own layers save a weight; its key where it is one."""
