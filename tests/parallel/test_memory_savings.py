"""What saves memory (recomputation, offload, chunks, freed outputs) leaves a run as it is, in every layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel import schedules
from torch import Tensor

from fp8_megatron.config.schema import Config
from fp8_megatron.nn import offload
from tests.harness.ranks import RankPool
from tests.harness.tiny_gpt import GPT3_STYLE, LLAMA_STYLE, TinyGPT, TinyRun, random_batches, train_tiny_gpt
from tests.parallel.layouts import LAYOUTS, RECOMPUTE, assert_same_bits, everyones_runs, run

#: Sizes that blockwise casts take, on each of two ranks too.
WIDE = {
    "gpt3": replace(GPT3_STYLE, hidden_size=256, ffn_hidden_size=512),
    "llama": replace(LLAMA_STYLE, hidden_size=256, ffn_hidden_size=256, num_query_groups=4),
}
DEEP = {
    "gpt3": replace(GPT3_STYLE, num_layers=4),
    "llama": replace(LLAMA_STYLE, num_layers=4),
    "wide_heads": replace(LLAMA_STYLE, num_layers=4, kv_channels=128),
}
SHORT = {
    "llama": LLAMA_STYLE,
    "gpt3": GPT3_STYLE,
    "dropout": replace(GPT3_STYLE, hidden_dropout=0.1, attention_dropout=0.1),
    "qk_norm": replace(LLAMA_STYLE, qk_layernorm=True),
    "wide_heads": replace(LLAMA_STYLE, kv_channels=128),
}
STEPS = MICRO_BATCHES = 2


def slow(*case: object) -> object:
    return pytest.param(*case, marks=pytest.mark.slow)


def saved_bytes_of_run(config: Config, tokens: Tensor) -> tuple[TinyRun, int]:
    """A run, and the bytes that its functions save for backward."""
    nbytes = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal nbytes
        nbytes += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return train_tiny_gpt(config, tokens), nbytes


@pytest.mark.parametrize(
    ("model", "precision", "layout"),
    [
        ("llama", "O3", "one"),
        ("gpt3", "delayed", "tp2_sp"),
        ("llama", "blockwise", "tp2_sp"),
        ("gpt3", "O1", "tp2"),
        slow("llama", "delayed", "pp2"),
    ],
)
def test_recomputed_mlps_and_norms(ranks: RankPool, model: str, precision: str, layout: str) -> None:
    tokens = random_batches(STEPS, MICRO_BATCHES, seq_length=128)
    case = (ranks, replace(WIDE[model], seq_length=128), precision, layout, tokens)
    modules = {"recompute_granularity": "selective", "recompute_modules": ("mlp", "layernorm")}
    plain, kept = run(*case, train=saved_bytes_of_run)
    again, kept_again = run(*case, train=saved_bytes_of_run, **modules)
    assert_same_bits(again, plain)
    # 512 columns of 16 bits of 256 tokens, in every layer of a stage, micro-batch and step.
    layers, share = (1, 1) if layout == "pp2" else (2, LAYOUTS[layout][0])
    assert kept - kept_again == 2 * 512 * 256 * layers * STEPS * MICRO_BATCHES / share


@pytest.mark.parametrize("recomputation", ["mlp", "core_attn", "full"])
@pytest.mark.parametrize(
    ("model", "precision"),
    [
        ("llama", "bf16"),
        ("gpt3", "first_bf16"),
        ("dropout", "bf16"),
        ("qk_norm", "bf16"),
        ("qk_norm", "O3"),
        ("wide_heads", "attention"),
    ],
)
def test_recomputed_parts(ranks: RankPool, model: str, precision: str, recomputation: str) -> None:
    """megatron-core's checkpoints: of an MLP with or without biases, of attention, and of whole layers.

    Full recomputation of norms of query and key adds the two gradients of a 16-bit layer's input in another order,
    which moves later steps by some 10⁻⁴.
    """
    case = (ranks, SHORT[model], precision, "one", random_batches(STEPS, MICRO_BATCHES))
    plain, again = run(*case), run(*case, **RECOMPUTE[recomputation])
    if (model, precision, recomputation) != ("qk_norm", "bf16", "full"):
        return assert_same_bits(again, plain)
    assert again.losses[0] == plain.losses[0]
    assert again.losses == pytest.approx(plain.losses, rel=0.0, abs=5e-4)
    assert again.grad_norms == pytest.approx(plain.grad_norms, rel=1e-3)


def run_and_count(config: Config, tokens: Tensor) -> tuple[TinyRun, int]:
    """A run, and the bytes that it copied to the host."""
    nbytes = 0
    copies = offload._Layer.copies_to_host

    def counting(layer: offload._Layer) -> Callable[[], None]:
        nonlocal nbytes
        nbytes += sum(stored.num_bytes for stored in layer.alive())
        return copies(layer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload._Layer, "copies_to_host", counting)
        patch.setattr(offload, "MIN_BYTES", 2**12)
        return train_tiny_gpt(config, tokens), nbytes


@pytest.mark.parametrize(
    ("model", "precision", "layout", "recomputation", "num_layers"),
    [
        ("llama", "O3", "one", "none", 3),
        ("gpt3", "delayed", "one", "full", 3),
        ("llama", "O3", "one", "mlp", 4),
        ("wide_heads", "attention", "one", "none", 3),
        ("gpt3", "bf16", "one", "none", 2),
        ("gpt3", "delayed", "tp2_sp", "none", 3),
        slow("llama", "O3", "cp2", "none", 3),
        slow("llama", "bf16", "one", "core_attn", 3),
        slow("llama", "O3", "one", "block", 3),
        slow("llama", "O3", "pp2", "none", 1),
        slow("gpt3", "O3", "pp2", "full", 2),
        ("gpt3", "delayed", "pp2_vpp2", "none", 1),
    ],
)
def test_offload(ranks: RankPool, model: str, precision: str, layout: str, recomputation: str, num_layers: int) -> None:
    case = (ranks, DEEP[model], precision, layout, random_batches(STEPS, MICRO_BATCHES))
    (plain, nothing), (moved, nbytes) = (
        run(*case, train=run_and_count, cpu_offloading_num_layers=number, **RECOMPUTE[recomputation])
        for number in (0, num_layers)
    )
    assert_same_bits(moved, plain)
    # At least the input of each layer, of 2 sequences of 32 tokens in BF16.
    chunks = 2 if layout == "pp2_vpp2" else 1
    ranks_a_token = LAYOUTS[layout][0] if layout in ("tp2_sp", "cp2") else 1
    inputs = 2 * 128 * 2 * 32 * chunks * num_layers * STEPS * MICRO_BATCHES / ranks_a_token
    assert nothing == 0 and nbytes >= inputs
    if recomputation == "full" and num_layers < 4 and layout == "one":
        assert nbytes == inputs


def assert_few_turned(parts: TinyRun, whole: TinyRun, share: float) -> None:
    """AdamW's first steps move an element by about its learning rate, 1e-3, in the direction of its sign. Noise turns
    the signs of the smallest gradients: of 8%, arctan(0.08) / π = 2.5% of them a step. A key's bias has no gradient but
    noise."""
    for name, weight in whole.weights.items():
        if weight.dim() == 2:
            assert ((parts.weights[name] - weight).abs() > 1e-3).float().mean() < share, name


@pytest.mark.parametrize(
    ("model", "precision", "layout", "others"),
    [
        ("llama", "bf16", "one", ["mlp"]),
        ("gpt3", "delayed_grads", "tp2_sp", ["full", "offload"]),
        ("llama", "blockwise", "one", ["full"]),
        ("gpt3", "O1", "dp2", ["mlp", "offload"]),
        slow("llama", "O3", "one", ["mlp"]),
        slow("gpt3", "bf16", "tp2_sp", ["full"]),
        slow("gpt3", "O1", "tp2", ["mlp"]),
        slow("llama", "first_bf16", "one", ["mlp"]),
        slow("llama", "delayed_grads", "one", ["full"]),
        slow("llama", "blockwise", "tp2_sp", ["mlp"]),
        slow("llama", "O3", "cp2", ["mlp"]),
    ],
)
def test_mlps_in_chunks(ranks: RankPool, model: str, precision: str, layout: str, others: list[str]) -> None:
    """Three chunks of 128 positions; on two ranks 192 = 128 + 64.

    Rows do not see each other in an MLP. In the first step, bits are the same but under one scale a tensor, which then
    comes from the values: each chunk has its own, and a loss near ln 256 moves by FP8's noise, 2⁻⁴ of hidden states
    below 1 and averaged over 1,536 tokens. Sums of gradients have another order, or are rounded at another place: 2⁻⁸.
    """
    case = (ranks, replace(WIDE[model], seq_length=384), precision, layout, random_batches(2, 2, seq_length=384))
    training = dict(RECOMPUTE[others[0]], cpu_offloading_num_layers=int("offload" in others))
    whole, parts = run(*case, **training), run(*case, mlp_chunks_for_training=3, **training)
    is_exact = precision in ("bf16", "blockwise")
    assert parts.losses[0] == (whole.losses[0] if is_exact else pytest.approx(whole.losses[0], abs=1e-3))
    assert parts.grad_norms[0] == pytest.approx(whole.grad_norms[0], rel=2**-8 if is_exact else 0.02)
    assert parts.losses[1] == pytest.approx(whole.losses[1], abs=5e-3)
    assert whole.losses[1] != whole.losses[0]
    assert_few_turned(parts, whole, 0.08)


@pytest.mark.parametrize(
    ("model", "precision", "layout"),
    [
        ("llama", "tensorwise", "one"),
        ("gpt3", "bf16", "tp2_sp"),
        ("llama", "head", "tp2_sp"),
        ("gpt3", "delayed_head", "one"),
        slow("gpt3", "tensorwise", "tp2"),
        slow("llama", "head", "tp2"),
        slow("gpt3", "head", "cp2"),
    ],
)
def test_logits_in_chunks(ranks: RankPool, model: str, precision: str, layout: str) -> None:
    """Two chunks of 32 positions and one of what is left of 96, or of 48. The GPT-3 style ties the head.

    Losses of a step differ by the rounding of logits, 2⁻⁹ of values below 1, or 2⁻⁴ in FP8 with another scale, over 384
    tokens. Gradients of the head's weight are rounded by chunk.
    """
    small = replace(SHORT[model], num_layers=1, seq_length=96)
    case = (ranks, small, precision, layout, random_batches(2, 2, seq_length=96))
    whole, parts = (run(*case, loss_chunk_size=size) for size in (None, 32))
    error = 2e-3 if "head" in precision else 1e-4
    assert parts.losses[0] == pytest.approx(whole.losses[0], abs=error)
    assert parts.grad_norms[0] == pytest.approx(whole.grad_norms[0], rel=10 * error)
    assert parts.losses[1] == pytest.approx(whole.losses[1], abs=10 * error)
    assert whole.losses[1] != whole.losses[0]
    assert_few_turned(parts, whole, 0.05)


def train_and_look(config: Config, tokens: Tensor, *, keeps: bool) -> tuple[TinyRun, list[int]]:
    """A run, and the elements that each output of a stage held when its backward began."""
    held: list[int] = []
    plain = schedules.backward_step

    def backward_step(inputs: Any, outputs: Any, grads: Any, *others: Any, **named: Any) -> Any:
        output, grad = (of[0] if isinstance(of, list) else of for of in (outputs, grads))
        if grad is not None:
            held.append(output.untyped_storage().nbytes() // output.itemsize)
        return plain(inputs, outputs, grads, *others, **named)

    def keep(gpt: TinyGPT) -> None:
        for chunk in gpt.chunks:
            chunk.module.config.deallocate_pipeline_outputs = False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedules, "backward_step", backward_step)
        return train_tiny_gpt(config, tokens, before_training=keep if keeps else None), held


@pytest.mark.parametrize(
    ("model", "precision", "layout", "training"),
    [
        ("gpt3", "O3", "pp2", {}),
        ("llama", "wire", "pp2_vpp2", RECOMPUTE["full"]),
        slow("llama", "bf16", "pp2_empty", {}),
        slow("gpt3", "wire", "pp2", {"cpu_offloading_num_layers": 2}),
        slow("llama", "bf16", "pp2_vpp2", RECOMPUTE["full"]),
        slow("llama", "O3", "tp2_sp_pp2", RECOMPUTE["full"] | {"mlp_chunks_for_training": 2}),
    ],
)
def test_outputs_of_stages_are_freed(
    ranks: RankPool, model: str, precision: str, layout: str, training: dict[str, Any]
) -> None:
    """What was sent is not needed in backward."""
    case = (ranks, DEEP[model], precision, layout, random_batches(2, 4))
    runs = [everyones_runs(*case, train=partial(train_and_look, keeps=keeps), **training) for keeps in (False, True)]
    for (freed, held), (kept, held_before) in zip(*runs, strict=True):
        assert_same_bits(freed, kept)
        assert set(held) <= {1} and len(held) == len(held_before) and all(size > 1 for size in held_before)
    assert any(held for _, held in runs[0])
