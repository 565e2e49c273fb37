"""A mixture of experts in megatron-core's layers: router, experts and a shared expert, in the place of an MLP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, z_loss_func
from megatron.core.transformer.moe.router import Router as BaseRouter
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ..activation_functions import Activation
from ..collectives.token_exchange import AllGather, AllToAll
from ..config.moe import DROPPED, LOSSES, expert_capacity, reported_means
from ..device.group import Group
from ..dtypes import E4M3
from ..nn.experts import experts, fp8_experts, grouped_by_expert, recomputed, send_tokens, with_biases
from ..nn.gemms import LinearParams
from ..nn.links import LinearLinks
from ..nn.parallelism import LOCAL, Exchanged, Local
from ..nn.token_flight import Flight, SendTokens, StartSum, exchange_choices
from ..quantization.recipe import LinearQuantizers, Recipe
from ..quantization.scaled_tensor import ScaledTensor
from .tensor_parallel import as_scaled


class Router(TopKRouter):
    """megatron-core's router, on every device, with its numbers of a step.

    Attributes:
        load: FP32 [E], tokens that the step sent to each expert on this rank, without those that are dropped.
        mean_names: of the losses that it adds, and of what it drops.
        means: FP32 [means], the sum of each over the step's micro-batches.
    """

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection) -> None:
        own = copy(config)
        own.moe_expert_capacity_factor = None  # `forward` drops: megatron-core's positions are in no order
        BaseRouter.__init__(self, config=own, pg_collection=pg_collection)  # TopKRouter's makes buffers with CUDA
        self.capacity_factor, self.drop_policy = config.moe_expert_capacity_factor, config.moe_token_drop_policy
        device, count = _device(config), config.num_moe_experts
        self.weight = torch.nn.Parameter(
            torch.empty(count, config.hidden_size, dtype=config.params_dtype, device=device)
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        if config.add_bias_linear:  # otherwise it is None
            self.bias = torch.nn.Parameter(torch.zeros(count, dtype=config.params_dtype, device=device))
            self.bias.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.topk = config.moe_router_topk
        self.routing_type = config.moe_router_load_balancing_type
        self.score_function = config.moe_router_score_function
        self.enable_expert_bias = config.moe_router_enable_expert_bias
        self.input_jitter = self.router_replay = self.local_tokens_per_expert = None
        self.register_buffer("load", torch.zeros(count, device=device), persistent=False)
        bias = torch.zeros(count, device=device) if self.enable_expert_bias else None
        self.register_buffer("expert_bias", bias)
        has_global_loss = self.get_aux_loss_coeff("global_aux_loss") > 0
        for name, shape in (("global_tokens_per_expert", (count,)), ("ga_steps", ())):
            value = torch.zeros(shape, device=device) if has_global_loss else None
            self.register_buffer(name, value, persistent=False)
        factors = {kind: self.get_aux_loss_coeff(kind) for kind in LOSSES}
        self.mean_names = reported_means(factors, config.moe_z_loss_coeff, self.capacity_factor)
        self.register_buffer("means", torch.zeros(len(self.mean_names), device=device), persistent=False)

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[s, b, H] → probabilities FP32 [s · b, E] and which experts each token goes to, bool [s · b, E]: at most
        `capacity` tokens to each expert."""
        self._maintain_float32_expert_bias()
        logits = self.gating(self.apply_input_jitter(input))
        if self.config.moe_router_force_load_balancing:
            logits = logits + (torch.randn_like(logits) - logits).detach()
        probs, chosen = self.routing(logits)
        kept = within_capacity(probs.detach(), chosen, self.capacity(len(chosen)), self.drop_policy)
        if torch.is_grad_enabled():
            self.load.add_(kept.sum(dim=0))
            if DROPPED in self.mean_names:
                self.means[self.mean_names.index(DROPPED)].add_(1 - kept.sum() / chosen.sum())
        return probs.float(), kept

    def capacity(self, num_tokens: int) -> int:
        """The most tokens that an expert takes of `num_tokens`."""
        return expert_capacity(num_tokens, self.topk, self.config.num_moe_experts, self.capacity_factor)

    def gating(self, input: Tensor) -> Tensor:
        """The logits [s, b, E], in the router's dtype."""
        dtype = torch.float32 if self.config.moe_router_dtype == "fp32" else input.dtype
        logits: Tensor = _Gating.apply(input, self.weight, dtype)
        return logits if self.bias is None else logits + self.bias.to(dtype)

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Attach the z-loss to the logits."""
        coefficient = self.config.moe_z_loss_coeff
        if not coefficient or not self.training or not torch.is_grad_enabled():
            return logits
        shared = coefficient / self.tp_cp_group.size()
        return self._attached(logits, "z_loss", z_loss_func(logits, shared), shared)

    def attach_and_log_load_balancing_loss(
        self,
        activation: Tensor,
        aux_loss_coeff: float,
        aux_loss: Tensor,
        aux_loss_name: str,
        *unused: Any,
        **others: Any,
    ) -> Tensor:
        """Attach a loss that balances the experts to the probabilities.

        A data-parallel rank has a part of the loss over the global batch, and gradients are averaged over those ranks.
        """
        is_part = aux_loss_name == LOSSES["global_aux_loss"]
        factor = self.tp_dp_cp_group.size() // self.tp_cp_group.size() if is_part else 1
        return self._attached(activation, aux_loss_name, aux_loss, aux_loss_coeff, factor=factor)

    def _attached(self, activation: Tensor, name: str, loss: Tensor, coefficient: float, *, factor: int = 1) -> Tensor:
        """`activation`, whose backward also sends back `factor` times the gradient of `loss`."""
        self.means[self.mean_names.index(name)].add_(loss.detach().float() / coefficient)
        loss = loss * factor
        if self.calculate_per_token_loss:  # the gradient is divided by the tokens later
            loss = loss * activation.shape[0]
        attached: Tensor = MoEAuxLossAutoScaler.apply(activation, loss)
        return attached

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Nothing: `forward` counts the load, behind what it drops."""

    def sinkhorn_load_balancing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """[T, E] → scores, and the map of the experts of a plan that is balanced in training."""
        scores = torch.sigmoid(logits.float()) if self.topk == 1 else torch.softmax(logits, -1, dtype=torch.float32)
        with torch.no_grad():
            chosen = (sinkhorn(logits) if self.training else scores).topk(self.topk, dim=1).indices
        routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, chosen, value=True)
        return scores * routing_map, routing_map

    def start_step(self) -> None:
        """Forget the last step's numbers."""
        self.load.zero_()
        self.means.zero_()
        self.reset_global_aux_loss_tracker()


