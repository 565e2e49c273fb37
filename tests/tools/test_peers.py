"""benchmarks/peers: each trains the work of pretrain_gpt.py, and says what it lacks in one line."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import struct
import sys
from pathlib import Path

import pytest

from benchmarks.peers import megatron_te, torchao_fsdp2, work
from benchmarks.peers.keep_arch import containers, keep_arch
from fp8_megatron.config.io import parse_config
from fp8_megatron.training.trainer import Trainer
from tests.harness.ranks import RankPool
from tests.harness.runs import LLAMA_STYLE_FLAGS, tiny_flags

NUM_STEPS = 5
#: Two micro-batches a step over one rank, one over two. The learning rate warms up and decays; logits are about 0.5.
RUN = {
    "train_iters": NUM_STEPS,
    "global_batch_size": 4,
    "num_attention_heads": 4,
    "precision": "bf16",
    "lr": 5e-4,
    "lr_warmup_iters": 2,
    "init_method_std": 0.1,
}
LLAMA = {**LLAMA_STYLE_FLAGS, "ffn_hidden_size": 64}
STYLES = {
    "gpt3": {},
    "llama": LLAMA,
    "yarn": LLAMA
    | {
        "position_embedding_type": "yarn",
        "rotary_scaling_factor": 64.0,
        "yarn_original_max_position_embeddings": 16,
        "rotary_base": 100,
    },
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def own_losses(flags: list[str], folder: Path) -> list[float]:
    Trainer(parse_config(flags)).fit()
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["kind"] == "train"]


def peer_figures(module: str, recipe: str, flags: list[str], output: Path) -> None:
    peer = importlib.import_module(f"benchmarks.peers.{module}")
    peer.train(work._work(parse_config(flags), recipe), output)


def losses_of(ranks: RankPool, module: str, recipe: str, flags: list[str], output: Path, num_ranks: int) -> list[float]:
    ranks.run(peer_figures, module, recipe, flags, output, num_ranks=num_ranks)
    return json.loads(output.read_text())["losses"]


@pytest.mark.parametrize("style", list(STYLES))
def test_peers_train_the_same_work(ranks: RankPool, tmp_path: Path, style: str) -> None:
    """The same tokens, initial weights, schedule and optimizer: only roundings to BF16 differ.

    Over eight seeds and these styles the losses of a step differ by 6 · 10⁻⁴ (rms) and by 2.3 · 10⁻³ at most: which of
    them a machine gets depends on its kernels. Other tokens or other initial weights change them by 10⁻² and more.
    """
    flags = tiny_flags(tmp_path, **RUN, **STYLES[style])
    (own,) = ranks.run(own_losses, flags, tmp_path, num_ranks=1)
    assert max(own) - min(own) > 0.02  # each step's tokens and weights show
    for name, num_ranks in (("megatron_te", 1), ("torchao_fsdp2", 1), ("torchao_fsdp2", 2)):
        recipe = "bf16" if name == "megatron_te" else "torch-bf16"
        losses = losses_of(ranks, name, recipe, flags, tmp_path / "figures.json", num_ranks)
        assert losses[0] == pytest.approx(own[0], abs=5e-4), name
        assert losses == pytest.approx(own, abs=3e-3), name


@pytest.mark.parametrize(
    ("peer", "recipe", "changed", "message"),
    [
        (megatron_te, "bf16", {"eval_interval": 2}, "a peer has no --eval-interval 2"),
        (megatron_te, "bf16", {"save": "x"}, "a peer has no --save x"),
        (megatron_te, "bf16", {"decoupled_weight_decay": False}, "a peer has no --no-decoupled-weight-decay"),
        (torchao_fsdp2, "torch-bf16", {"hidden_dropout": 0.1}, "a peer has no --hidden-dropout 0.1"),
        (torchao_fsdp2, "torch-bf16", {"tensor_model_parallel_size": 2}, "tensor × context × pipeline parallel 2 ×"),
        (megatron_te, "bf16", FULL | {"mlp_chunks_for_training": 2}, "a peer has no --mlp-chunks-for-training 2"),
        (torchao_fsdp2, "torch-bf16", LLAMA | {"rotary_interleaved": True}, "leave --rotary-interleaved out"),
        (torchao_fsdp2, "torch-bf16", {"recompute_granularity": "selective"}, "leave --recompute-granularity out"),
        (megatron_te, "bf16", {"optimizer": "lion"}, "a peer has no --optimizer lion: it trains with AdamW or Muon"),
        (megatron_te, "bf16", {"optimizer": "muon"}, "Emerging-Optimizers@v0.3.1 is not installed: pip install git+"),
        (torchao_fsdp2, "torch-bf16", {"optimizer": "muon"}, "--optimizer muon: this peer trains with AdamW"),
        (megatron_te, "te-delayed", {}, "transformer_engine[pytorch] is not installed: pip install"),
        (torchao_fsdp2, "torchao-rowwise", {}, "torchao is not installed: pip install torchao"),
    ],
)
def test_what_a_peer_lacks_is_said_in_one_line(
    peer,
    recipe: str,
    changed: dict,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    find_spec = importlib.util.find_spec
    missing = ("transformer_engine", "torchao", "emerging_optimizers")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else find_spec(name))
    monkeypatch.setattr(sys, "argv", ["peer", "--recipe", recipe, "--", *tiny_flags(tmp_path, **{**RUN, **changed})])
    monkeypatch.setitem(os.environ, "RANK", "0")
    recipes = [*megatron_te.FP8_RECIPES, *torchao_fsdp2.FLOAT8_RECIPES]
    assert work.main("", recipes, peer.check, lambda *_: pytest.fail("trained")) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def _container(*entries: tuple[int, int, bytes]) -> bytes:
    """(kind, architecture, payload), as nvcc lays kernels out."""
    head = [struct.pack("<HHIQIIHHI", kind, 0x101, 64, len(load), 0, 0, 1, 8, arch) for kind, arch, load in entries]
    body = b"".join(one.ljust(64, b"\0") + load for one, (*_, load) in zip(head, entries, strict=True))
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_a_library_is_cut_to_one_architecture(tmp_path: Path) -> None:
    """No offset of a container moves; one without machine code for the architecture stays whole."""
    code, ptx = 2, 1
    both = _container((code, 80, b"a" * 24), (code, 90, b"b" * 16), (ptx, 90, b"c" * 8), (code, 90, b"d" * 8))
    other = _container((code, 80, b"e" * 8), (ptx, 80, b"f" * 8))
    stray = struct.pack("<I", 0xBA55ED50) + b"\7" * 32
    library = tmp_path / "lib.so"
    library.write_bytes(before := b"ELF " + stray + both + other + b"tail")
    assert keep_arch(library, 90) == {80: 88 + 2 * 72, 90: 80 + 2 * 72}
    after = library.read_bytes()
    (first, kept), (second, rest) = containers(after)
    assert len(after) == len(before) and first == before.index(both) and second == before.index(other)
    assert [after[one.start + 64 : one.start + one.size] for one in kept] == [b"b" * 16, b"d" * 8]
    assert {one.arch for one in rest} == {80} and after.endswith(other + b"tail") and b"aaaa" not in after
