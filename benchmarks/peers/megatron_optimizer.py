"""megatron-core's data parallelism and optimizers around a model, and a stand-in for a CPU."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.peers.work import Work
from fp8_megatron.config.checks import ConfigError
from fp8_megatron.training.schedule import build_scheduler


def on_gpu(work: Work, gpt: torch.nn.Module, fp8_recipe: str | None) -> Any:
    """megatron-core's data parallelism and distributed optimizer around a stage; with Muon, the layer-wise one."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    options, is_lean = work.config.optimizer, work.recipe.endswith("-lean")
    is_muon = options.optimizer == "muon"
    config: Any = gpt.config
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=not is_lean,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        use_distributed_optimizer=True,
        fp8_param_gather=is_lean,
        average_in_collective=True,
    )
    module = Float16Module(config, gpt)
    layout = {"full_param_layout": _whole_matrices(module, ddp)} if is_muon else {}
    model = DistributedDataParallel(config, ddp, module, **layout)
    storage: dict[str, Any] = {}
    if is_lean:
        storage = {
            "use_precision_aware_optimizer": True,
            "main_grads_dtype": torch.bfloat16,
            "main_params_dtype": torch.float16,
            "exp_avg_dtype": torch.uint8,
            "exp_avg_sq_dtype": torch.float16,
            "store_param_remainders": False,
        }
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="muon" if is_muon else "adam",  # which decouples weight decay by default: AdamW
            lr=options.lr,
            min_lr=options.min_lr,
            weight_decay=options.weight_decay,
            adam_beta1=options.adam_beta1,
            adam_beta2=options.adam_beta2,
            adam_eps=options.adam_eps,
            clip_grad=options.clip_grad,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=not is_muon,
            use_layer_wise_distributed_optimizer=is_muon,
            overlap_param_gather=True,
            fp8_recipe=fp8_recipe,
            **storage,
            **{one.name: getattr(options, one.name) for one in fields(options) if one.name.startswith("muon_")},
        ),
        [model],
        use_gloo_process_groups=False,
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    config.no_sync_func = model.no_sync

    def zero_grad() -> None:
        model.zero_grad_buffer()
        optimizer.zero_grad()

    return SimpleNamespace(model=model, optimizer=optimizer, zero_grad=zero_grad, scheduler=_scheduler(work, optimizer))


def _whole_matrices(module: torch.nn.Module, ddp: Any) -> Any:
    """The layout in which each matrix lies on one replica, as Megatron-LM makes it for --use-distributed-optimizer."""
    from megatron.core import parallel_state
    from megatron.core.optimizer.layer_wise_optimizer import (
        LayerWiseDistributedOptimizer,
        tag_params_for_buffer_routing,
    )

    tag_params_for_buffer_routing([module])
    size = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    return LayerWiseDistributedOptimizer.compute_full_param_layout(
        [param for param in module.parameters() if param.requires_grad],
        max(40_000_000, 1_000_000 * size),  # Megatron's own default
        size,
        ddp,
    )


def on_cpu(work: Work, gpt: torch.nn.Module) -> Any:
    """The textbook loop on a CPU, which megatron-core's optimizers do not support: FP32 masters, torch's AdamW."""
    if work.config.optimizer.optimizer == "muon":
        raise ConfigError("--optimizer muon: on a CPU this peer has torch's AdamW, to be tested; take a GPU")
    if work.world_size > 1:
        raise ConfigError(f"{work.world_size} ranks: on a CPU this peer runs one, to be tested; start one")
    options = work.config.optimizer
    params = [param for param in gpt.parameters() if param.requires_grad]
    masters = [torch.nn.Parameter(param.detach().float()) for param in params]
    adamw = torch.optim.AdamW(
        [{"params": [master], "wd_mult": float(master.ndim > 1)} for master in masters],
        lr=options.lr,
        betas=(options.adam_beta1, options.adam_beta2),
        eps=options.adam_eps,
    )

    def step() -> None:
        for param, master in zip(params, masters, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float()
        if options.clip_grad > 0.0:
            torch.nn.utils.clip_grad_norm_(masters, options.clip_grad)
        adamw.step()
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                param.copy_(master)

    return SimpleNamespace(
        model=gpt,
        optimizer=SimpleNamespace(step=step),
        zero_grad=lambda: gpt.zero_grad(set_to_none=True),
        scheduler=_scheduler(work, adamw),
    )


def _scheduler(work: Work, optimizer: Any) -> Any:
    return build_scheduler(optimizer, work.learning_rate_schedule)
