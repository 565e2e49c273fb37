"""Experts from the MLPs of a dense model (arXiv 2212.05055, and with granularity arXiv 2410.07524), as megatron-core's
`upcycle_state_dict` makes them.

Every expert starts as a copy of the layer's MLP. With granularity G the MLP is cut into G experts, each with 1/G of the
width: expert e is piece e % G. The experts of one copy start with equal rows of the router, so a token goes to all of
them.
Weights are scaled so that an expert's share of the sum is about the MLP's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from torch import Tensor

from ..checkpoint.files import CheckpointError, is_megatron_checkpoint
from ..checkpoint.manifest import read_manifest
from ..checkpoint.megatron_layout import Name
from ..checkpoint.megatron_loading import differing_argument, local_part, open_megatron_checkpoint, store
from ..checkpoint.ranks import Ranks
from ..checkpoint.run_state import MASTER, Progress, Resumable
from ..checkpoint.same_model import first_difference, settings_of_arguments
from ..checkpoint.saved_run import differing_setting, saved_model_settings
from ..checkpoint.torch_dist import TorchDistReader
from ..checkpoint.weights import TorchDistWeights, check_shapes
from ..config.model import ModelConfig
from ..config.moe import MoeConfig
from ..mcore.initialization import initial_values
from ..models.keys import VOCABULARY_KEYS, key_and_layer
from ..models.registry import weight_shapes
from ..sharding.partition import Slot
from ..sharding.region import Shape
from .architecture.table import EXPERTS, ROUTER

_ReadsLayer = Callable[[str, int | None], Tensor]


def dense_model(model: ModelConfig, granularity: int) -> ModelConfig:
    """The model without experts whose MLPs the experts are made of."""
    defaults = {field.name: field.default for field in fields(MoeConfig)}
    return replace(model, **defaults, ffn_hidden_size=granularity * model.expert_ffn_hidden_size)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Upcycling:
    """Takes the checkpoint of a dense model, each of whose MLPs is cut into `granularity` experts (`FirstWeights`)."""

    granularity: int

    def problem_of(self, folder: Path, model: ModelConfig) -> str | None:
        """As `FirstWeights.problem_of`."""
        granularity = self.granularity
        saved = open_megatron_checkpoint(folder) if is_megatron_checkpoint(folder) else None

        def differing(model: ModelConfig) -> str | None:
            if saved is not None:
                return differing_argument(saved, model, finetune=True)
            return differing_setting(folder, model, finetune=True)

        dense = dense_model(model, granularity)
        problem = differing(dense)
        if problem is None:
            return None
        if differing(model) is None:
            return f"moe_use_upcycling takes a model without experts, and {folder} has these experts; drop it to go on"
        settings = saved_model_settings(folder) if saved is None else settings_of_arguments(saved.arguments)
        found = first_difference(settings, dense, finetune=True)
        if found is not None and found.name == "ffn_hidden_size":
            theirs = replace(dense, ffn_hidden_size=settings[found.name])
            own, width = model.expert_ffn_hidden_size, theirs.padded_ffn_hidden_size
            return (
                f"moe_use_upcycling: {granularity} × moe_ffn_hidden_size({own}) = {granularity * own} is not "
                f"ffn_hidden_size({width}) of {folder}; give --moe-ffn-hidden-size {width // granularity}"
            )
        return f"moe_use_upcycling takes a model without experts: {problem}"

    def load(self, folder: Path, state: Resumable) -> Progress:
        """As `FirstWeights.load`. Routers stay as they were drawn."""
        model, granularity, problem = state.config.model, self.granularity, None
        try:
            problem = self.problem_of(folder, model)
            shapes, read = _weights(folder)
            check_shapes(shapes, weight_shapes(dense_model(model, granularity), state.padded_vocab_size), str(folder))
            short = next((key for key in VOCABULARY_KEYS if key in shapes and shapes[key][0] < state.vocab_size), None)
            if short is not None:
                rows = shapes[short][0]
                problem = problem or f"{folder}: {short} has {rows} rows for a vocabulary of {state.vocab_size} tokens"
        except CheckpointError as error:
            problem = problem or str(error)
        for text in Ranks(state.topology).everyones(problem):
            if text is not None:
                raise CheckpointError(text)
        state.optimizer.wait_for_copies()
        for space, slot, placement in state.slots():
            whole = _value(slot, state, read, granularity)
            store(space, slot, MASTER, local_part(whole, placement, state.vocab_size).to(state.device))
        for space in state.optimizer.states:
            space.derive_weights()
        return Progress()


def _weights(folder: Path) -> tuple[Mapping[str, Shape], _ReadsLayer]:
    """The shapes of a checkpoint's weights, and what reads one in FP32."""
    if is_megatron_checkpoint(folder):
        saved = open_megatron_checkpoint(folder)
        return saved.shapes, lambda key, layer: saved.read("weight", Name(key, layer))
    weights = TorchDistWeights(folder, TorchDistReader(folder, [file.name for file in read_manifest(folder)]))
    return weights.shapes, weights.read


def _value(slot: Slot, state: Resumable, read: _ReadsLayer, granularity: int) -> Tensor:
    """A whole parameter."""
    model, (key, layer) = state.config.model, key_and_layer(slot.name)
    if key.startswith(EXPERTS):
        dense = read(key.replace("mlp.experts.", "mlp."), layer) * _scale(model, granularity)
        is_fc1 = "linear_fc1" in key
        return _experts(dense, model, granularity, pieces=model.activation.row.num_inputs if is_fc1 else 1, rows=is_fc1)
    if key.startswith(ROUTER):
        region = slot.region
        assert region is not None and model.num_experts is not None
        ((_, drawn),) = initial_values(
            {slot.name: slot.param},
            std=model.init_method_std,
            num_layers=model.num_layers,
            hidden_std=model.hidden_init_std,
            seed=state.config.training.seed,
            region_of=lambda _: region,
        )
        return drawn[: model.num_experts // granularity].repeat_interleave(granularity, dim=0).cpu()
    return read(key, layer)


def _experts(dense: Tensor, model: ModelConfig, granularity: int, *, pieces: int, rows: bool) -> Tensor:
    """[E, N, K] of an MLP's weight: of its rows, `pieces` of which are equal, or of its columns."""
    assert model.num_experts is not None
    if rows:
        parts = dense.view(pieces, granularity, -1, dense.shape[1]).transpose(0, 1).flatten(1, 2)
    else:
        parts = dense.view(dense.shape[0], granularity, -1).transpose(0, 1)
    return parts.repeat(model.num_experts // granularity, 1, 1)


def _scale(model: ModelConfig, granularity: int) -> float:
    """The factor of both weights of an expert (arXiv 2410.07524, section 3.3). Of a gated or squared hidden state an
    expert's output grows with its cube, of others with its square."""
    assert model.num_experts is not None
    factor = float(granularity)
    if model.moe_router_pre_softmax:
        factor *= model.num_experts / model.moe_router_topk
    is_cubic = model.is_gated or model.activation.kind == "squared_relu"
    return float(factor ** (1 / 3 if is_cubic else 1 / 2))
