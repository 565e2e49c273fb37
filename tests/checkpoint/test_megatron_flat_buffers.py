"""A distributed optimizer's flat buffers of several tensor-parallel ranks and stages, laid out as Megatron does."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8_megatron.checkpoint.files import CheckpointError
from fp8_megatron.checkpoint.megatron_layout import Name
from fp8_megatron.checkpoint.megatron_torch_dist import TorchDist
from fp8_megatron.checkpoint.torch_dist import Chunk, write_chunks, write_metadata
from fp8_megatron.checkpoint.weights import places
from fp8_megatron.config.model import ModelConfig
from fp8_megatron.models.registry import weight_shapes
from tests.harness.tiny_gpt import GPT3_STYLE, LLAMA_STYLE

KINDS = {"master": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
LAYOUT, FIRST = "pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers"
#: The modules of a layer of megatron-core, whose norms stand in front of their linear layers.
MODULES = (
    "self_attention.linear_qkv.layer_norm_",
    "self_attention.linear_proj.",
    "self_attention.linear_qkv.",
    "self_attention.q_layernorm.",
    "self_attention.k_layernorm.",
    "mlp.linear_fc1.layer_norm_",
    "mlp.linear_fc1.",
    "mlp.linear_fc2.",
    "mlp.router.",
    "mlp.experts.linear_fc1.",
    "mlp.experts.linear_fc2.",
    "mlp.shared_experts.gate_",
    "mlp.shared_experts.linear_fc1.",
    "mlp.shared_experts.linear_fc2.",
)
#: Layer 0 is dense.
EXPERTS = replace(
    LLAMA_STYLE,
    num_layers=4,
    num_experts=4,
    moe_ffn_hidden_size=32,
    moe_layer_freq="[0,1,1,1]",
    moe_shared_expert_intermediate_size=64,
    moe_shared_expert_gate=True,
)
State = dict[tuple[str, str, int | None], Tensor]


def state_of(model: ModelConfig) -> State:
    """Random masters and moments by kind, key and layer."""
    generator = torch.Generator().manual_seed(0)
    shapes = weight_shapes(model, 256)
    return {
        (kind, key, layer): torch.randn(shapes[key][0 if layer is None else 1 :], generator=generator)
        for key, layer, _ in places(shapes)
        for kind in KINDS
    }


def row_of(model: ModelConfig, key: str, layer: int) -> int | None:
    """The layer, counted over those that have the key; None: it has not."""
    if "experts." in key or "router" in key:
        layers = list(model.expert_layers)
    elif "mlp" in key and "norm" not in key:
        layers = [each for each in range(model.num_layers) if each not in model.expert_layers]
    else:
        layers = list(range(model.num_layers))
    return layers.index(layer) if layer in layers else None


def chunk_params(
    model: ModelConfig, state: State, layers: range, *, is_first: bool, is_last: bool
) -> Iterator[tuple[str, int | None]]:
    """The parameters of a model chunk, in the order of its modules."""
    known = {(key, layer) for _, key, layer in state}
    embedding = [(f"embedding.{name}_embeddings.weight", None) for name in ("word", "position")]
    yield from (each for each in embedding if is_first and each in known)
    for layer in layers:
        ends = [f"{module}{part}" for module in MODULES for part in ("weight", "bias")]
        keys = [f"decoder.layers.{end}" for end in ends]
        yield from (each for key in keys if (each := (key, row_of(model, key, layer))) in known)
    if is_last:
        norm = [(f"decoder.final_layernorm.{part}", None) for part in ("weight", "bias")]
        yield from (each for each in norm if each in known)
        if ("output_layer.weight", None) in known:
            yield "output_layer.weight", None
        elif not is_first:
            yield "embedding.word_embeddings.weight", None  # the last stage's copy


def part_of_rank(key: str, value: Tensor, rank: int, size: int, *, is_gated: bool) -> Tensor:
    """A tensor-parallel rank's part, as Megatron's layers cut it."""
    if (
        "norm" in key
        or "position" in key
        or "router" in key
        or "gate_" in key
        or key.endswith(("linear_proj.bias", "linear_fc2.bias"))
    ):
        return value
    if is_gated and "linear_fc1" in key:
        return torch.cat([half.chunk(size)[rank] for half in value.chunk(2)])
    return value.chunk(size, 1 if key.endswith(("linear_proj.weight", "linear_fc2.weight")) else 0)[rank]


def expert_parts(fc1: Tensor, fc2: Tensor, rank: int, form: str, tensor_rank: int, tensor_size: int) -> list[Tensor]:
    """The parameters of a rank's two experts of four, from weights [E, N, K] of gated experts."""
    cut = [
        (
            part_of_rank("linear_fc1.weight", fc1[expert], tensor_rank, tensor_size, is_gated=True),
            part_of_rank("linear_fc2.weight", fc2[expert], tensor_rank, tensor_size, is_gated=True),
        )
        for expert in (2 * rank, 2 * rank + 1)
    ]
    if form == "SequentialMLP":
        return [part for expert in cut for part in expert]
    if form == "TEGroupedMLP":
        return [expert[projection] for projection in (0, 1) for expert in cut]
    # GroupedMLP: inputs before outputs
    return [torch.cat([expert[projection].t().reshape(-1) for expert in cut]) for projection in (0, 1)]


