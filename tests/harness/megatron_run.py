"""A run of megatron-core's own GPTModel and optimizers on a CPU, saved in Megatron-LM's formats.

A program of its own: megatron-core's writer starts processes, which a test's rank may not.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import json
import os
import random
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import save_file

from fp8_megatron.assembly import parts_of
from fp8_megatron.config.precision import PrecisionConfig
from fp8_megatron.config.schema import Config, OptimizerConfig, ParallelConfig
from fp8_megatron.mcore.runtime import runtime, seed_everything
from fp8_megatron.mcore.topology import initialized
from fp8_megatron.mcore.transformer_config import transformer_config
from tests.harness.tiny_gpt import GPT3_STYLE, LLAMA_STYLE, VOCAB_SIZE, random_batches, tiny_config

EXPERTS = replace(
    LLAMA_STYLE,
    num_experts=4,
    moe_ffn_hidden_size=64,
    moe_shared_expert_intermediate_size=64,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_bias_update_rate=0.0,
    moe_router_dtype="fp32",
)
STYLES = {
    "gpt3": GPT3_STYLE,
    "llama": LLAMA_STYLE,
    "experts": EXPERTS,
    "some_experts": replace(EXPERTS, moe_layer_freq="[0,1]", moe_shared_expert_intermediate_size=None),
    "experts-of-2-ranks": replace(EXPERTS, moe_layer_freq="[0,1]"),
    "gpt3-muon": GPT3_STYLE,
    "llama-muon": LLAMA_STYLE,
}
#: Iterations before the checkpoint and after it; micro-batches of a step.
BEFORE, AFTER, MICRO_BATCHES = 3, 2, 2
OPTIMIZER = OptimizerConfig(optimizer="adamw", lr=1e-3, weight_decay=0.1, adam_beta2=0.95, clip_grad=1.0)
#: That of torch, which stands for emerging_optimizers': it has the same state, and is in no registry of packages.
MUON = replace(
    OPTIMIZER,
    optimizer="muon",
    muon_momentum=0.95,
    muon_nesterov=True,
    muon_coefficient_type="simple",
    muon_scale_mode="shape_scaling",
    muon_split_qkv=False,
)


def config_of(style: str) -> Config:
    """The configuration of ours that goes on with the run."""
    optimizer = MUON if style.endswith("-muon") else OPTIMIZER
    parallel = ParallelConfig(expert_model_parallel_size=num_ranks_of(style))
    return tiny_config(
        STYLES[style], parallel=parallel, precision=PrecisionConfig(precision="bf16"), optimizer=optimizer
    )


def num_ranks_of(style: str) -> int:
    """Ranks of the run, which share the experts."""
    return 2 if style.endswith("-ranks") else 1


def arguments_of(config: Config) -> argparse.Namespace:
    """Megatron's arguments of the run, as far as a reader needs them, and some that need Megatron's code to be read."""
    model = dataclasses.asdict(config.model)
    del model["attention_backend"], model["vocab_size"]
    if config.model.num_experts is not None:
        model["moe_layer_freq"] = [int(layer in config.model.expert_layers) for layer in range(config.model.num_layers)]
    model["add_bias_linear"] = not model.pop("disable_bias_linear")
    return argparse.Namespace(
        **model,
        padded_vocab_size=VOCAB_SIZE,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        expert_model_parallel_size=config.parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=1,
        consumed_train_samples=BEFORE * MICRO_BATCHES * 2,
        consumed_valid_samples=40,
        bf16=True,
        fp16=False,
        params_dtype=torch.bfloat16,
        attention_backend=AttnBackend.auto,
    )


def megatron_run(style: str, temporary: pytest.TempPathFactory) -> Path:
    """A folder of its own with what this program saved. It runs once for all workers of a test run."""
    own = temporary.getbasetemp()
    common = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    saved = common / f"megatron-{style}"
    with (common / f"megatron-{style}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not saved.exists():
            _run(style, common / f"megatron-{style}-unfinished").rename(saved)
    return shutil.copytree(saved, temporary.mktemp("megatron") / style)


def _run(style: str, folder: Path) -> Path:
    root = Path(__file__).parents[2]
    off = {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}  # megatron-core compiles parts of its router
    environment = {**os.environ, **off, "PYTHONPATH": str(root)}
    # Not by its name: megatron-core's processes would import it again.
    words = [sys.executable, "-W", "ignore", "-c", f"from {__name__} import main; main({style!r}, {str(folder)!r})"]
    if num_ranks_of(style) > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks_of(style)}"]
        words = [sys.executable, "-W", "ignore", *launcher, "--no-python", *words]
    subprocess.run(words, check=True, cwd=root, env=environment, capture_output=True, timeout=280)
    return folder


def main(style: str, folder: str) -> None:
    """Train, save each format under `folder`, and train on."""
    config, device, root = config_of(style), torch.device("cpu"), Path(folder)
    _let_a_cpu_pass()
    with runtime(device), initialized(config.parallel, config.model.num_layers, device):
        settings = transformer_config(config, device, parts_of(config).settings)
        settings.bf16, settings.params_dtype = True, torch.bfloat16
        seed_everything(0, device, tensor_parallel_rank=0, pipeline_rank=0)
        module = GPTModel(
            settings,
            spec_of(config, settings),
            vocab_size=VOCAB_SIZE,
            max_sequence_length=config.model.seq_length,
            share_embeddings_and_output_weights=not config.model.untie_embeddings_and_output_weights,
            position_embedding_type=config.model.position_embedding_type,
        ).bfloat16()
        generator = torch.Generator().manual_seed(0)
        of_rank = torch.Generator().manual_seed(torch.distributed.get_rank() + 1)
        for name, param in module.named_parameters():
            is_expert = ".local_experts." in name
            noise = 0.02 * torch.randn(param.shape, generator=of_rank if is_expert else generator)
            param.data = (noise + ("norm" in name and name.endswith("weight"))).bfloat16()
        for name, buffer in module.named_buffers():
            if name.endswith("expert_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
        # Small buckets of an overlapped reduction cut the optimizer's buffers into several.
        has_muon = config.optimizer is MUON
        sharded = DistributedDataParallelConfig(
            use_distributed_optimizer=not has_muon,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=True,
            bucket_size=40_000,
        )
        model = DistributedDataParallel(settings, sharded, module)
        options = MegatronOptimizerConfig(
            optimizer="adam",
            lr=OPTIMIZER.lr,
            weight_decay=OPTIMIZER.weight_decay,
            adam_beta1=OPTIMIZER.adam_beta1,
            adam_beta2=OPTIMIZER.adam_beta2,
            adam_eps=OPTIMIZER.adam_eps,
            clip_grad=OPTIMIZER.clip_grad,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=not has_muon,
        )
        if has_muon:
            optimizer = _chained(model, options)
        else:
            optimizer = get_megatron_optimizer(options, [model], use_gloo_process_groups=False)
        for step in range(BEFORE):
            _train_step(model, optimizer, config, step)
        _save(root, module, optimizer, config)
        losses = [_train_step(model, optimizer, config, step) for step in range(BEFORE, BEFORE + AFTER)]
        if torch.distributed.get_world_size() == 1:
            (root / "losses.json").write_text(json.dumps(losses))


def _chained(model: DistributedDataParallel, options: MegatronOptimizerConfig) -> ChainedOptimizer:
    """Muon for what Megatron gives to it, Adam for the rest."""
    embeddings = {"module.embedding.word_embeddings.weight", "module.output_layer.weight"}
    params = {name: param for name, param in model.named_parameters()}
    matrices = [param for name, param in params.items() if param.ndim == 2 and name not in embeddings]
    decayed = [params[name] for name in embeddings & params.keys()]
    vectors = [param for param in params.values() if param.ndim == 1]
    lr, decay = OPTIMIZER.lr, OPTIMIZER.weight_decay
    muon = torch.optim.Muon(matrices, lr=lr, weight_decay=decay, momentum=MUON.muon_momentum)
    groups = [{"params": decayed, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=lr, betas=(OPTIMIZER.adam_beta1, OPTIMIZER.adam_beta2), eps=OPTIMIZER.adam_eps)
    wrapped = [Float16OptimizerWithFloat16Params(one, options, None, lambda *_: None) for one in (muon, adam)]
    for one in wrapped:
        one.grad_stats_parallel_group = torch.distributed.group.WORLD
    return ChainedOptimizer(wrapped)


def _save_chained(root: Path, module: GPTModel, optimizer: ChainedOptimizer, common: dict[str, object]) -> None:
    names = {param: name for name, param in module.named_parameters()}
    states = {}
    for one in optimizer.chained_optimizers:
        for params, masters in zip(one.float16_groups, one.fp32_from_float16_groups, strict=True):
            for param, master in zip(params, masters, strict=True):
                found = {"weight": param, "master": master, **one.optimizer.state[master]}
                states |= {f"{kind}/{names[param]}": value.detach().clone() for kind, value in found.items()}
    root.mkdir(parents=True, exist_ok=True)
    save_file({key: value for key, value in states.items() if not key.startswith("step/")}, root / "states.safetensors")
    model_state = module.sharded_state_dict()
    state = optimizer.sharded_state_dict(model_state, metadata={"chained_optim_avoid_prefix": True})
    dist_checkpointing.save({**common, "model": model_state, "optimizer": state}, str(_new(root / "fully_reshardable")))
    (_new(root / "torch") / "mp_rank_00").mkdir()
    content = {**common, "model": module.state_dict_for_save_checkpoint(), "optimizer": optimizer.state_dict()}
    torch.save(content, root / "torch" / f"iter_{BEFORE:07d}" / "mp_rank_00" / "model_optim_rng.pt")


def spec_of(config: Config, settings: TransformerConfig) -> ModuleSpec:
    """Experts are a `SequentialMLP`, whose checkpoints are those of all kinds."""
    if config.model.num_experts is None:
        return get_gpt_layer_local_spec(normalization=config.model.normalization)
    settings.moe_grouped_gemm, settings.moe_token_dispatcher_type = False, "allgather"
    if set(settings.moe_layer_freq) == {1}:
        settings.moe_layer_freq = 1
    return get_gpt_decoder_block_spec(settings, use_transformer_engine=False, normalization=config.model.normalization)


def _let_a_cpu_pass() -> None:
    """megatron-core's optimizer and writer name CUDA where nothing depends on it."""
    kind = torch.Tensor.type

    def type_as_on_cuda(self: torch.Tensor, *args: object, **settings: object) -> object:
        found = kind(self, *args, **settings)
        return found if args or settings else "torch.cuda." + str(found).rpartition(".")[2]

    moe_utils.te_general_gemm = None  # imported with Transformer Engine alone
    torch.Tensor.type = type_as_on_cuda
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = torch.cuda.current_stream = lambda *_: None


