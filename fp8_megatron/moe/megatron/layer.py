"""A mixture of experts in the place of megatron-core's MLP: experts and a shared expert behind a router."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ...activation_functions import Activation
from ...collectives.turns import Turns
from ...device.group import Group
from ...dtypes import E4M3
from ...mcore.tensor_parallel import FallsBack, as_scaled, column_spec, row_spec
from ...nn.gemms import LinearParams
from ...nn.links import LayerLinks, LinearLinks
from ...nn.parallelism import LOCAL, Local
from ...quantization.recipe import Recipe
from ...quantization.scaled_tensor import ScaledTensor
from ..layers.exchanged import Exchanged
from ..layers.experts import experts, fp8_experts, grouped_by_expert, recomputed, send_tokens, with_biases
from ..layers.token_exchange import AllGather, AllToAll
from ..layers.token_flight import Flight, SendTokens, StartSum, exchange_choices
from .router import Router, device_of


def mixture_spec(recipe: Recipe | None, links: LayerLinks, *, activation: Activation) -> ModuleSpec:
    """A mixture of experts in the place of a layer's MLP, a `parts.MLPPart`. A shared expert has links of its own."""
    own = [LinearLinks(keeps_transpose=links.fc1.kept_transpose is not None) for _ in range(2)]
    shared = MLPSubmodules(linear_fc1=column_spec(recipe, own[0]), linear_fc2=row_spec(recipe, own[1]))
    params = {"recipe": recipe, "activation": activation, "fc1": links.fc1, "fc2": links.fc2}
    return ModuleSpec(module=MixtureOfExperts, params={**params, "shared_expert": shared})


class ExpertLinear(FallsBack, torch.nn.Module):
    """The weights [E, N, K] of one projection of all experts on this rank, and its biases [E, N] if linear layers have
    them; `Experts` computes with them.

    Args:
        shape: [E, N, K].
        axis: that ranks share which have parts of the same experts.
        pieces: equal pieces of the axis, each of which is shared.
        recipe: formats and scaling of the operands; None: 16 bits.
    """

    bias: torch.nn.Parameter | None

    def __init__(
        self,
        config: TransformerConfig,
        shape: tuple[int, int, int],
        axis: int,
        pieces: int,
        recipe: Recipe | None,
        links: LinearLinks,
    ) -> None:
        super().__init__()
        device, self.links = device_of(config), links
        if recipe is None:
            self.weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
        else:
            payload = torch.zeros(shape, dtype=E4M3, device=device)
            self.weight = torch.nn.Parameter(ScaledTensor(payload, torch.ones(shape[0], device=device)))
            self.quantizers = recipe.grouped_quantizers()
        self.weight.counts_matrices = True  # type: ignore[attr-defined]
        self.weight.tensor_model_parallel = config.expert_tensor_parallel_size > 1  # type: ignore[attr-defined]
        self.weight.partition_dim, self.weight.partition_stride = axis, pieces  # type: ignore[attr-defined]
        self.register_parameter("bias", None)
        if config.add_bias_linear:  # then every expert is whole, as megatron-core asks
            self.bias = torch.nn.Parameter(torch.zeros(shape[:2], dtype=config.params_dtype, device=device))
            self.bias.counts_matrices = True  # type: ignore[attr-defined]

    def linear_params(self, parallelism: Local) -> LinearParams:
        """The layer, for the function that computes it."""
        return LinearParams(as_scaled(self.weight), self.bias, self.quantizers, parallelism, self.links)

    def extra_repr(self) -> str:
        """Sizes and casts."""
        return f"{tuple(self.weight.shape)}" + (f", {self.quantizers}" if hasattr(self, "quantizers") else "")


