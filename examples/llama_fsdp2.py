"""Llama under torch's FSDP2: FP8 at rest and on the wire, beside BF16 and torchao's float8.

torchrun --standalone --nproc-per-node 2 examples/llama_fsdp2.py              a tiny model on CPUs takes seconds
torchrun --standalone --nproc-per-node 4 examples/llama_fsdp2.py --size 8b    Llama-3-8B's shape on GPUs

Every variant trains the same model on the same tokens. A row has, for one rank: bytes of its shards (weights,
gradients, optimizer state), bytes that it gathers in a step, the GPU's peak, milliseconds a step and the mean of the
last losses.

bf16     FP32 weights and state, gathered and computed in BF16, gradients reduced in FP32
torchao  the same with torchao's float8 GEMMs and float8 all-gather; left out if torchao is not installed
fp8      fp8_megatron at level O3: FP8 weights, moments in FP8 and FP16, gradients reduced in FP8
"""

import argparse
import gc
import importlib.util
import json
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import fp8_megatron

#: Name → layers, hidden size, size of the MLP, heads, groups of queries, vocabulary.
SIZES = {
    "tiny": (2, 128, 384, 4, 2, 256),
    "1b": (16, 2048, 8192, 32, 8, 128256),
    "8b": (32, 4096, 14336, 32, 8, 128256),
}
NUM_WARM_UP = 3


