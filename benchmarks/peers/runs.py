"""The peers by the name of their run, and how each is started."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Peer:
    """A program of this folder with one of its recipes.

    Attributes:
        needs: the packages that the recipe requires: import name → name for pip.
        flags: of pretrain_gpt.py, behind those of all runs.
    """

    program: str
    recipe: str
    needs: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()

    def missing(self) -> str | None:
        """What must be installed first, in words; None if nothing."""
        absent = [name for module, name in self.needs.items() if importlib.util.find_spec(module) is None]
        return f"pip install {' '.join(absent)}" if absent else None

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
            *("--recipe", self.recipe, "--output", str(figures), "--", *flags, *self.flags),
        ]


#: Megatron's Muon is in no registry.
EMERGING_OPTIMIZERS = "git+https://github.com/NVIDIA-NeMo/Emerging-Optimizers@v0.3.1"
#: Updates about the size of AdamW's, so that its learning rate fits.
MUON = ("--optimizer", "muon", "--muon-nesterov", "--muon-momentum", "0.95", "--muon-extra-scale-factor", "0.2")
_TE = {"transformer_engine": '"transformer_engine[pytorch]"'}
_TORCHAO = {"torchao": "torchao"}


#: megatron-bf16 without Transformer Engine runs megatron-core's own layers, whose attention is not fused.
PEERS = {
    "megatron-bf16": Peer("megatron_te", "bf16"),
    "megatron-te-delayed": Peer("megatron_te", "te-delayed", _TE),
    "megatron-te-delayed-lean": Peer("megatron_te", "te-delayed-lean", _TE),
    "megatron-te-tensorwise": Peer("megatron_te", "te-tensorwise", _TE),
    "megatron-te-blockwise": Peer("megatron_te", "te-blockwise", _TE),
    "megatron-muon": Peer("megatron_te", "te-delayed", {**_TE, "emerging_optimizers": EMERGING_OPTIMIZERS}, MUON),
    "torch-bf16": Peer("torchao_fsdp2", "torch-bf16"),
    "torchao-tensorwise": Peer("torchao_fsdp2", "torchao-tensorwise", _TORCHAO),
    "torchao-rowwise": Peer("torchao_fsdp2", "torchao-rowwise", _TORCHAO),
}