class Experts(torch.nn.Module):
    """The experts of a layer: two projections and the activation between them (`moe.layers.experts`).

    Args:
        groups: ``tp_ep``, the ranks that share the experts of a layer, each with its own tokens; and ``ep``, those of
            them that have other experts.
        activation: of the MLPs.
        fc1, fc2: the links of the projections.

    Attributes:
        gathers: every rank gets every token, not those of its experts alone.
        turns: with those of other micro-batches; the layers of a model chunk share them.
    """

    def __init__(
        self,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        recipe: Recipe | None,
        activation: Activation,
        fc1: LinearLinks,
        fc2: LinearLinks,
    ) -> None:
        super().__init__()
        ranks, self.num_parts, hidden = groups.tp_ep, groups.ep.size(), config.hidden_size
        self.ranks: Group | None = ranks if ranks.size() > 1 else None
        self.turns = Turns()
        self.gathers = config.moe_token_dispatcher_type == "allgather"
        self.activation, self.top_k = activation, config.moe_router_topk
        count, width = config.num_moe_experts // self.num_parts, config.moe_ffn_hidden_size // groups.expt_tp.size()
        pieces = 2 if config.gated_linear_unit else 1
        self.linear_fc1 = ExpertLinear(config, (count, pieces * width, hidden), 1, pieces, recipe, fc1)
        self.linear_fc2 = ExpertLinear(config, (count, hidden, width), 2, 1, recipe, fc2)
        if recipe is not None and config.hidden_dropout == 0.0:
            fc2.early_cast.expect(self.linear_fc2.quantizers.grad_output, transposed=False)
        #: Modules whose parameters the forward reads without calling them.
        self.reads_weights_of = (self.linear_fc1, self.linear_fc2)
        self.is_fp8, modules = recipe is not None, _recomputed_modules(config)
        self.recomputes, self.recomputes_activation = "moe" in modules, "moe_act" in modules

    def depart(self, x: Tensor, routing_map: Tensor | None = None) -> Flight | None:
        """Start to send [T, H], without a gradient: to all ranks, or by a routing map, bool [T, E], to those of a
        token's experts. None: no other rank has any."""
        if self.ranks is None:
            return None
        if routing_map is None:
            flight = Flight(AllGather(self.ranks, self.num_parts, self.turns))
        else:
            flight = Flight(AllToAll(routing_map, self.ranks, self.num_parts, self.top_k, self.turns))
        if self.is_fp8:
            send_tokens(x, self.linear_fc1.linear_params(Exchanged(flight.exchange)), flight)
        else:
            flight.rows = flight.exchange.send(x.contiguous())
        return flight

    def forward(
        self, x: Tensor, probs: Tensor, routing_map: Tensor, capacity: int, flight: Flight | None
    ) -> Callable[[], Tensor]:
        """[T, H]; probabilities FP32 [T, E], routing map bool [T, E] with at most `capacity` tokens of each expert.

        Returns:
            What gives the output [T, H], which is on its way until then.
        """
        output = self._without_last_bias(x, probs, routing_map, capacity, flight)
        bias, ranks = self.linear_fc2.bias, self.ranks

        def arrived() -> Tensor:
            whole = output if flight is None else flight.arrived(output)
            if bias is None:
                return whole
            # A rank adds the biases of its own tokens' experts: fewer bytes than their outputs.
            of_all = bias if ranks is None else gather_from_sequence_parallel_region(bias.float(), group=ranks)
            return with_biases(whole, torch.where(routing_map, probs, 0.0), of_all)

        return arrived

    def _without_last_bias(
        self, x: Tensor, probs: Tensor, routing_map: Tensor, capacity: int, flight: Flight | None
    ) -> Tensor:
        fc1, fc2, num_routed = self.linear_fc1, self.linear_fc2, None
        if flight is not None:
            exchange = flight.exchange
            probs, routing_map = exchange_choices(probs, routing_map, exchange)
            capacity, num_routed = capacity * exchange.group.size(), exchange.num_routed
        groups = grouped_by_expert(routing_map, self.top_k, capacity, num_routed)
        if self.is_fp8:
            parallelism = LOCAL if flight is None else Exchanged(flight.exchange)
            params = (fc1.linear_params(parallelism), fc2.linear_params(parallelism))
            again = self.recomputes
            return fp8_experts(x, probs, groups, *params, self.activation, recomputes=again, flight=flight)

        def in_16_bits(x: Tensor, probs: Tensor) -> Tensor:
            if flight is not None:
                x = SendTokens.apply(x, flight)
            weights, again = (fc1.weight, fc2.weight), self.recomputes_activation and not self.recomputes
            return experts(x, probs, groups, *weights, self.activation, bias1=fc1.bias, recomputes_activation=again)

        output = recomputed(in_16_bits, x, probs) if self.recomputes else in_16_bits(x, probs)
        return output if flight is None else StartSum.apply(output, x.shape, flight)


