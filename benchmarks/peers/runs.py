"""The peers by the name of their run, and how each is started."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Peer:
    """A program of this folder with one of its recipes.

    Attributes:
        needs: the package that the recipe requires, by its import name; None: none.
        install: its name for pip.
    """

    program: str
    recipe: str
    needs: str | None = None
    install: str | None = None

    def missing(self) -> str | None:
        """What must be installed first, in words; None if nothing."""
        if self.needs is None or importlib.util.find_spec(self.needs) is not None:
            return None
        return f"pip install {self.install}"

    def command(self, num_ranks: int, figures: Path, flags: Sequence[str]) -> list[str]:
        """The command, to be run from the repository's root.

        Args:
            figures: the file for them.
            flags: of pretrain_gpt.py.
        """
        # Megatron-LM asks its users for one queue; other peers use CUDA's default.
        queues = ["env", "CUDA_DEVICE_MAX_CONNECTIONS=1"] if self.program == "megatron_te" else []
        return [
            *(*queues, sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(num_ranks), "-m", f"benchmarks.peers.{self.program}"),
            *("--recipe", self.recipe, "--output", str(figures), "--", *flags),
        ]


def _megatron(recipe: str) -> Peer:
    return Peer("megatron_te", recipe, "transformer_engine", '"transformer_engine[pytorch]"')


#: megatron-bf16 without Transformer Engine runs megatron-core's own layers, whose attention is not fused.
PEERS = {
    "megatron-bf16": Peer("megatron_te", "bf16"),
    "megatron-te-delayed": _megatron("te-delayed"),
    "megatron-te-delayed-lean": _megatron("te-delayed-lean"),
    "megatron-te-tensorwise": _megatron("te-tensorwise"),
    "megatron-te-blockwise": _megatron("te-blockwise"),
    "torch-bf16": Peer("torchao_fsdp2", "torch-bf16"),
    "torchao-tensorwise": Peer("torchao_fsdp2", "torchao-tensorwise", "torchao", "torchao"),
    "torchao-rowwise": Peer("torchao_fsdp2", "torchao-rowwise", "torchao", "torchao"),
}
