"""The peer from PyTorch alone: a plain GPT or Llama under FSDP2 and torch.compile, with torchao's float8 linear layers.

    torchrun --nproc-per-node 4 -m benchmarks.peers.torchao_fsdp2 --recipe torchao-tensorwise -- \\
        --config configs/gpt_7b.yaml --mock-data --micro-batch-size 4 --global-batch-size 64 --train-iters 14 \\
        --lr-warmup-iters 2 --eval-interval 0

Needs ``pip install torchao``; ``--recipe torch-bf16`` does not. Weights, moments and gradients are FP32 shards,
layers compute in BF16 with weights that are gathered in BF16, or in FP8 with ``torchao-tensorwise``. Gathered weights
stay until backward has used them. Each micro-batch is reduced in FP32. On a GPU the layers and the loss are compiled,
and cuDNN's attention comes first. The LM head is BF16. Initial weights are this project's, bit for bit.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.peers.work import Batch, StepClock, Work, main, peak_gb, report, require
from fp8_megatron.commands.program import exit_status
from fp8_megatron.config.checks import ConfigError
from fp8_megatron.config.schema import Config, ModelConfig
from fp8_megatron.mcore.transformer_config import rotary_table
from fp8_megatron.training.schedule import build_scheduler

#: torchao's recipe by the name of the run; None is BF16.
FLOAT8_RECIPES = {"torchao-tensorwise": "tensorwise", "torchao-rowwise": "rowwise", "torch-bf16": None}
#: The fastest on Hopper first.
_ATTENTION = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Attention(nn.Module):
    """Causal self-attention. Rows of QKV are in Megatron's order: for each key/value head its query heads, its key, its
    value.
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.groups, self.head_dim = model.query_groups, model.head_dim
        self.queries_per_group = model.num_attention_heads // model.query_groups
        width = model.num_attention_heads * model.head_dim
        has_bias = not model.disable_bias_linear
        qkv_width = width + 2 * model.query_groups * model.head_dim
        self.linear_qkv = nn.Linear(model.hidden_size, qkv_width, bias=has_bias or model.add_qkv_bias)
        self.linear_proj = nn.Linear(width, model.hidden_size, bias=has_bias)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        """x [b, s, hidden] → [b, s, hidden]."""
        batch, seq, _ = x.shape
        qkv = self.linear_qkv(x).view(batch, seq, self.groups, self.queries_per_group + 2, self.head_dim)
        query, key, value = qkv.split([self.queries_per_group, 1, 1], dim=3)
        query, key, value = (part.flatten(2, 3).transpose(1, 2) for part in (query, key, value))  # [b, heads, s, d]
        if rotation is not None:
            query, key = rotate(query, *rotation), rotate(key, *rotation)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.queries_per_group > 1)
        return self.linear_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """GELU, or SwiGLU with the gate's rows first."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        width, has_bias = model.padded_ffn_hidden_size, not model.disable_bias_linear
        self.is_gated = model.swiglu
        self.gelu = "tanh" if model.activation.kind == "gelu" else "none"
        self.linear_fc1 = nn.Linear(model.hidden_size, width * (2 if model.swiglu else 1), bias=has_bias)
        self.linear_fc2 = nn.Linear(width, model.hidden_size, bias=has_bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [b, s, hidden] → [b, s, hidden]."""
        hidden = self.linear_fc1(x)
        if not self.is_gated:
            return self.linear_fc2(F.gelu(hidden, approximate=self.gelu))
        gate, up = hidden.chunk(2, dim=-1)
        return self.linear_fc2(F.silu(gate) * up)


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm, self.pre_mlp_layernorm = _norm(model), _norm(model)
        self.self_attention, self.mlp = Attention(model), MLP(model)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        """x [b, s, hidden] → [b, s, hidden]."""
        x = x + self.self_attention(self.input_layernorm(x), rotation)
        return x + self.mlp(self.pre_mlp_layernorm(x))