def flat(parts: list[Tensor]) -> Tensor:
    """A buffer of one bucket: the last parameter first, each at a multiple of 64 elements."""
    pieces: list[Tensor] = []
    for part in reversed(parts):
        filled = sum(piece.numel() for piece in pieces)
        pieces += [torch.full((-filled % 64,), torch.nan), part.reshape(-1)]
    return torch.cat(pieces)


def save(
    folder: Path, model: ModelConfig, chunks: list[list[range]], tensor_size: int, form: str = "", **arguments: Any
) -> State:
    """Write the checkpoint; `chunks` has layers by stage and virtual stage, `form` is megatron-core's of experts."""
    state, shapes = state_of(model), weight_shapes(model, 256)
    tensors = {}
    for key, shape in shapes.items():
        layers = range(shape[0]) if key.startswith("decoder.layers.") else [None]
        whole = torch.stack([state["master", key, layer] for layer in layers])
        tensors[key] = whole.view(shape).bfloat16().float()
    for stage, own in enumerate(chunks):
        for index, layers in enumerate(own):
            is_last = stage == len(chunks) - 1 and index == len(own) - 1
            params = list(chunk_params(model, state, layers, is_first=stage == index == 0, is_last=is_last))
            for rank in range(tensor_size):
                prefix = "chained_0." if model.num_experts else ""
                prefix += f"optimizer.distributed.dp_group_idx_{stage * tensor_size + rank}.gbuf_idx_{index}."
                prefix += "dtype_(torch.bfloat16, torch.float32).bucket_idx_0."
                for kind, stored in KINDS.items():
                    parts = [
                        part_of_rank(key, state[kind, key, layer], rank, tensor_size, is_gated=model.is_gated)
                        for key, layer in params
                        if ".mlp.experts." not in key
                    ]
                    tensors[prefix + stored] = flat(parts)
        if model.num_experts:
            tensors |= expert_buffers(model, state, stage, own, tensor_size, form)
    folder.mkdir()
    written, _ = write_chunks(folder, 0, [Chunk(key, (*t.shape,), (0,) * t.dim(), t) for key, t in tensors.items()])
    write_metadata(folder, written, common={}, checkpoint_id="0")
    described = asdict(model) | {"tensor_model_parallel_size": tensor_size, "pipeline_model_parallel_size": len(chunks)}
    content = {"args": argparse.Namespace(**described, bf16=True, **arguments), "iteration": 3, "optimizer": {}}
    torch.save(content, folder / "common.pt")
    return state


def expert_buffers(
    model: ModelConfig, state: State, stage: int, own: list[range], tensor_size: int, form: str
) -> dict[str, Tensor]:
    """Of the optimizer of two expert-parallel ranks, which has none for chunks without experts."""
    chunks = [rows for layers in own if (rows := [each for each in layers if each in model.expert_layers])]
    tensors = {}
    for index, rank, tensor_rank in product(range(len(chunks)), range(2), range(tensor_size)):
        prefix = f"chained_1.optimizer.distributed.dp_group_idx_{(stage * 2 + rank) * tensor_size + tensor_rank}."
        prefix += f"gbuf_idx_{index}.dtype_(torch.bfloat16, torch.float32).bucket_idx_0."
        for kind, stored in KINDS.items():
            parts: list[Tensor] = []
            for layer in chunks[index]:
                fc1, fc2 = (
                    state[kind, f"decoder.layers.mlp.experts.linear_{each}.weight", model.expert_layers.index(layer)]
                    for each in ("fc1", "fc2")
                )
                parts += expert_parts(fc1, fc2, rank, form, tensor_rank, tensor_size)
            tensors[prefix + stored] = flat(parts)
    return tensors