class CountingAllGather:
    """The all-gather of FSDP2, which adds up what this rank receives."""

    nbytes = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        CountingAllGather.nbytes += output_tensor.nbytes - input_tensor.nbytes
        return torch.distributed.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class LlamaLoss(LlamaForCausalLM):
    """Llama whose forward is its loss, over parts of the tokens: only the logits of one part exist at a time."""

    def forward(self, tokens: Tensor, targets: Tensor, num_parts: int = 1) -> Tensor:
        hidden, targets = self.model(tokens).last_hidden_state.flatten(0, 1), targets.flatten()
        if num_parts == 1:
            return self.loss_of(hidden, targets) / len(targets)
        parts = zip(hidden.chunk(num_parts), targets.chunk(num_parts), strict=True)
        return sum(checkpoint(self.loss_of, *part, use_reentrant=False) for part in parts) / len(targets)

    def loss_of(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(self.lm_head(hidden).float(), targets, reduction="sum")


def build(arguments: argparse.Namespace, dtype: torch.dtype, device: str) -> LlamaLoss:
    layers, hidden, mlp, heads, groups, vocabulary = SIZES[arguments.size]
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=vocabulary,
        max_position_embeddings=max(8192, arguments.sequence_length),
        rope_theta=500000.0,
        use_cache=False,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = LlamaLoss(config)
    torch.set_default_dtype(torch.float32)
    if arguments.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def shard(model: LlamaLoss, compiles: bool, policy: MixedPrecisionPolicy) -> None:
    for layer in model.model.layers:
        if compiles:
            layer.compile()
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(CountingAllGather())


def nothing() -> None:
    """After a step there is nothing more to do."""


Variant = tuple[LlamaLoss, torch.optim.Optimizer, Callable[[], None]]


def bf16(arguments: argparse.Namespace, device: str) -> Variant:
    model = build(arguments, torch.float32, device)
    shard(model, arguments.compile, MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    return model, adamw(model, arguments, device), nothing


def torchao(arguments: argparse.Namespace, device: str) -> Variant:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

    model = build(arguments, torch.float32, device)
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name != "lm_head")
    shard(model, arguments.compile, MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    return model, adamw(model, arguments, device), lambda: precompute_float8_dynamic_scale_for_fsdp(model)


def fp8(arguments: argparse.Namespace, device: str) -> Variant:
    model = build(arguments, torch.bfloat16, device)
    fp8_megatron.replace_linears(model, filter=lambda name, _: name != "lm_head")
    shard(model, arguments.compile, MixedPrecisionPolicy())
    model, optimizer = fp8_megatron.initialize(model, adamw(model, arguments, device), opt_level="O3")
    return model, optimizer, nothing


def adamw(model: torch.nn.Module, arguments: argparse.Namespace, device: str) -> torch.optim.Optimizer:
    fused = True if device == "cuda" else None
    return torch.optim.AdamW(model.parameters(), lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)


VARIANTS = {"bf16": bf16, "torchao": torchao, "fp8": fp8}


def batches(arguments: argparse.Namespace, rank: int) -> Callable[[int], Tensor]:
    """Step → tokens [sequences, length + 1]: a file's, or a chain in which a token mostly decides the next one."""
    vocabulary, shape = SIZES[arguments.size][-1], (arguments.batch_size, arguments.sequence_length + 1)
    if arguments.tokens:
        import numpy

        tokens = numpy.load(arguments.tokens, mmap_mode="r")

        def read(step: int) -> Tensor:
            draw = torch.Generator().manual_seed(1000 * step + rank)
            starts = torch.randint(len(tokens) - shape[1], shape[:1], generator=draw)
            return torch.stack([torch.from_numpy(tokens[i : i + shape[1]].astype("int64")) for i in starts.tolist()])

        return read
    follower = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(1))

    def make(step: int) -> Tensor:
        draw = torch.Generator().manual_seed(1000 * step + rank)
        chain = [torch.randint(vocabulary, shape[:1], generator=draw)]
        for _ in range(shape[1] - 1):
            jumps = torch.rand(shape[:1], generator=draw) < 0.1
            chain.append(torch.where(jumps, torch.randint(vocabulary, shape[:1], generator=draw), follower[chain[-1]]))
        return torch.stack(chain, dim=1)

    return make


def train(name: str, arguments: argparse.Namespace, device: str) -> dict[str, str]:
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model, optimizer, after_step = VARIANTS[name](arguments, device)
    batch = batches(arguments, rank)
    row = {"variant": name}
    times, losses = [], []
    for step in range(arguments.steps):
        tokens = batch(step).to(device)
        if step == NUM_WARM_UP:
            CountingAllGather.nbytes = 0
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
        wait(device)
        start = time.perf_counter()
        loss = model(tokens[:, :-1], tokens[:, 1:], arguments.loss_parts)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if step == arguments.steps - 1:
            row |= shard_bytes(model, optimizer)
        optimizer.step()
        after_step()
        optimizer.zero_grad()
        wait(device)
        times.append(time.perf_counter() - start)
        torch.distributed.all_reduce(loss := loss.detach())
        losses.append(loss.item() / ranks)
    measured = times[NUM_WARM_UP:]
    row["gathered MB/step"] = f"{CountingAllGather.nbytes / len(measured) / 1e6:,.2f}"
    row["peak GiB"] = f"{torch.cuda.max_memory_allocated() / 2**30:.1f}" if device == "cuda" else "-"
    row["ms/step"] = f"{1000 * sorted(measured)[len(measured) // 2]:,.0f}"
    row["loss"] = f"{sum(losses[-3:]) / 3:.3f}"
    return row


def shard_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Megabytes that this rank stores, before a step's gradients are dropped."""
    weights = sum(stored_bytes(param) for param in model.parameters())
    grads = sum(stored_bytes(param.grad) for param in model.parameters() if param.grad is not None)
    held = getattr(optimizer, "storage_bytes", None)
    if held is None:
        states = [value for entry in optimizer.state.values() for value in entry.values()]
        state = sum(stored_bytes(value) for value in states if isinstance(value, Tensor) and value.dim())
    else:
        state = sum(count for kind, count in held.items() if kind not in ("weight", "main_grad"))
    parts = {"weights MB": weights, "gradients MB": grads, "state MB": state}
    return {kind: f"{count / 1e6:,.2f}" for kind, count in parts.items()}


def stored_bytes(tensor: Tensor) -> int:
    local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(getattr(local, "payload", local).nbytes)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=2, help="sequences of each rank")
    parser.add_argument("--sequence-length", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--tokens", help="a .npy file of token numbers, one-dimensional")
    parser.add_argument("--compile", action="store_true", help="torch.compile every layer")
    parser.add_argument("--recompute", action="store_true", help="recompute activations in backward")
    parser.add_argument("--loss-parts", type=int, default=1, help="parts of tokens whose logits exist one at a time")
    parser.add_argument("--output", help="a .json file that receives the rows")
    arguments = parser.parse_args()
    if arguments.steps <= NUM_WARM_UP:
        parser.error(f"--steps {arguments.steps}: {NUM_WARM_UP} steps warm up; give more")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    rows = []
    for name in arguments.variants:
        if name == "torchao" and importlib.util.find_spec("torchao") is None:
            continue
        rows.append(train(name, arguments, device))
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    if torch.distributed.get_rank() == 0:
        print("| " + " | ".join(rows[0]) + " |\n| " + " | ".join("---" for _ in rows[0]) + " |")
        for row in rows:
            print("| " + " | ".join(row.values()) + " |")
        if arguments.output:
            pathlib.Path(arguments.output).write_text(json.dumps(rows, indent=1) + "\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