def _train_step(model: DistributedDataParallel, optimizer: object, config: Config, step: int) -> float:
    model.zero_grad_buffer()
    optimizer.zero_grad()
    total = 0.0
    length = config.model.seq_length
    mask = torch.ones(1, 1, length, length).triu(1).bool()
    num_ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    for tokens in random_batches(1, MICRO_BATCHES, seed=step * num_ranks + rank)[0]:
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        positions = torch.arange(length).expand_as(inputs)
        loss = model(inputs, positions, mask, labels=labels).float().mean()
        (loss / MICRO_BATCHES).backward()
        total += loss.item() / MICRO_BATCHES
    model.finish_grad_sync()
    succeeded, _, _ = optimizer.step()
    assert succeeded
    return total


def _save(root: Path, module: GPTModel, optimizer: object, config: Config) -> None:
    common = {
        "args": arguments_of(config),
        "checkpoint_version": 3.0,
        "iteration": BEFORE,
        "opt_param_scheduler": {"num_steps": BEFORE * MICRO_BATCHES * 2},
    }
    if config.optimizer is MUON:
        _save_chained(root, module, optimizer, common)
        return
    for kind in ("dp_reshardable", "fully_reshardable"):
        model_state = module.sharded_state_dict()
        optimizer_state = optimizer.sharded_state_dict(
            model_state, is_loading=False, metadata={"distrib_optim_sharding_type": kind}
        )
        folder = _new(root / kind)
        dist_checkpointing.save({**common, "model": model_state, "optimizer": optimizer_state}, str(folder))
    if torch.distributed.get_world_size() == 1:
        _save_for_one_rank(root, module, optimizer, common)


