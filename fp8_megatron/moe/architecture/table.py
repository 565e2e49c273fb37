"""The parameters of a decoder with experts, and the widths of a layer.

All experts of a layer are one parameter a projection. A layer without experts has the MLP of a decoder. Checkpoints
stack a key over the layers that have it: with layers 0 and 1 dense, row 0 of an expert's weights is layer 2's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from ...config.model import ModelConfig
from ...models.architecture import LayerShape, Parameter
from ...models.decoder import table as decoder
from ...models.keys import LAYERS, MLP_NORM, name_in_model

ROUTER = LAYERS + "mlp.router."
EXPERTS = LAYERS + "mlp.experts."
EXPERTS_FC1 = EXPERTS + "linear_fc1."
EXPERTS_FC2 = EXPERTS + "linear_fc2."
SHARED_FC1 = LAYERS + "mlp.shared_experts.linear_fc1."
SHARED_FC2 = LAYERS + "mlp.shared_experts.linear_fc2."
SHARED_GATE = LAYERS + "mlp.shared_experts.gate_weight"

linear_weights = (
    *decoder.linear_weights,
    *(prefix + "weight" for prefix in (EXPERTS_FC1, EXPERTS_FC2, SHARED_FC1, SHARED_FC2)),
)
#: Tensor-parallel ranks share a shared expert as the MLP of a dense layer, and no expert.
shared_axes: Mapping[str, int] = MappingProxyType(
    {**decoder.shared_axes, SHARED_FC1 + "weight": 0, SHARED_FC1 + "bias": 0, SHARED_FC2 + "weight": 1}
)
#: An expert is shared as the MLP of a dense layer, by expert-tensor-parallel ranks.
matrix_axes: Mapping[str, int | None] = MappingProxyType(
    {
        EXPERTS + name: decoder.shared_axes.get(f"{LAYERS}mlp.{name}")
        for name in ("linear_fc1.weight", "linear_fc1.bias", "linear_fc2.weight", "linear_fc2.bias")
    }
)
matrices_name = "experts"
#: Every kind of megatron-core's experts saves them so: all of a layer in one tensor [experts, outputs, inputs].
stored_keys: Mapping[str, str] = MappingProxyType(
    {f"{EXPERTS}experts.{key.removeprefix(EXPERTS)}": key for key in matrix_axes}
)
#: What megatron-core's layer with experts has in the place of a dense one's MLP, in the order of its modules.
_MIXTURE = tuple(
    (prefix + name).removeprefix(LAYERS)
    for prefix, names in (
        (ROUTER, ("weight", "bias")),
        (EXPERTS_FC1, ("weight", "bias")),
        (EXPERTS_FC2, ("weight", "bias")),
        (SHARED_GATE, ("",)),
        (SHARED_FC1, ("weight", "bias")),
        (SHARED_FC2, ("weight", "bias")),
    )
    for name in names
)
layer_orders = tuple((*order, *_MIXTURE) for order in decoder.layer_orders)


def parameters(model: ModelConfig, padded_vocab_size: int) -> list[Parameter]:
    """As `Architecture.parameters`."""
    hidden, dense = model.hidden_size, tuple(sorted({*range(model.num_layers)} - {*model.expert_layers}))
    mlp = [
        *decoder.linear_rows(model, decoder.FC1, model.mlp_columns, hidden),
        *decoder.linear_rows(model, decoder.FC2, hidden, model.padded_ffn_hidden_size),
    ]
    rows = [replace(row, layers=dense) for row in mlp] if dense else []
    rows += [replace(row, layers=model.expert_layers) for row in _mixture(model)]
    return decoder.around_mlp(model, padded_vocab_size, rows)


def _mixture(model: ModelConfig) -> list[Parameter]:
    """The rows of a layer's router, experts and shared expert."""
    experts, hidden, shared = model.num_experts, model.hidden_size, model.moe_shared_expert_intermediate_size
    assert experts is not None
    rows = [Parameter(ROUTER + "weight", (experts, hidden))]
    has_biases = not model.disable_bias_linear
    if has_biases:
        rows.append(Parameter(ROUTER + "bias", (experts,)))
    if model.moe_router_enable_expert_bias:
        rows.append(Parameter(ROUTER + "expert_bias", (experts,), is_buffer=True))
    pieces = 2 if model.is_gated else 1
    sizes = (
        (EXPERTS_FC1, model.expert_columns, hidden, pieces),
        (EXPERTS_FC2, hidden, model.expert_ffn_hidden_size, 1),
    )
    for key, num_outputs, num_inputs, pieces_of_key in sizes:
        weight = Parameter(
            key + "weight",
            (experts, num_outputs, num_inputs),
            pieces=pieces_of_key,
            is_linear=True,
            matrices=experts,
            matrices_of_token=model.moe_router_topk,
        )
        bias = replace(weight, key=key + "bias", shape=(experts, num_outputs), is_linear=False)
        rows += [weight, bias] if has_biases else [weight]
    if shared is not None:
        rows += decoder.linear_rows(model, SHARED_FC1, pieces * shared, hidden, shared_axes)
        rows += decoder.linear_rows(model, SHARED_FC2, hidden, shared, shared_axes)
        if model.moe_shared_expert_gate:
            rows.append(Parameter(SHARED_GATE, (1, hidden)))
    return rows


def stored_names(model: ModelConfig, key: str, layer: int) -> tuple[str, ...]:
    """As `Architecture.stored_names`. The norm in front of experts has two names: of specs with Transformer Engine,
    where no other layer holds it, and of those without."""
    own = next((name for name, known in stored_keys.items() if known == key), key)
    if layer in model.expert_layers and key.startswith(MLP_NORM):
        return own, name_in_model(key, None)
    return (own,)


def layer_shape(model: ModelConfig) -> LayerShape:
    """As `Architecture.layer_shape`, of a layer with experts."""
    shared = model.moe_shared_expert_intermediate_size or 0
    mlp = model.moe_router_topk * model.expert_ffn_hidden_size + shared
    return replace(decoder.layer_shape(model), mlp=mlp, mlp_input=(2 if model.is_gated else 1) * mlp)
