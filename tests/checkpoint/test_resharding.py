"""Any layout and level loads the checkpoint of any other: the same values, and the same losses within tolerance.

Values. Another number of replicas or pipeline stages keeps every scale block: masters and moments are bitwise equal.
Tensor parallelism cuts blocks elsewhere, and another level has other storage: masters in FP16 with a scale a block then
lose at most 2⁻¹² of a value, or 2⁻²⁵ of the largest of its block.

Losses. Two steps go on from the same state on the same batches, so what `tests/parallel/test_layouts.py` says of first
losses holds: 2 · 10⁻⁴ under bf16 and 10⁻³ under FP8 where layers are sharded otherwise, and another level computes
otherwise by as much as FP8's rounding; a few times that in the second step, which also has other gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8_megatron.checkpoint import run_state
from fp8_megatron.checkpoint.loading import load_checkpoint
from fp8_megatron.checkpoint.run_state import Progress
from fp8_megatron.checkpoint.saving import CheckpointWriter
from fp8_megatron.config.schema import Config, ParallelConfig, PrecisionConfig
from fp8_megatron.dtypes import StorageDtype
from tests.harness.pairs import EVERY_PAIR
from tests.harness.ranks import RankPool
from tests.harness.tiny_checkpoint import TinyRun, run_tiny_on_a_rank, tiny_resumable, train_steps
from tests.harness.tiny_gpt import GPT3_STYLE, LLAMA_STYLE, tiny_config, tiny_optimizer

#: Buckets smaller than a space, so that every parameter is in several ranks' shards.
BUCKETS = ParallelConfig(ddp_bucket_size=1 << 15)
LAYOUTS = {
    "one": (1, BUCKETS),
    "tp2": (2, replace(BUCKETS, tensor_model_parallel_size=2, sequence_parallel=True)),
    "pp2": (2, replace(BUCKETS, pipeline_model_parallel_size=2)),
    "dp2": (2, BUCKETS),
    "tp2_dp2": (4, replace(BUCKETS, tensor_model_parallel_size=2, sequence_parallel=True)),
    "pp2_vpp2": (2, replace(BUCKETS, pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=1)),
    "dp4": (4, BUCKETS),
    "ep2": (2, replace(BUCKETS, expert_model_parallel_size=2)),
    "ep4": (4, replace(BUCKETS, expert_model_parallel_size=4)),
    "ep2_dp2": (4, replace(BUCKETS, expert_model_parallel_size=2)),
    "pp2_first": (2, replace(BUCKETS, pipeline_model_parallel_size=2, decoder_first_pipeline_num_layers=1)),
    "pp2_uneven_vpp2": (
        2,
        replace(BUCKETS, pipeline_model_parallel_size=2, pipeline_model_parallel_layout="E|tt|t|tL"),
    ),
    "pp2_empty": (2, replace(BUCKETS, pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Ett||t|tL")),
}
LEVELS = {
    "bf16": PrecisionConfig(precision="bf16"),
    "O1": PrecisionConfig(opt_level="O1"),
    "O2": PrecisionConfig(opt_level="O2"),
    "O3": PrecisionConfig(opt_level="O3"),
}
COMPANDED = PrecisionConfig(exp_avg_dtype=StorageDtype.INT8, exp_avg_sq_dtype=StorageDtype.UINT8)
DELAYED = PrecisionConfig(fp8_recipe="delayed", fp8_lm_head=True)
SPLIT = replace(COMPANDED, main_params_dtype=StorageDtype.SPLIT)
#: A layer without experts, three with them, and routers that keep a bias.
EXPERTS = replace(
    LLAMA_STYLE,
    num_layers=4,
    num_experts=4,
    moe_layer_freq="[0]*1+[1]*3",
    moe_router_topk=2,
    moe_ffn_hidden_size=64,
    moe_shared_expert_intermediate_size=64,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
)
#: Biases of experts and of their router, and sinks.
GPT_OSS = replace(
    LLAMA_STYLE,
    num_experts=4,
    moe_ffn_hidden_size=64,
    disable_bias_linear=False,
    softmax_type="learnable",
)
MODELS = {
    "gpt_oss": GPT_OSS,
    "gpt3": replace(GPT3_STYLE, num_layers=4),
    "llama": replace(LLAMA_STYLE, num_layers=4),
    "experts": EXPERTS,
}
NUM_MICRO_BATCHES = 4


def config_of(model: str, layout: str, precision: PrecisionConfig) -> Config:
    return tiny_config(
        MODELS[model], parallel=LAYOUTS[layout][1], precision=precision, optimizer=tiny_optimizer(lr=5e-4)
    )


def run(ranks: RankPool, layout: str, config: Config, num_steps: int, load: Path | None, save: Path | None) -> TinyRun:
    runs = ranks.run(
        run_tiny_on_a_rank, config, num_steps, load, save, None, NUM_MICRO_BATCHES, num_ranks=LAYOUTS[layout][0]
    )
    assert all(run.losses == runs[0].losses for run in runs)
    return runs[0]


@dataclass(frozen=True)
class Gaps:
    """Largest differences between what was saved and what was loaded, and between the losses that follow."""

    losses: float
    state: dict[str, float]
    """By kind: largest difference of an element over the largest element of its tensor."""


def gaps_between(loaded: TinyRun, saved: TinyRun, losses: list[float]) -> Gaps:
    state: dict[str, float] = {}
    assert loaded.start.keys() == saved.end.keys()
    for name, value in saved.end.items():
        kind = name.partition("/")[0]
        gap = ((loaded.start[name] - value).abs().max() / value.abs().max().clamp_min(1e-30)).item()
        state[kind] = max(state.get(kind, 0.0), gap)
    return Gaps(max(abs(a - b) for a, b in zip(loaded.losses, losses, strict=True)), state)


def keeps_blocks(saved: str, loaded: str) -> bool:
    return saved.startswith("tp2") == loaded.startswith("tp2")


def check(ranks: RankPool, folder: Path, model: str, source: tuple[str, str], targets: list[tuple[str, str]]) -> None:
    """Save two steps under one layout and level, load them under others."""
    layout, level = source
    config = config_of(model, layout, LEVELS[level])
    saved = run(ranks, layout, config, 2, None, folder)
    expected = run(ranks, layout, config, 2, folder, None).losses
    for target_layout, target_level in targets:
        config = config_of(model, target_layout, LEVELS[target_level])
        loaded = run(ranks, target_layout, config, 2, folder, None)
        assert loaded.progress.iteration == 2 and loaded.progress.consumed_samples == 2 * NUM_MICRO_BATCHES
        gaps = gaps_between(loaded, saved, expected)
        print(f"{model} {layout} {level} -> {target_layout} {target_level}: {gaps}")
        same_level = level == target_level
        if same_level and (keeps_blocks(layout, target_layout) or level == "bf16"):
            assert gaps.state == dict.fromkeys(gaps.state, 0.0), (source, target_layout)
        assert gaps.state["master"] < 2.0**-11
        assert gaps.losses < (2e-3 if level == target_level == "bf16" else 1e-2), (source, target_layout, gaps)


@pytest.mark.parametrize(
    ("model", "source", "targets"),
    [
        ("gpt3", ("tp2_dp2", "O3"), [("pp2", "O3"), ("dp2", "O1")]),
        ("gpt3", ("pp2_vpp2", "bf16"), [("tp2_dp2", "bf16")]),
        ("gpt3", ("pp2_first", "O3"), [("one", "O3"), ("pp2", "O3"), ("pp2_uneven_vpp2", "O3")]),
        ("experts", ("ep2_dp2", "O3"), [("one", "O3"), ("ep4", "O3"), ("ep2", "O2")]),
        ("experts", ("ep4", "O2"), [("pp2", "O2"), ("ep2_dp2", "O2")]),
        ("gpt_oss", ("ep2_dp2", "O3"), [("ep4", "O3"), ("one", "O3")]),
        pytest.param("gpt3", ("pp2_empty", "bf16"), [("pp2_first", "bf16")], marks=pytest.mark.slow),
        # What `test_resume` has of other replicas, and the case above of other stages, need not be run each time.
        pytest.param("llama", ("dp2", "O2"), [("tp2", "O2"), ("pp2", "bf16")], marks=pytest.mark.slow),
    ],
    ids=["tp2_dp2", "pp2_vpp2", "pp2_first", "ep2_dp2", "ep4", "biases", "pp2_empty", "dp2"],
)
def test_another_layout_takes_over(
    ranks: RankPool, tmp_path: Path, model: str, source: tuple[str, str], targets: list[tuple[str, str]]
) -> None:
    check(ranks, tmp_path, model, source, targets)


Columns = dict[tuple[str, str, int], tuple[Tensor, float]]


@dataclass(frozen=True)
class DelayedRun:
    """Delayed scales of this rank at both ends, and the gradient norms of the steps between.

    Attributes:
        start, end: (layer, role, number among these) → amaxes [length] and scale of each slot in use.
    """

    start: Columns
    end: Columns
    norms: list[float]


def _delayed_on_a_rank(
    layout: str, num_steps: int, load: Path | None, save: Path | None, names_slots: bool = True
) -> DelayedRun:
    """Train under delayed scaling. Without `names_slots` the checkpoint is that of an earlier version."""
    config = config_of("gpt3", layout, DELAYED)
    with tiny_resumable(config, NUM_MICRO_BATCHES) as (gpt, state), pytest.MonkeyPatch.context() as patch:
        progress = Progress() if load is None else load_checkpoint(load, state)
        assert progress is not None
        step, norms = gpt.optimizer.step, []
        patch.setattr(gpt.optimizer, "step", lambda: norms.append(step().item()))

        def columns() -> Columns:
            found: Columns = {}
            for history in state.histories:
                if history is None or not history.is_warm:
                    continue
                values = history.state_dict()
                for slot, (_, name) in enumerate(history._names):
                    number = sum((name.layer, name.role.name) == key[:2] for key in found)
                    found[name.layer, name.role.name, number] = (
                        values["history"][:, slot].clone(),
                        values["scale"][slot].item(),
                    )
            return found

        start = columns()
        train_steps(gpt, config, progress.iteration, num_steps, NUM_MICRO_BATCHES)
        if save is not None:
            tensors_of = run_state.rank_tensors_of
            if not names_slots:
                patch.setattr(
                    run_state,
                    "rank_tensors_of",
                    lambda state: {k: v for k, v in tensors_of(state).items() if not k.endswith(run_state.SLOTS)},
                )
            writer = CheckpointWriter(save, gpt.topology)
            writer.save(state, Progress(num_steps, num_steps * NUM_MICRO_BATCHES))
            writer.finish()
        return DelayedRun(start, columns(), norms)


def run_delayed(ranks: RankPool, layout: str, *args: Any) -> DelayedRun:
    """`_delayed_on_a_rank` of all ranks together."""
    runs = ranks.run(_delayed_on_a_rank, layout, *args, num_ranks=LAYOUTS[layout][0])
    start, end = (
        {key: value for run in runs for key, value in getattr(run, name).items()} for name in ("start", "end")
    )
    return DelayedRun(start, end, runs[0].norms)


@pytest.mark.parametrize(
    ("source", "targets"), [("one", ["pp2", "pp2_uneven_vpp2"]), ("pp2_vpp2", ["one", "pp2_first", "tp2"])]
)
def test_delayed_scales_go_with_their_layers(ranks: RankPool, tmp_path: Path, source: str, targets: list[str]) -> None:
    """To other stages, to the bit. So the steps after a resume are those of a run that went on. Where weights are cut
    otherwise they are cast anew, which moves a gradient's norm by up to 0.3%.
    """
    saved = run_delayed(ranks, source, 3, None, tmp_path)
    expected = run_delayed(ranks, source, 3, tmp_path, None)
    assert len(saved.end) == 4 * 4 * 3 + 1 and expected.start.keys() == saved.end.keys()
    for target in targets:
        resumed = run_delayed(ranks, target, 3, tmp_path, None)
        assert resumed.start.keys() == saved.end.keys(), target
        for name, (amaxes, scale) in saved.end.items():
            assert torch.equal(resumed.start[name][0], amaxes) and resumed.start[name][1] == scale, (target, name)
        gaps = [abs(own / theirs - 1) for own, theirs in zip(resumed.norms, expected.norms, strict=True)]
        print(f"{source} -> {target}: gradient norms differ by {gaps}")
        assert gaps[0] < (1e-4 if keeps_blocks(source, target) else 5e-3) and max(gaps) < 1e-2, (target, gaps)


def test_delayed_scales_without_names_fit_the_same_stages(ranks: RankPool, tmp_path: Path) -> None:
    saved = run_delayed(ranks, "pp2", 2, None, tmp_path, False)
    assert saved.end
    assert run_delayed(ranks, "pp2", 0, tmp_path, None).start.keys() == saved.end.keys()
    assert run_delayed(ranks, "one", 0, tmp_path, None).start == {}


MATRIX = ["tp2", "pp2", "dp2", "tp2_dp2"]


def targets_of(model: str, source: str, level: str) -> list[tuple[str, str]]:
    """Another layout at the level saved (of other models than gpt3, which have one level a source, all others), two
    other levels under some layouts, and a layout that is never saved. Over the sources that are run each layout meets
    each other, and each level each other. With EVERY_PAIR=1 in the environment, all of them."""
    others = [layout for layout in MATRIX if layout != source]
    beside = ["one", "pp2_vpp2", "dp4"]
    if EVERY_PAIR:
        levels = list(LEVELS) if model == "gpt3" else [level]
        pairs = [(layout, other) for layout in MATRIX for other in levels if (layout, other) != (source, level)]
        return [*pairs, *((layout, level) for layout in beside)]
    row, column = MATRIX.index(source), list(LEVELS).index(level)
    same = [(layout, level) for layout in others]
    if model == "gpt3":
        levels = [other for other in LEVELS if other != level]
        crossed = [(MATRIX[(row + column // 2 + 3 + turn) % 4], levels[(row // 2 + turn) % 3]) for turn in range(2)]
        same = [same[(row + column // 2) % 3], *crossed]
    return [*same, (beside[(row + column) % len(beside)], level)]


def is_run(model: str, row: int, column: int) -> bool:
    """Whether a level is saved under a layout: of gpt3 half of them, of the others one a layout."""
    return EVERY_PAIR or ((row + column) % 2 == 0 if model == "gpt3" else row == column)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "source", "level"),
    [
        (model, source, level)
        for model in MODELS
        if model != "gpt_oss"  # biases are not cut over ranks
        for row, source in enumerate(MATRIX)
        for column, level in enumerate(LEVELS)
        if is_run(model, row, column)
    ],
)
def test_matrix_of_layouts_and_levels(ranks: RankPool, tmp_path: Path, model: str, source: str, level: str) -> None:
    check(ranks, tmp_path, model, (source, level), targets_of(model, source, level))
