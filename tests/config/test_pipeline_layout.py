"""The layers of every stage are megatron-core's for the same settings; what cannot be divided is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from megatron.core.parallel_state import RankGenerator
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from fp8_megatron.config.checks import ConfigError, check_config
from fp8_megatron.config.io import parse_config
from fp8_megatron.config.pipeline_layout import PipelineLayout, pipeline_layout
from fp8_megatron.config.schema import ParallelConfig


def _ours(num_layers: int, **settings: Any) -> PipelineLayout | None:
    try:
        return pipeline_layout(ParallelConfig(**settings), num_layers)
    except ValueError:
        return None


def _megatrons(num_layers: int, pp: int, virtual: int | None, **settings: Any) -> list[list[range]] | None:
    """What megatron-core builds. None if it refuses; also if its stages do not add up to the model, which it does not
    notice, or if it divides by zero (two stages, both of a given size, with virtual ones)."""
    try:
        config = TransformerConfig(
            num_layers=num_layers,
            hidden_size=64,
            num_attention_heads=4,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=virtual,
            pipeline_dtype=torch.bfloat16,
            **settings,
        )
        chunks = []
        for stage in range(pp):
            chunks.append([])
            for index in range(virtual or 1):
                place = (config, index if virtual else None, stage)
                first = get_transformer_layer_offset(*place)
                chunks[-1].append(range(first, first + get_num_layers_to_build(*place)))
    except (AssertionError, ValueError, ZeroDivisionError):
        return None
    return chunks if sum(len(chunk) for stage in chunks for chunk in stage) == num_layers else None


@pytest.mark.parametrize("pp", [2, 3, 4])
def test_layers_are_megatron_cores(pp: int) -> None:
    compared = 0
    for num_layers, first, last, embedding, loss, virtual in itertools.product(
        range(4, 13), (None, 1, 2), (None, 2, 3), (False, True), (False, True), (None, 2)
    ):
        accounted = {"account_for_embedding_in_pipeline_split": embedding, "account_for_loss_in_pipeline_split": loss}
        ours = _ours(
            num_layers,
            pipeline_model_parallel_size=pp,
            decoder_first_pipeline_num_layers=first,
            decoder_last_pipeline_num_layers=last,
            num_virtual_stages_per_pipeline_rank=virtual,
            **accounted,
        )
        theirs = _megatrons(
            num_layers,
            pp,
            virtual,
            num_layers_in_first_pipeline_stage=first,
            num_layers_in_last_pipeline_stage=last,
            **accounted,
        )
        if theirs is None and ours is not None:
            assert pp == 2 and first and last and virtual  # divides by zero there
            continue
        assert (ours is None) == (theirs is None), (num_layers, first, last, accounted, virtual)
        if ours is not None and theirs is not None:
            assert [list(map(len, stage)) for stage in ours.chunks] == [list(map(len, stage)) for stage in theirs]
            assert [[*map(list, stage)] for stage in ours.chunks] == [[*map(list, stage)] for stage in theirs]
            compared += 1
    assert compared > 20


@pytest.mark.parametrize("text", ["Ettt|tt|t|ttL", "E,t*3|(tt|)*6,tL", "Et|(t|t|)*3L", "E|tttttt|L|", "E(t|tt|)*2,ttL"])
def test_the_language_is_megatron_cores(text: str) -> None:
    theirs = PipelineParallelLayerLayout.parse_str_to_list(text)
    counts = [[kind.name for kind in row].count("decoder") for row in theirs]
    ours = _ours(sum(counts), pipeline_model_parallel_size=len(counts), pipeline_model_parallel_layout=text)
    if not text.endswith("L"):
        assert ours is None  # megatron-core's own check refuses it too: the loss is last
        return
    assert ours is not None and [len(layers) for layers in ours.rows()] == counts
    again = _ours(sum(counts), pipeline_model_parallel_size=len(counts), pipeline_model_parallel_layout=ours.text)
    assert again == ours


def test_more_stages_than_ranks_are_virtual() -> None:
    layout = _ours(6, pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et|tt|tt|tL")
    assert layout is not None and layout.virtual_size == 2 and not layout.is_even
    assert layout.chunks == ((range(1), range(3, 5)), (range(1, 3), range(5, 6)))
    assert layout.layers_of(1) == [1, 2, 5]


@pytest.mark.parametrize("flag", ["", " --use-tp-pp-dp-mapping"])
@pytest.mark.parametrize("sizes", [(2, 1, 2), (1, 2, 2), (2, 2, 4), (1, 1, 8)])
def test_ranks_are_numbered_as_megatron_core_numbers_them(sizes: tuple[int, int, int], flag: str) -> None:
    tp, cp, pp = sizes
    names = ("tensor-model-parallel", "context-parallel", "pipeline-model-parallel")
    flags = [f"--{name}-size {size}" for name, size in zip(names, sizes, strict=True)]
    parallel = parse_config(f"{' '.join(flags)}{flag}".split()).parallel
    world_size = 32
    dp = world_size // (tp * cp * pp)
    groups = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=parallel.rank_order).get_ranks("pp")
    assert len(groups) == tp * cp * dp
    for group in groups:
        assert [parallel.stage_of(rank, world_size) for rank in group] == list(range(pp))
    assert [parallel.first_rank_of(stage, world_size) for stage in range(pp)] == groups[0]


PP2 = "--pipeline-model-parallel-size 2 "
PP4 = "--pipeline-model-parallel-size 4 --global-batch-size 32 "
VIRTUAL = "--num-virtual-stages-per-pipeline-rank 2 "
GROUP = "--microbatch-group-size-per-virtual-pipeline-stage "


@pytest.mark.parametrize(
    ("world_size", "flags", "said"),
    [
        (1, "--decoder-first-pipeline-num-layers 3", "needs pipeline stages, but pipeline_model_parallel_size(1)"),
        (4, PP4 + "--decoder-first-pipeline-num-layers 4", "num_layers(24) - decoder_first_pipeline_num_layers(4) ="),
        (2, PP2 + "--decoder-first-pipeline-num-layers 24", "= 0 for the other stages, 1"),
        (
            2,
            PP2 + "--decoder-first-pipeline-num-layers 10 --decoder-last-pipeline-num-layers 13",
            "decoder_last_pipeline_num_layers(13) make 23 layers of two stages, but num_layers is 24; drop one",
        ),
        (4, PP4 + "--account-for-embedding-in-pipeline-split", "(num_layers(24) + the embedding) %"),
        (
            2,
            PP2 + "--decoder-first-pipeline-num-layers 10 --account-for-loss-in-pipeline-split",
            "decoder_first_pipeline_num_layers(10) and account_for_loss_in_pipeline_split both divide the layers",
        ),
        (
            2,
            PP2 + "--decoder-first-pipeline-num-layers 10 --num-layers-per-virtual-pipeline-stage 2",
            "give --num-virtual-stages-per-pipeline-rank instead of the former",
        ),
        (2, PP2 + VIRTUAL + "--num-layers-per-virtual-pipeline-stage 6", "say the same; drop one"),
        (
            2,
            PP2 + VIRTUAL + "--decoder-first-pipeline-num-layers 9 --global-batch-size 8",
            "num_virtual_stages_per_pipeline_rank(2) does not divide the 9 layers of stage 0",
        ),
        (1, VIRTUAL, "num_virtual_stages_per_pipeline_rank(2) needs pipeline stages"),
        (4, PP4 + VIRTUAL + "--num-layers 8 " + GROUP + "3", "(3) is not between pipeline_model_parallel_size(4)"),
        (4, PP4 + VIRTUAL + "--num-layers 8 " + GROUP + "6", "(6) leaves 2 of 8 micro-batches to the last group"),
        (4, PP4 + VIRTUAL + "--num-layers 8 --global-batch-size 24", "in groups of pipeline_model_parallel_size(4)"),
        (2, PP2 + "--pipeline-model-parallel-layout Et*12|t*12m|L", "'m' is multi-token prediction, which there is"),
        (2, PP2 + "--pipeline-model-parallel-layout Et*12|x*12L", "'x' is no kind of layer; use E"),
        (2, PP2 + "--pipeline-model-parallel-layout Et*12|t*11|L", "has 3 stages, which pipeline_model_parallel_size"),
        (2, PP2 + "--pipeline-model-parallel-layout Et*12|t*11L", "has 23 layers (t), but num_layers is 24"),
        (4, PP4 + "--pipeline-model-parallel-layout E|t*12||t*12L", "E|t*12||t*12L leaves nothing for stage 2"),
        (2, PP2 + "--pipeline-model-parallel-layout t*12|Et*12L", "the first stage begins with the only E"),
        (2, PP2 + "--pipeline-model-parallel-layout Et*12|t*999999999L", "is longer than a model of 100000 layers"),
        (
            2,
            PP2 + "--pipeline-model-parallel-layout Et*12|t*12L --decoder-last-pipeline-num-layers 12",
            "and decoder_last_pipeline_num_layers(12) both divide the layers",
        ),
        (
            2,
            PP2 + "--pipeline-model-parallel-layout Et*12|t*12L --num-virtual-stages-per-pipeline-rank 3",
            "num_virtual_stages_per_pipeline_rank(3), but pipeline_model_parallel_layout has 2 stages",
        ),
        (
            2,
            PP2 + "--decoder-first-pipeline-num-layers 10 --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 5",
            "recompute_num_layers(5) does not divide the 14 layers of a pipeline stage",
        ),
    ],
)
def test_what_cannot_be_divided(world_size: int, flags: str, said: str) -> None:
    config = parse_config(["--mock-data", "--vocab-size", "512", *flags.split()])
    with pytest.raises(ConfigError) as error:
        check_config(config, world_size)
    assert len(str(error.value).splitlines()) == 1 and said in str(error.value), str(error.value)


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (4, PP4 + "--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 3"),
        (
            4,
            PP4 + "--num-layers 30 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
            "--num-layers-per-virtual-pipeline-stage 2",
        ),
        (4, PP4 + VIRTUAL + GROUP + "8"),
        (2, PP2 + "--pipeline-model-parallel-layout Et*11|t*13L --num-virtual-stages-per-pipeline-rank 1"),
        (1, "--pipeline-model-parallel-layout Et*24L"),
        (2, PP2 + "--pipeline-model-parallel-layout E|t*12||t*12L --global-batch-size 8"),
    ],
)
def test_what_can_be_divided(world_size: int, flags: str) -> None:
    check_config(parse_config(["--mock-data", "--vocab-size", "512", *flags.split()]), world_size)
