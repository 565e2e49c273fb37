"""The peer of every Megatron user: megatron-core's GPTModel, data parallelism and distributed optimizer, with
Transformer Engine's layers in BF16 or FP8.

    torchrun --nproc-per-node 4 -m benchmarks.peers.megatron_te --recipe te-delayed -- \\
        --config configs/gpt_7b.yaml --mock-data --micro-batch-size 4 --global-batch-size 64 --train-iters 14 \\
        --lr-warmup-iters 2 --eval-interval 0

Needs ``pip install "transformer_engine[pytorch]"``. ``--recipe bf16`` does not: without it, megatron-core's own layers
run, with unfused attention. Set ``CUDA_DEVICE_MAX_CONNECTIONS=1`` as Megatron-LM asks its users to.

Gradients are added up and reduced in FP32, weights are BF16 with an FP32 master and FP32 moments; ``te-delayed-lean``
stores FP8 weights with an FP16 master and 8- and 16-bit moments instead (Megatron's precision-aware optimizer).
``--optimizer muon`` is megatron-core's, whose matrices are spread over the replicas; it needs emerging_optimizers.
Activations are recomputed as the flags say. Initial weights are this project's, rounded to BF16.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.megatron_optimizer import on_cpu, on_gpu
from benchmarks.peers.runs import EMERGING_OPTIMIZERS
from benchmarks.peers.work import Batch, StepClock, Work, main, peak_gb, report, require
from fp8_megatron.commands.program import exit_status
from fp8_megatron.config.checks import ConfigError
from fp8_megatron.config.schema import Config
from fp8_megatron.data.document_bounds import NUM_TOKENS
from fp8_megatron.mcore.initialization import named_parameters_of_model
from fp8_megatron.mcore.runtime import runtime, seed_everything
from fp8_megatron.mcore.topology import initialized
from fp8_megatron.mcore.transformer_config import tell_yarn
from fp8_megatron.moe.megatron.parts import mixture_settings
from fp8_megatron.training.batches import masked_mean_loss

#: megatron-core's --fp8-recipe by the name of the run; None is BF16.
FP8_RECIPES = {
    "te-delayed": "delayed",
    "te-tensorwise": "tensorwise",
    "te-blockwise": "blockwise",
    "te-delayed-lean": "delayed",
    "bf16": None,
}


def check(config: Config, recipe: str) -> None:
    """Refuse configurations that this peer does not support.

    Raises:
        ConfigError: Transformer Engine is missing, or this program does not build the layout.
    """
    if FP8_RECIPES[recipe] is not None:
        require("transformer_engine", "transformer_engine[pytorch]")
    if config.parallel.context_parallel_size > 1:  # megatron-core's own attention shares no sequences
        require("transformer_engine", "transformer_engine[pytorch]")
    if config.optimizer.optimizer == "muon":
        require("emerging_optimizers", EMERGING_OPTIMIZERS)
        if recipe.endswith("-lean"):
            raise ConfigError(f"--optimizer muon has FP32 state in megatron-core: take another recipe than {recipe}")
    if config.pipeline_layout.is_interleaved or not config.pipeline_layout.is_even:
        raise ConfigError(f"this peer has even pipeline stages without virtual ones, not {config.pipeline_layout.text}")


def train(work: Work, output: Path | None) -> None:
    """Train, and report on rank 0."""
    config, device = work.config, work.device
    # Only the groups: this project's transports are not part of the peer.
    parallel = replace(config.parallel, dp_transport="nccl", tp_transport="nccl")
    with runtime(device), initialized(parallel, config.model.num_layers, device) as topology:
        tp_rank = topology.tp.rank()
        seed_everything(config.training.seed, device, tensor_parallel_rank=tp_rank, pipeline_rank=topology.pp.rank())
        gpt = _build_model(work, is_first=topology.is_first_stage, is_last=topology.is_last_stage)
        _initialize(work, gpt, tp_rank, topology.tp.size())
        trained = on_gpu(work, gpt, FP8_RECIPES[work.recipe]) if device.type == "cuda" else on_cpu(work, gpt)
        batches = work.micro_batches(topology.dp.rank(), topology.sequence_part)
        mask = None if _has_te() and device.type == "cuda" else _causal_mask(config.model.seq_length, device)
        losses: list[Tensor] = []
        clock = StepClock(device)
        for _ in range(work.train_iters):
            losses.append(_step(work, trained, batches, mask))
            clock.mark()
        seconds = clock.step_seconds()
        # Only the last stage's first tensor-parallel rank has a loss to give; the others hold zeros.
        mean = torch.stack(losses) * float(topology.reads_loss) / topology.dp.size()
        torch.distributed.all_reduce(mean)
        gpu_gb = peak_gb(device)
        if work.rank == 0:
            report(work, seconds, mean, gpu_gb=gpu_gb, output=output)


def _step(work: Work, trained: Any, batches: Iterator[Batch], mask: Tensor | None) -> Tensor:
    """One optimizer step; FP32 []: this replica's mean loss, 0 where the loss is on another stage."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    trained.zero_grad()
    results = get_forward_backward_func()(
        forward_step_func=partial(_forward, mask=mask),
        data_iterator=batches,
        model=[trained.model],
        num_microbatches=work.num_micro_batches,
        seq_length=work.config.model.seq_length,
        micro_batch_size=work.config.training.micro_batch_size,
        forward_only=False,
    )
    trained.optimizer.step()
    trained.scheduler.step(work.global_batch_size)
    if not results:
        return torch.zeros((), device=work.device)
    return torch.stack([result["loss"] for result in results]).mean()