def _save_for_one_rank(root: Path, module: GPTModel, optimizer: ChainedOptimizer, common: dict[str, object]) -> None:
    """What a rank of several has parts of: the state by name, and the format torch."""
    (distributed,) = optimizer.chained_optimizers
    states = {}
    for name, param in module.named_parameters():
        found = distributed._get_main_param_and_optimizer_states(param)
        for kind, key in (("master", "param"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
            states[f"{kind}/{name}"] = found[key].detach().clone().view(param.shape)
        states[f"weight/{name}"] = param.detach().clone()
    save_file(_with_experts_joined(states), root / "states.safetensors")
    folder = _new(root / "torch") / "mp_rank_00"
    folder.mkdir()
    rng = {"random_rng_state": random.getstate(), "np_rng_state": np.random.get_state()}
    # Transformer Engine's layers have their FP8 state among the parameters, as bytes.
    model = {**module.state_dict_for_save_checkpoint(), "decoder.layers.0.mlp.linear_fc1._extra_state": torch.ones(5)}
    content = {**common, "model": model, "optimizer": optimizer.state_dict()}
    torch.save({**content, "rng_state": [rng]}, folder / "model_optim_rng.pt")
    torch.save(distributed.get_parameter_state_dp_zero(use_gloo_comm=False), folder / "distrib_optim.pt")


def _with_experts_joined(states: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The experts of a layer in one tensor, as this project has them."""
    joined: dict[str, list[torch.Tensor]] = {}
    for name, value in states.items():
        joined.setdefault(re.sub(r"local_experts\.\d+\.", "", name), []).append(value)
    return {name: torch.stack(values) if "mlp.experts." in name else values[0] for name, values in joined.items()}


def _new(root: Path) -> Path:
    folder = root / f"iter_{BEFORE:07d}"
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True)
        (root / "latest_checkpointed_iteration.txt").write_text(str(BEFORE))
    torch.distributed.barrier()
    return folder