class Embedding(nn.Module):
    """Words, and learned positions where the model has them."""

    def __init__(self, model: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, model.hidden_size)
        if model.position_embedding_type == "learned_absolute":
            self.position_embeddings = nn.Embedding(model.num_positions, model.hidden_size)

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        """int64 [b, s] → [b, s, hidden]."""
        embedded = self.word_embeddings(tokens)
        if hasattr(self, "position_embeddings"):
            embedded = embedded + self.position_embeddings(position_ids)
        return embedded


class Decoder(nn.Module):
    """All layers and the final norm."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(model) for _ in range(model.num_layers))
        self.final_layernorm = _norm(model)


class GPT(nn.Module):
    """GPT-3's or Llama's style, as the configuration says. Parameters have megatron-core's names and shapes."""

    def __init__(self, model: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.model = model
        self.embedding = Embedding(model, vocab_size)
        self.decoder = Decoder(model)
        self.head_loss = head_loss
        if model.untie_embeddings_and_output_weights:
            self.output_layer = nn.Linear(model.hidden_size, vocab_size, bias=False)

    def forward(self, batch: Batch) -> Tensor:
        """FP32 []: mean loss over unmasked tokens, nats."""
        x = self.embedding(batch["tokens"], batch["position_ids"])
        rotation = rotation_of(self.model, x.device) if self.model.uses_rope else None
        for layer in self.decoder.layers:
            x = layer(x, rotation)
        x = self.decoder.final_layernorm(x)
        owner = self.output_layer if self.model.untie_embeddings_and_output_weights else self.embedding.word_embeddings
        return self.head_loss(x, owner.weight, batch["labels"], batch["loss_mask"])


def head_loss(x: Tensor, weight: Tensor, labels: Tensor, loss_mask: Tensor) -> Tensor:
    """LM head and cross-entropy: x [b, s, hidden], weight [vocab, hidden], labels [b, s] → FP32 []."""
    logits = F.linear(x, weight.to(x.dtype)).float().flatten(0, 1)
    per_token = F.cross_entropy(logits, labels.flatten(), reduction="none")
    mask = loss_mask.flatten()
    return (per_token * mask).sum() / mask.sum().clamp(min=1.0)


@lru_cache(maxsize=1)
def rotation_of(model: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of RoPE (arXiv 2104.09864) with the model's scaling, FP32 [s, rotated part of a head], halves
    alike."""
    table = rotary_table(model, device)
    assert table is not None, model
    cosines, sines = table(model.seq_length).repeat(1, 1, 2).unbind(1)
    return cosines, sines


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """RoPE on the first part of each head, x [b, heads, s, d]."""
    turned, kept = x.split([cosines.shape[-1], x.shape[-1] - cosines.shape[-1]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    across = torch.cat([-second, first], dim=-1)
    return torch.cat([(turned * cosines + across * sines).to(x.dtype), kept], dim=-1)


def check(config: Config, recipe: str) -> None:
    """Refuse configurations that this peer does not support.

    Raises:
        ConfigError: torchao is missing, or the layout is not plain data parallelism, or the optimizer not AdamW.
    """
    if config.optimizer.optimizer == "muon":
        raise ConfigError("--optimizer muon: this peer trains with AdamW")
    if FLOAT8_RECIPES[recipe] is not None:
        require("torchao", "torchao")
    parallel = config.parallel
    if parallel.ranks_per_sample != 1:
        raise ConfigError(
            f"this peer is data-parallel alone: tensor × context × pipeline parallel "
            f"{parallel.tensor_model_parallel_size} × {parallel.context_parallel_size} × "
            f"{parallel.pipeline_model_parallel_size}"
        )
    if config.training.recompute_granularity is not None:
        raise ConfigError("this peer recomputes nothing; leave --recompute-granularity out")
    if config.model.rotary_interleaved:
        raise ConfigError("this peer rotates halves of heads; leave --rotary-interleaved out")


def train(work: Work, output: Path | None) -> None:
    """Train, and report on rank 0."""
    config, device = work.config, work.device
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    try:
        model = _sharded_model(work)
        options = config.optimizer
        matrices = {"params": [param for param in model.parameters() if param.ndim > 1]}
        vectors = {"params": [param for param in model.parameters() if param.ndim == 1], "wd_mult": 0.0}
        groups: list[dict[str, Any]] = [matrices, vectors]
        optimizer = torch.optim.AdamW(
            groups,
            lr=options.lr,
            betas=(options.adam_beta1, options.adam_beta2),
            eps=options.adam_eps,
            fused=True,
        )
        scheduler = build_scheduler(optimizer, work.learning_rate_schedule)
        batches = work.micro_batches(work.rank)
        losses: list[Tensor] = []
        clock = StepClock(device)
        with sdpa_kernel(_ATTENTION, set_priority=True):
            for _ in range(work.train_iters):
                losses.append(_step(work, model, optimizer, batches))
                scheduler.step(work.global_batch_size)
                clock.mark()
        seconds = clock.step_seconds()
        mean = torch.stack(losses) / work.world_size
        torch.distributed.all_reduce(mean)
        gpu_gb = peak_gb(device)
        if work.rank == 0:
            report(work, seconds, mean, gpu_gb=gpu_gb, output=output)
    finally:
        torch.distributed.destroy_process_group()


def _step(work: Work, model: GPT, optimizer: torch.optim.Optimizer, batches: Iterator[Batch]) -> Tensor:
    """One optimizer step; FP32 []: this rank's mean loss."""
    total = torch.zeros((), device=work.device)
    for _ in range(work.num_micro_batches):
        loss = model(next(batches)) / work.num_micro_batches
        loss.backward()
        total += loss.detach()
    if work.config.optimizer.clip_grad > 0.0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), work.config.optimizer.clip_grad)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if FLOAT8_RECIPES[work.recipe] == "tensorwise":
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(model)  # one reduction of all weights' amaxes, not one for each
    return total