def _forward(batches: Iterator[Batch], model: torch.nn.Module, mask: Tensor | None) -> tuple[Tensor, Any]:
    batch = next(batches)
    output = model(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"])
    return output, partial(masked_mean_loss, batch["loss_mask"], mean_tokens=batch.get(NUM_TOKENS))


def _build_model(work: Work, *, is_first: bool, is_last: bool) -> torch.nn.Module:
    """This rank's stage, in BF16."""
    _provide_wgrad_fusion()
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    model, settings = work.config.model, _transformer_config(work)
    uses_te = _has_te() and work.device.type == "cuda"
    gpt = GPTModel(
        settings,
        get_gpt_decoder_block_spec(settings, use_transformer_engine=uses_te, normalization=model.normalization),
        vocab_size=work.vocab_size,
        max_sequence_length=model.num_positions,
        pre_process=is_first,
        post_process=is_last,
        position_embedding_type=model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base,
        rope_scaling=model.use_rope_scaling,
        rope_scaling_factor=model.rope_scaling_factor,
        seq_len_interpolation_factor=model.rotary_seq_len_interpolation_factor,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
    )
    # On a CPU megatron-core leaves the position table in FP32.
    return gpt.to(work.device) if work.device.type == "cuda" else gpt.bfloat16()


def _transformer_config(work: Work) -> Any:
    from megatron.core.transformer import TransformerConfig

    model, parallel, training = work.config.model, work.config.parallel, work.config.training
    on_gpu = work.device.type == "cuda"
    fuses_activation = on_gpu and (model.swiglu or model.activation.kind == "gelu")
    activation = torch.nn.functional.silu if model.swiglu else torch.nn.functional.gelu
    if (
        model.activation.kind == "gelu" and not fuses_activation
    ):  # the fused kernel computes this approximation under GELU's name
        activation = partial(torch.nn.functional.gelu, approximate="tanh")
    settings = TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.padded_ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.query_groups,
        kv_channels=model.head_dim,
        normalization=model.normalization,
        layernorm_epsilon=model.norm_epsilon,
        gated_linear_unit=model.swiglu,
        activation_func=activation,
        add_bias_linear=not model.disable_bias_linear,
        add_qkv_bias=model.add_qkv_bias,
        qk_layernorm=model.qk_layernorm,
        rotary_interleaved=model.rotary_interleaved,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        context_parallel_size=parallel.context_parallel_size,
        cp_comm_type=parallel.cp_comm_type,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        autocast_dtype=torch.bfloat16,
        use_cpu_initialization=not on_gpu,
        gradient_accumulation_fusion=on_gpu,
        bias_activation_fusion=fuses_activation,
        bias_dropout_fusion=on_gpu,
        masked_softmax_fusion=on_gpu and _has_te(),  # else a kernel of Apex
        cross_entropy_loss_fusion=on_gpu,
        apply_rope_fusion=on_gpu and _has_te() and model.position_embedding_type == "rope",
        recompute_granularity=training.recompute_granularity,
        recompute_method=training.recompute_method,
        recompute_num_layers=training.recompute_num_layers,
        **_fp8_settings(work),
        **_expert_settings(work),
    )
    tell_yarn(settings, model)
    return settings