class SharedExpert(MLP):
    """An MLP that sees every token, beside the experts, with a gate if the configuration says so."""

    def __init__(
        self, config: TransformerConfig, submodules: MLPSubmodules, pg_collection: ProcessGroupCollection
    ) -> None:
        own = copy(config)
        own.ffn_hidden_size = config.moe_shared_expert_intermediate_size
        super().__init__(own, submodules, ffn_hidden_size=own.ffn_hidden_size, tp_group=pg_collection.tp)
        if config.moe_shared_expert_gate:
            weight = torch.empty(1, config.hidden_size, dtype=config.params_dtype, device=device_of(config))
            self.gate_weight = torch.nn.Parameter(weight)
            self.gate_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.recomputes = bool({"moe", "shared_experts"} & _recomputed_modules(config))

    def forward(self, hidden_states: Tensor, *unused: Any, **others: Any) -> Tensor:
        """[s, b, H] → [s, b, H]."""
        return recomputed(self._forward, hidden_states) if self.recomputes else self._forward(hidden_states)

    def _forward(self, hidden_states: Tensor) -> Tensor:
        output: Tensor = super().forward(hidden_states)[0]
        if self.config.moe_shared_expert_gate:
            output = output * torch.sigmoid(torch.nn.functional.linear(hidden_states, self.gate_weight))
        return output


class MixtureOfExperts(MegatronModule):
    """Router, experts and shared expert, in the place of an MLP.

    Args:
        layer_number: from 1.
        recipe: formats and scaling of the experts' operands; None: 16 bits.
        activation: of the MLPs.
        fc1, fc2: the links of the experts' projections.
        shared_expert: the submodules of the shared expert, if there is one.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        layer_number: int,
        *,
        recipe: Recipe | None,
        activation: Activation,
        fc1: LinearLinks,
        fc2: LinearLinks,
        shared_expert: MLPSubmodules,
    ) -> None:
        super().__init__(config)
        self.router = Router(config, pg_collection)
        self.router.set_layer_number(layer_number)
        self.experts = Experts(config, pg_collection, recipe, activation, fc1, fc2)
        self.shared_experts = None
        if config.moe_shared_expert_intermediate_size is not None:
            self.shared_experts = SharedExpert(config, shared_expert, pg_collection)

    def forward(self, hidden_states: Tensor, **unused: Any) -> tuple[Tensor, None]:
        """hidden_states [s, b, H] (behind the norm) → output [s, b, H], and no bias."""
        tokens = hidden_states.view(-1, hidden_states.shape[-1])
        # Where every rank gets every token, they leave before the router is done.
        flight = self.experts.depart(tokens.detach()) if self.experts.gathers else None
        probs, routing_map = self.router(hidden_states)
        if not self.experts.gathers:
            flight = self.experts.depart(tokens.detach(), routing_map)
        output = self.experts(tokens, probs, routing_map, self.router.capacity(len(probs)), flight)
        shared = None if self.shared_experts is None else self.shared_experts(hidden_states)
        whole = output().view_as(hidden_states)
        return whole if shared is None else whole + shared, None


def _recomputed_modules(config: TransformerConfig) -> set[str]:
    return set(config.recompute_modules or ()) if config.recompute_granularity == "selective" else set()