def within_capacity(probs: Tensor, routing_map: Tensor, capacity: int, policy: str) -> Tensor:
    """`routing_map`, bool [T, E], with at most `capacity` tokens of each expert.

    Args:
        probs: [T, E], positive where the map is true.
        policy: what an expert keeps: the tokens with the largest ``probs``, or the first by ``position``.
    """
    if capacity >= len(routing_map):
        return routing_map
    if policy == "position":
        return routing_map & (routing_map.cumsum(dim=0) <= capacity)
    best = torch.where(routing_map, probs, -1.0).topk(capacity, dim=0, sorted=False).indices
    return routing_map & torch.zeros_like(routing_map).scatter_(0, best, value=True)


def sinkhorn(logits: Tensor, *, tolerance: float = 1e-4, most_rounds: int = 32) -> Tensor:
    """The transport plan [T, E] of tokens to experts in FP32 whose rows, and whose columns, have equal sums.

    Rows and columns of e^logits are scaled in turn until the columns' factors move by `tolerance` in the mean, as in
    megatron-core. There the host waits for each round; here all rounds run, and the later ones change nothing.
    """
    plan = logits.float().exp()
    num_tokens, num_experts = plan.shape
    rows, columns = plan.new_ones(num_tokens), plan.new_ones(num_experts)
    is_done = torch.zeros((), dtype=torch.bool, device=plan.device)
    for _ in range(most_rounds):
        new_rows = (1 / num_tokens) / ((columns * plan).sum(dim=1) + 1e-8)
        new_columns = (1 / num_experts) / ((new_rows.unsqueeze(1) * plan).sum(dim=0) + 1e-8)
        error = (columns - new_columns).abs().mean()
        rows, columns = torch.where(is_done, rows, new_rows), torch.where(is_done, columns, new_columns)
        is_done = is_done | (error <= tolerance)
    return columns * plan * rows.unsqueeze(1)