def _fp8_settings(work: Work) -> dict[str, Any]:
    if FP8_RECIPES[work.recipe] is None:
        return {}
    precision = work.config.precision
    return {
        "fp8": "hybrid",
        "fp8_recipe": FP8_RECIPES[work.recipe],
        "fp8_amax_history_len": precision.fp8_amax_history_len,
        "fp8_amax_compute_algo": precision.fp8_amax_compute_algo,
        "fp8_margin": precision.fp8_margin,
        "fp8_param": work.recipe.endswith("-lean"),
    }


def _expert_settings(work: Work) -> dict[str, Any]:
    """Experts with what is fastest there: grouped GEMMs, and kernels of Transformer Engine for router and permutation.
    All tokens are kept."""
    if work.config.model.num_experts is None:
        return {}
    fuses = _has_te() and work.device.type == "cuda"
    pads = FP8_RECIPES[work.recipe] is not None
    return {
        **mixture_settings(work.config),
        "moe_grouped_gemm": fuses,
        "moe_token_dispatcher_type": "alltoall",
        "moe_permute_fusion": fuses,
        # The padding changes the map in place that the fused router keeps for its backward.
        "moe_router_fusion": fuses and not pads,
        "moe_router_padding_for_quantization": pads,
    }


@torch.no_grad()
def _initialize(work: Work, gpt: torch.nn.Module, tp_rank: int, tp_size: int) -> None:
    """Give a model the initial weights that this project draws for the same names and seed."""
    params = named_parameters_of_model(gpt)
    for name, param in params.items():
        if param.ndim == 2 and "position_embeddings" not in name:
            is_row_parallel = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
            param.tensor_model_parallel = True  # type: ignore[attr-defined]
            param.partition_dim = int(is_row_parallel)  # type: ignore[attr-defined]
            is_gated = work.config.model.swiglu and name.endswith("linear_fc1.weight")
            param.partition_stride = 2 if is_gated else 1  # type: ignore[attr-defined]
    values = work.initial_values(params, tensor_parallel_rank=tp_rank, tensor_parallel_size=tp_size)
    for name, value in values:
        param = params[name]
        param.copy_(value)
        if hasattr(param, "_high_precision_init_val"):  # what the master of a weight stored in FP8 is made from
            param._high_precision_init_val = value.bfloat16().cpu()


def _provide_wgrad_fusion() -> None:
    """Replace a missing Apex kernel, with which megatron-core's LM head accumulates its weight gradient.

    It costs one more pass over the gradient of that one weight; Transformer Engine's layers have a kernel of their own.
    """
    from megatron.core.tensor_parallel import layers

    if layers._grad_accum_fusion_available:
        return

    def accumulate(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        main_grad.add_(grad_output.t() @ total_input)

    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
        wgrad_gemm_accum_fp32=accumulate, wgrad_gemm_accum_fp16=accumulate
    )
    layers._grad_accum_fusion_available = True


def _has_te() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


def _causal_mask(seq_length: int, device: torch.device) -> Tensor:
    """bool [1, 1, s, s], True where attention is masked; megatron-core's own attention needs it."""
    return torch.ones(1, 1, seq_length, seq_length, dtype=torch.bool, device=device).triu(1)


if __name__ == "__main__":
    sys.exit(exit_status(partial(main, __doc__ or "", list(FP8_RECIPES), check, train)))
