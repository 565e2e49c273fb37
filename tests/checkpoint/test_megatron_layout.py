"""The flat buffers of a distributed optimizer, laid out here by Megatron's rules, are read back into parameters."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from fp8_megatron.checkpoint.megatron_layout import Name
from fp8_megatron.checkpoint.megatron_torch_dist import TorchDist
from fp8_megatron.checkpoint.torch_dist import Chunk, write_chunks, write_metadata

HIDDEN, FFN, ROWS, LAYERS = 48, 96, 64, 4
#: Parameters of a layer in the order of Transformer Engine's modules: name, shape, and the axis that ranks share.
LAYER = (
    ("self_attention.linear_proj.weight", (HIDDEN, HIDDEN), 1),
    ("self_attention.linear_proj.bias", (HIDDEN,), None),
    ("self_attention.linear_qkv.layer_norm_weight", (HIDDEN,), None),
    ("self_attention.linear_qkv.layer_norm_bias", (HIDDEN,), None),
    ("self_attention.linear_qkv.weight", (3 * HIDDEN, HIDDEN), 0),
    ("self_attention.linear_qkv.bias", (3 * HIDDEN,), 0),
    ("mlp.linear_fc1.layer_norm_weight", (HIDDEN,), None),
    ("mlp.linear_fc1.layer_norm_bias", (HIDDEN,), None),
    ("mlp.linear_fc1.weight", (FFN, HIDDEN), 0),
    ("mlp.linear_fc1.bias", (FFN,), 0),
    ("mlp.linear_fc2.weight", (HIDDEN, FFN), 1),
    ("mlp.linear_fc2.bias", (HIDDEN,), None),
)
AROUND = {
    "embedding.word_embeddings.weight": ((ROWS, HIDDEN), 0),
    "embedding.position_embeddings.weight": ((32, HIDDEN), None),
    "decoder.final_layernorm.weight": ((HIDDEN,), None),
    "decoder.final_layernorm.bias": ((HIDDEN,), None),
}
KINDS = {"master": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def whole_model() -> dict[str, dict[str, Tensor]]:
    """State by kind and key, layers stacked; masters are away from what BF16 can hold."""
    shapes = {f"decoder.layers.{end}": (LAYERS, *shape) for end, shape, _ in LAYER}
    shapes |= {key: shape for key, (shape, _) in AROUND.items()}
    draw = torch.Generator().manual_seed(0)
    return {kind: {key: torch.randn(shape, generator=draw) for key, shape in shapes.items()} for kind in KINDS}


def stage_parameters(stage: int) -> list[tuple[str, int | None, int | None]]:
    """(key, layer, axis) of a stage of two layers, in order; the last one has a copy of the embedding as its head."""
    names = list(AROUND)
    found = [(key, None, AROUND[key][1]) for key in names[:2]] if stage == 0 else []
    found += [(f"decoder.layers.{end}", layer, axis) for layer in (2 * stage, 2 * stage + 1) for end, _, axis in LAYER]
    if stage == 1:
        found += [(key, None, None) for key in names[2:]] + [(names[0], None, 0)]
    return found


def save(folder: Path, model: dict[str, dict[str, Tensor]], *, swapped: bool = False) -> None:
    """Two tensor-parallel ranks by two stages. A bucket ends with the embedding copy and after each tenth parameter."""
    chunks = [Chunk(key, tuple(v.shape), (0,) * v.dim(), v.bfloat16()) for key, v in model["master"].items()]
    for rank in range(2):
        for stage in range(2):
            order = stage_parameters(stage)
            if swapped:
                order[3], order[8] = order[8], order[3]
            buckets: list[list[dict[str, Tensor]]] = [[]]
            for count, (key, layer, axis) in enumerate(reversed(order)):
                state = {kind: model[kind][key] if layer is None else model[kind][key][layer] for kind in KINDS}
                buckets[-1].append({kind: v if axis is None else v.chunk(2, axis)[rank] for kind, v in state.items()})
                if count % 10 == 9 or (stage == 1 and count == 0):
                    buckets.append([])
            for index, bucket in enumerate(filter(None, buckets)):
                for kind, name in KINDS.items():
                    flat = torch.empty(0)
                    for state in bucket:
                        padding = torch.full((-flat.numel() % 64,), float("nan"))
                        flat = torch.cat([flat, padding, state[kind].reshape(-1)])
                    key = f"optimizer.distributed.dp_group_idx_{2 * stage + rank}.gbuf_idx_0.dtype_x.bucket_idx_{index}"
                    chunks.append(Chunk(f"{key}.{name}", (flat.numel(),), (0,), flat))
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    common = {"args": argparse.Namespace(**sizes, bf16=True, consumed_train_samples=8), "iteration": 2}
    folder.mkdir()
    write_metadata(folder, write_chunks(folder, 0, chunks)[0], common=common, checkpoint_id="x")


def test_transformer_engines_order_over_ranks_and_stages(tmp_path: Path) -> None:
    model = whole_model()
    save(tmp_path / "a", model)
    saved = TorchDist(tmp_path / "a")
    saved.check_moments()
    for kind, states in model.items():
        for key, value in states.items():
            for layer in range(LAYERS) if key.startswith("decoder.layers.") else (None,):
                expected = value if layer is None else value[layer]
                assert torch.equal(saved.read(kind, Name(key, layer)), expected), (kind, key, layer)
