"""The router of a mixture of experts: megatron-core's, with a choice of experts in one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, z_loss_func
from megatron.core.transformer.moe.router import Router as BaseRouter
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ...config.moe import DROPPED, LOSSES, expert_capacity, reported_means
from ...kernels import ops
from ...nn.first_order import once_differentiable


def device_of(config: TransformerConfig) -> torch.device | int:
    """The device of a layer's new parameters."""
    return torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()


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
        device, count = device_of(config), config.num_moe_experts
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
        groups = (config.moe_router_num_groups or 0, config.moe_router_group_topk or 0)
        self.choice = ops.Choice(
            top_k=self.topk,
            is_sigmoid=self.score_function == "sigmoid",
            over_all=bool(config.moe_router_pre_softmax),
            num_groups=groups[0] if groups[1] else 0,
            group_top_k=groups[1],
            factor=config.moe_router_topk_scaling_factor or 1.0,
        )
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
        # megatron-core keeps the first run's tensor and copies to it; a later run may have another device.
        MoEAuxLossAutoScaler.main_loss_backward_scale = None

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

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[s, b, E] → probabilities [s · b, E], with the losses that balance experts attached, and the experts' map."""
        length, batch = logits.shape[:2]
        logits = self.apply_z_loss(logits.view(-1, logits.shape[-1]))
        if self.routing_type == "sinkhorn":
            return self.sinkhorn_load_balancing(logits)
        probs, chosen = _Choose.apply(logits, self.expert_bias, self.choice)
        if self.training and torch.is_grad_enabled() and self.is_aux_loss_enabled():
            scores, best = self._scores(logits, chosen)
            probs = self._apply_aux_loss(probs, scores, best)
            probs = self._apply_seq_aux_loss(probs, scores, best, length, batch)
            probs = self._apply_global_aux_loss(probs, scores, best)
        return probs, chosen

    def _scores(self, logits: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """For losses that balance experts: scores [T, E] over all of them, and the experts with the largest."""
        if self.choice.is_sigmoid:
            scores = torch.sigmoid(logits.float())
            scores = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
        else:
            scores = torch.softmax(logits, dim=-1, dtype=torch.float32)
        if self.expert_bias is None and not self.choice.num_groups:
            return scores, chosen
        plain = self.choice._replace(num_groups=0, group_top_k=0)
        return scores, ops.choose_experts(logits.detach(), None, plain)[1]

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

    def sinkhorn_load_balancing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """[T, E] → scores, and the map of the experts of a plan that is balanced in training."""
        scores = torch.sigmoid(logits.float()) if self.topk == 1 else torch.softmax(logits, -1, dtype=torch.float32)
        with torch.no_grad():
            chosen = (sinkhorn(logits) if self.training else scores).topk(self.topk, dim=1).indices
        routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, chosen, value=True)
        return scores * routing_map, routing_map

    def numbers(self) -> tuple[Tensor, Tensor]:
        """`load` and `means`."""
        return self.load, self.means

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


class _Choose(torch.autograd.Function):
    """`ops.choose_experts` and its gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, bias: Tensor | None, how: ops.Choice) -> tuple[Tensor, Tensor]:
        probs, chosen = ops.choose_experts(logits, bias, how)
        ctx.save_for_backward(logits, chosen)
        ctx.how = how
        ctx.mark_non_differentiable(chosen)
        return probs, chosen

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *unused: Any) -> tuple[Tensor, None, None]:
        logits, chosen = ctx.saved_tensors
        return ops.choose_experts_backward(logits, chosen, grad.float(), ctx.how).to(logits.dtype), None, None


class _Gating(torch.autograd.Function):
    """x [..., H] · weight [E, H]ᵀ in `dtype`, of which forward keeps x and weight as they are.

    A product of two BF16 values is exact in FP32, so that a GPU multiplies x and weight in 16 bits and adds in FP32; a
    gradient in FP32 is the sum of three BF16 values, `_in_three`. Its FP32 GEMMs take ten times as long.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        rows = x.reshape(-1, x.shape[-1])
        if _is_exact_in_16_bits(x, weight, dtype):
            logits = torch.mm(rows, weight.t(), out_dtype=torch.float32)
        else:
            logits = rows.to(dtype) @ weight.to(dtype).t()
        return logits.view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        rows, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        if _is_exact_in_16_bits(x, weight, grad.dtype):
            parts = _in_three(grad)
            grad_x = parts @ weight.repeat(3, 1)
            grad_weight = torch.mm(parts.t(), rows, out_dtype=torch.float32).view(3, *weight.shape).sum(dim=0)
        else:
            grad_x = (grad @ weight.to(grad.dtype)).to(x.dtype)
            grad_weight = grad.t() @ rows.to(grad.dtype)
        return grad_x.view(x.shape), grad_weight.to(weight.dtype), None


def _is_exact_in_16_bits(x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether a GPU multiplies BF16 values for a result in FP32; torch does that on no other device."""
    return x.is_cuda and x.dtype == weight.dtype == torch.bfloat16 and dtype == torch.float32


def _in_three(x: Tensor) -> Tensor:
    """FP32 [T, E] → BF16 [T, 3 · E], whose three parts add up to x within 2⁻²⁴."""
    parts = x.new_empty(len(x), 3, x.shape[1], dtype=torch.bfloat16)
    for part in parts.unbind(dim=1):
        part.copy_(x)
        x = x - part
    return parts.view(len(x), -1)


@torch.no_grad()
def update_expert_biases(parts: Sequence[object]) -> None:
    """Raise the bias of experts with fewer tokens than the mean, and lower that of the others (arXiv 2408.15664).

    All ranks that hold routers call it after a step, with their parts of layers. One sum over ranks carries all
    loads.
    """
    biased = [part for part in parts if isinstance(part, Router) and part.expert_bias is not None]
    if not biased:
        return
    totals = torch.stack([router.load for router in biased])
    torch.distributed.all_reduce(totals, group=biased[0].tp_dp_cp_group)
    for router, total in zip(biased, totals, strict=True):
        router.expert_bias += router.config.moe_router_bias_update_rate * torch.sign(total.mean() - total)