class _Gating(torch.autograd.Function):
    """x [..., H] · weight [E, H]ᵀ in `dtype`, of which forward keeps x and weight as they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.nn.functional.linear(x.to(dtype), weight.to(dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        rows, grads_of_rows = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        grad_x = (grads_of_rows @ weight.to(grad.dtype)).to(x.dtype).view(x.shape)
        return grad_x, (grads_of_rows.t() @ rows.to(grad.dtype)).to(weight.dtype), None


class ExpertLinear(torch.nn.Module):
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
        device, self.links = _device(config), links
        if recipe is None:
            self.weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
        else:
            payload = torch.zeros(shape, dtype=E4M3, device=device)
            self.weight = torch.nn.Parameter(ScaledTensor(payload, torch.ones(shape[0], device=device)))
            self.quantizers: LinearQuantizers = recipe.expert_quantizers()
        self.weight.is_expert = True  # type: ignore[attr-defined]
        self.weight.tensor_model_parallel = config.expert_tensor_parallel_size > 1  # type: ignore[attr-defined]
        self.weight.partition_dim, self.weight.partition_stride = axis, pieces  # type: ignore[attr-defined]
        self.register_parameter("bias", None)
        if config.add_bias_linear:  # then every expert is whole, as megatron-core asks
            self.bias = torch.nn.Parameter(torch.zeros(shape[:2], dtype=config.params_dtype, device=device))
            self.bias.is_expert = True  # type: ignore[attr-defined]

    def linear_params(self, parallelism: Local) -> LinearParams:
        """The layer, for the function that computes it."""
        return LinearParams(as_scaled(self.weight), self.bias, self.quantizers, parallelism, self.links)

    def extra_repr(self) -> str:
        """Sizes and casts."""
        return f"{tuple(self.weight.shape)}" + (f", {self.quantizers}" if hasattr(self, "quantizers") else "")


class Experts(torch.nn.Module):
    """The experts of a layer: two projections and the activation between them (`nn.experts`).

    Args:
        groups: ``tp_ep``, the ranks that share the experts of a layer, each with its own tokens; and ``ep``, those of
            them that have other experts.
        activation: of the MLPs.
        fc1, fc2: the links of the projections.
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

    def depart(self, x: Tensor) -> Flight | None:
        """Start to send [T, H], without a gradient, where every rank gets every token; None: nothing leaves before the
        router is done."""
        if self.ranks is None or not self.gathers:
            return None
        flight = Flight(AllGather(self.ranks, self.num_parts))
        if self.is_fp8:
            send_tokens(x, self.linear_fc1.linear_params(Exchanged(flight.exchange)), flight)
        else:
            flight.rows = flight.exchange.send(x.contiguous())
        return flight

    def flight(self, routing_map: Tensor) -> Flight | None:
        """How tokens go to their experts alone; what has to be known of other ranks is on its way from here on. None:
        they stay."""
        if self.ranks is None:
            return None
        return Flight(AllToAll(routing_map, self.ranks, self.num_parts, self.top_k))

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
            weight = torch.empty(1, config.hidden_size, dtype=config.params_dtype, device=_device(config))
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
        recipe: formats and scaling of the experts' operands; None: 16 bits.
        activation: of the MLPs.
        fc1, fc2: the links of the experts' projections.
        shared_expert: the submodules of the shared expert, if there is one.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        *,
        recipe: Recipe | None,
        activation: Activation,
        fc1: LinearLinks,
        fc2: LinearLinks,
        shared_expert: MLPSubmodules,
    ) -> None:
        super().__init__(config)
        self.router = Router(config, pg_collection)
        self.experts = Experts(config, pg_collection, recipe, activation, fc1, fc2)
        self.shared_experts = None
        if config.moe_shared_expert_intermediate_size is not None:
            self.shared_experts = SharedExpert(config, shared_expert, pg_collection)

    def set_layer_number(self, layer_number: int) -> None:
        """megatron-core says which layer it is, from 1."""
        self.router.set_layer_number(layer_number)

    def forward(self, hidden_states: Tensor, **unused: Any) -> tuple[Tensor, None]:
        """hidden_states [s, b, H] (behind the norm) → output [s, b, H], and no bias."""
        tokens = hidden_states.view(-1, hidden_states.shape[-1])
        flight = self.experts.depart(tokens.detach())
        probs, routing_map = self.router(hidden_states)
        flight = flight or self.experts.flight(routing_map)
        output = self.experts(tokens, probs, routing_map, self.router.capacity(len(probs)), flight)
        shared = None if self.shared_experts is None else self.shared_experts(hidden_states)
        whole = output().view_as(hidden_states)
        return whole if shared is None else whole + shared, None


@torch.no_grad()
def update_expert_biases(routers: Sequence[Router]) -> None:
    """Raise the bias of experts with fewer tokens than the mean, and lower that of the others (arXiv 2408.15664).

    All ranks that hold the routers call it after a step. One sum over ranks carries the loads of all of them.
    """
    biased = [router for router in routers if router.expert_bias is not None]
    if not biased:
        return
    totals = torch.stack([router.load for router in biased])
    torch.distributed.all_reduce(totals, group=biased[0].tp_dp_cp_group)
    for router, total in zip(biased, totals, strict=True):
        router.expert_bias += router.config.moe_router_bias_update_rate * torch.sign(total.mean() - total)


def routers_of(module: torch.nn.Module) -> list[Router]:
    """The routers of a model chunk."""
    return [child for child in module.modules() if isinstance(child, Router)]


def _recomputed_modules(config: TransformerConfig) -> set[str]:
    return set(config.recompute_modules or ()) if config.recompute_granularity == "selective" else set()


def _device(config: TransformerConfig) -> torch.device | int:
    return torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