def _sharded_model(work: Work) -> GPT:
    """The model with FP32 weights sharded over all ranks, its layers in the recipe's precision, compiled on a GPU."""
    on_gpu = work.device.type == "cuda"
    with torch.device("meta"):
        model = GPT(work.config.model, work.vocab_size)
    if (recipe := FLOAT8_RECIPES[work.recipe]) is not None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        float8 = Float8LinearConfig.from_recipe_name(recipe)
        # FP8 on the wire: torchao has it for one scale per tensor. On a CPU torchao has no FP8 GEMM.
        float8 = replace(float8, enable_fsdp_float8_all_gather=recipe == "tensorwise", emulate=not on_gpu)
        convert_to_float8_training(model, module_filter_fn=lambda _, name: name.startswith("decoder."), config=float8)
    if on_gpu:
        for layer in model.decoder.layers:
            layer.compile()
        model.head_loss = torch.compile(head_loss)
    mesh = init_device_mesh(work.device.type, (work.world_size,))
    # Inputs stay as they are: the cosines of RoPE and the loss mask are FP32.
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in model.decoder.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    model.to_empty(device=work.device)
    _initialize(model, work)
    return model


@torch.no_grad()
def _initialize(model: GPT, work: Work) -> None:
    """Give the shards the initial weights that this project draws for the same names and seed."""
    params = dict(model.named_parameters())
    for name, value in work.initial_values(params):
        param = params[name]
        assert isinstance(param, DTensor)
        param.copy_(distribute_tensor(value, param.device_mesh, param.placements))


def _norm(model: ModelConfig) -> nn.Module:
    norm = nn.RMSNorm if model.normalization == "RMSNorm" else nn.LayerNorm
    return norm(model.hidden_size, eps=model.norm_epsilon)


if __name__ == "__main__":
    sys.exit(exit_status(partial(main, __doc__ or "", list(FLOAT8_RECIPES), check, train)))