def ranges(*stages: list[int]) -> list[list[range]]:
    """The layers of stages of this many layers in each virtual stage; virtual stages alternate over the stages."""
    found: list[list[range]] = [[] for _ in stages]
    first = 0
    for virtual in range(len(stages[0])):
        for stage, sizes in enumerate(stages):
            found[stage].append(range(first, first + sizes[virtual]))
            first += sizes[virtual]
    return found


@pytest.mark.parametrize(
    ("style", "tensor_size", "chunks", "arguments"),
    [
        (GPT3_STYLE, 2, ranges([3], [3]), {}),
        (LLAMA_STYLE, 2, ranges([1, 2], [1, 2]), {LAYOUT: "Et|t|tt|ttL"}),
        (GPT3_STYLE, 1, ranges([1], [2], [3]), {FIRST: 1, "decoder_last_pipeline_num_layers": 3}),
        (LLAMA_STYLE, 1, ranges([2], [3]), {"account_for_embedding_in_pipeline_split": True}),
        (replace(LLAMA_STYLE, swiglu=False, quick_geglu=True), 2, ranges([4], [1]), {LAYOUT: "Et*4|tL"}),
        (replace(GPT3_STYLE, qk_layernorm=True), 2, ranges([1], [1]), {}),
    ],
    ids=["even", "virtual", "ends", "embedding", "layout", "head norms"],
)
def test_masters_and_moments_are_found(
    tmp_path: Path, style: ModelConfig, tensor_size: int, chunks: list[list[range]], arguments: dict[str, Any]
) -> None:
    model = replace(style, num_layers=sum(len(layers) for stage in chunks for layers in stage))
    state = save(tmp_path / "saved", model, chunks, tensor_size, **arguments)
    saved = TorchDist(tmp_path / "saved")
    assert saved.has_moments
    saved.check_moments()
    for (kind, key, layer), value in state.items():
        assert torch.equal(saved.read(kind, Name(key, layer)), value), (kind, key, layer)


@pytest.mark.parametrize("form", ["SequentialMLP", "TEGroupedMLP", "GroupedMLP"])
@pytest.mark.parametrize(("tensor_size", "chunks"), [(1, ranges([1, 1], [1, 1])), (2, ranges([1], [3]))])
def test_experts_have_buffers_of_their_own(
    tmp_path: Path, form: str, tensor_size: int, chunks: list[list[range]]
) -> None:
    """Of two expert-parallel ranks, with and without expert tensor parallelism. A stage or a chunk has none."""
    sizes = {
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": tensor_size,
        FIRST: sum(map(len, chunks[0])),
    }
    state = save(tmp_path / "saved", EXPERTS, chunks, tensor_size, form=form, **sizes)
    saved = TorchDist(tmp_path / "saved")
    saved.check_moments()
    for (kind, key, layer), value in state.items():
        assert torch.equal(saved.read(kind, Name(key, layer)), value), (kind, key, layer)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({LAYOUT: "Et|tttL"}, r"in an order that is not known \(.*\); save it again with"),
        ({LAYOUT: "Ettt|tL|"}, r"of unknown stages \(pipeline_model_parallel_layout\(.*"),
        ({LAYOUT: ["E"]}, r"unknown stages \(pipeline_model_parallel_layout cannot be read"),
        ({FIRST: 9}, "of unknown stages \\(num_layers\\(4\\) - decoder_first.*no-load-optim"),
    ],
)
def test_stages_that_are_others_than_the_arguments_say(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    save(tmp_path / "saved", replace(GPT3_STYLE, num_layers=4), ranges([3], [1]), 1, **arguments)
    with pytest.raises(CheckpointError, match=message):
        TorchDist(tmp_path / "saved").check_moments()
