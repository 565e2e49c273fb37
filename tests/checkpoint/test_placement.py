"""Keys, shapes and offsets are megatron-core's own, and rectangles cover a parameter exactly once."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories

from fp8_megatron.checkpoint.run_state import _extra_state
from fp8_megatron.config.schema import ModelConfig, ParallelConfig, PrecisionConfig
from tests.harness.ranks import RankPool
from tests.harness.tiny_checkpoint import tiny_resumable
from tests.harness.tiny_gpt import GPT3_STYLE, LLAMA_STYLE, tiny_config

LAYOUTS = {
    "one": (1, ParallelConfig()),
    "tp2": (2, ParallelConfig(tensor_model_parallel_size=2)),
    "pp2_vpp2": (2, ParallelConfig(pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=1)),
}
#: (shape of the whole tensor, offset, shape) of each of a rank's parts, layer axis included.
Parts = dict[str, set[tuple[Any, ...]]]


def _parts(model: ModelConfig, parallel: ParallelConfig) -> tuple[Parts, Parts, set[str], set[str]]:
    """What megatron-core's ``sharded_state_dict`` of the same model says, and what we say; and its empty objects."""
    config = tiny_config(model, parallel=parallel, precision=PrecisionConfig(precision="bf16"))
    with tiny_resumable(config, 2) as (gpt, state):
        theirs: Parts = defaultdict(set)
        their_objects = set()
        for chunk in gpt.chunks:
            sharded = chunk.module.sharded_state_dict()
            apply_factories(sharded)
            for entry in nested_values(sharded):
                if isinstance(entry, ShardedTensor):
                    shape = (1,) * entry.prepend_axis_num + tuple(entry.local_shape)
                    theirs[entry.key].add((tuple(entry.global_shape), tuple(entry.global_offset), shape))
                elif isinstance(entry, ShardedObject):
                    their_objects.add(entry.unique_key)
        ours: Parts = defaultdict(set)
        our_objects = set()
        for _, slot, placement in state.slots():
            for part in placement.region.rectangles(0, slot.numel):
                ours[placement.key].add((placement.region.global_shape, part.offset, part.sizes))
            our_objects |= set(_extra_state(placement))
        return dict(ours), dict(theirs), our_objects, their_objects


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("model", [GPT3_STYLE, LLAMA_STYLE], ids=["gpt3", "llama"])
def test_places_are_megatrons(ranks: RankPool, model: ModelConfig, layout: str) -> None:
    num_ranks, parallel = LAYOUTS[layout]
    for ours, theirs, our_objects, their_objects in ranks.run(
        _parts, replace(model, num_layers=4), parallel, num_ranks=num_ranks
    ):
        assert ours == theirs
        assert our_objects == their_objects and len(their_objects) >= 4
        if parallel.pipeline_model_parallel_size == 1:
            assert ours["decoder.layers.mlp.linear_fc1.weight"]
