"""One rank that trains a plain torch module on the core, in a process where megatron-core cannot be imported.

``python -m tests.harness.plain_torch RANK NUM_RANKS RENDEZVOUS_FILE`` prints one line of JSON. One rank has no process
group at all.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.abc
import json
import pkgutil
import sys
from collections.abc import Sequence
from typing import Any

import torch

ROOMS = tuple("dtypes device kernels formats quantization collectives sharding optimizer nn any_model".split())
#: What a machine without its library may miss, each behind the door that looks for it first.
OPTIONAL = {"triton", "cudnn"}
NUM_STEPS = 30
CPU = torch.device("cpu")


class NoMegatron(importlib.abc.MetaPathFinder):
    """Makes megatron-core as good as not installed."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> None:
        if fullname.partition(".")[0] == "megatron":
            raise ModuleNotFoundError(f"{fullname} is hidden: the core stands on torch alone", name=fullname)


def import_core() -> int:
    """Import every module of the core; how many there are."""
    names = []
    for room in ROOMS:
        module = importlib.import_module(f"fp8_megatron.{room}")
        names.append(module.__name__)
        if hasattr(module, "__path__"):
            names += [info.name for info in pkgutil.walk_packages(module.__path__, module.__name__ + ".")]
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in OPTIONAL:
                raise
    return len(names)


def build_module() -> torch.nn.Module:
    """Two FP8 linear layers with biases, and an activation between them."""
    from fp8_megatron.nn.module import FP8Linear

    return torch.nn.Sequential(FP8Linear(64, 128), torch.nn.GELU(), FP8Linear(128, 32))


def train(rank: int, num_ranks: int, rendezvous_file: str) -> dict[str, Any]:
    """Fit a random function of the inputs; the losses, and a digest of all weights at the end."""
    from fp8_megatron.optimizer.distributed_optimizer import FP8DistributedOptimizer
    from fp8_megatron.optimizer.hyperparameters import OptimizerSettings
    from fp8_megatron.quantization.scaled_tensor import ScaledTensor
    from fp8_megatron.sharding.data_parallel import DataParallelModule, finish_gradients
    from fp8_megatron.sharding.replicas import Replicas, Sharing
    from fp8_megatron.sharding.storage import ModelStorage

    group = None
    if num_ranks > 1:
        store = torch.distributed.FileStore(rendezvous_file, num_ranks)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
        group = torch.distributed.group.WORLD
    sharing, storage = Sharing(Replicas.of(group, CPU)), ModelStorage()
    torch.manual_seed(3)
    module = build_module()
    values = {  # before the optimizer gives the parameters other storage
        name: param.dequantize() if isinstance(param, ScaledTensor) else param.detach().float().clone()
        for name, param in module.named_parameters()
    }
    model = DataParallelModule(module, sharing_of=lambda _: sharing, storage=storage)
    optimizer = FP8DistributedOptimizer([model], OptimizerSettings(lr=1e-2), storage, world=group, device=CPU)
    optimizer.load_weights(values.items())
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num_ranks, 64, 64, generator=generator)[rank].bfloat16()
    targets = (inputs.float() @ torch.randn(64, 32, generator=torch.Generator().manual_seed(2))).tanh()
    losses = []
    for _ in range(NUM_STEPS):
        model.reset()
        loss = (module(inputs).float() - targets).square().mean()
        loss.backward()
        finish_gradients([model])
        optimizer.step()
        losses.append(loss.item())
    model.wait_for_weights()
    digest = hashlib.sha256()
    for param in module.parameters():
        tensors = [param.payload, param.scale] if isinstance(param, ScaledTensor) else [param.detach()]
        for tensor in tensors:
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    if num_ranks > 1:
        torch.distributed.destroy_process_group()
    return {"losses": losses, "weights": digest.hexdigest()}


def main() -> None:
    rank, num_ranks, rendezvous_file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    sys.meta_path.insert(0, NoMegatron())
    torch.set_num_threads(1)
    result = {"num_modules": import_core(), **train(rank, num_ranks, rendezvous_file)}
    result["loaded"] = sorted(name for name in sys.modules if name.partition(".")[0] == "megatron")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
