"""Learning rate, weight decay, batch and data of each step, against megatron-core's own classes in Megatron's loop."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from fp8_megatron.checkpoint.files import saved_iterations
from fp8_megatron.checkpoint.run_state import Progress
from fp8_megatron.config.checks import ConfigError, check_config
from fp8_megatron.config.io import parse_config
from fp8_megatron.config.learning_rate import schedule_notes
from fp8_megatron.data.splits import process_group
from fp8_megatron.reporting.metrics_file import METRICS_FILE, read_rows
from fp8_megatron.training import training_run
from fp8_megatron.training.schedule import RunSchedule
from fp8_megatron.training.stopping import StopReason
from fp8_megatron.training.trainer import Trainer
from tests.harness.megatrons_ramp import MegatronsRamp, needs_megatrons_ramp
from tests.harness.ranks import RankError, RankPool
from tests.harness.runs import LLAMA_STYLE_FLAGS, tiny_flags
from tests.harness.token_files import blend_config, write_token_files

Step = tuple[float, float, int]


def groups() -> SimpleNamespace:
    """An optimizer with matrices, vectors and an embedding of its own rate."""
    keys = {"lr": 0.0, "max_lr": 1e-3, "min_lr": 1e-4, "weight_decay": 0.0, "wd_mult": 1.0}
    keys |= {"is_decoupled_lr": False, "lr_mult": 1.0}
    return SimpleNamespace(param_groups=[dict(keys), keys | {"wd_mult": 0.0}])


def megatrons_steps(
    num_steps: int, *, batches: Any, scheduler: OptimizerParamScheduler, count: int | None = None
) -> Iterator[Step]:
    """(learning rate, weight decay, batch) of each step of Megatron's training loop.

    Args:
        count: what a step counts for in the schedule; None: its batch, as in Megatron.
    """
    consumed = 0
    for _ in range(num_steps):
        batches.update(consumed, consistency_check=True)
        group = scheduler.optimizer.param_groups[0]
        batch = batches.get_current_global_batch_size()
        yield group["lr"], group["weight_decay"], batch
        scheduler.step(count or batch)
        consumed += batch


def our_steps(flags: str, num_steps: int, world_size: int = 1) -> Iterator[Step]:
    config = parse_config(["--mock-data", "--vocab-size", "64", "--seq-length", "128", *flags.split()])
    check_config(config, world_size)
    optimizer, batches, consumed = groups(), config.batch_schedule(world_size), 0
    for group in optimizer.param_groups:
        group["max_lr"], group["min_lr"] = config.optimizer.lr, config.optimizer.min_lr
    schedule = RunSchedule(optimizer, config, world_size)
    for _ in range(num_steps):
        batch = batches.batch_size(consumed)
        yield optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"], batch
        schedule.step(batch)
        consumed += batch


#: Flags, and what Megatron makes of them: start, increment and samples of a ramp; then the scheduler's arguments.
SCHEDULES: dict[str, tuple[str, tuple[int, int, int] | None, dict[str, Any]]] = {
    "samples": (
        "--train-samples 960 --lr-decay-samples 800 --lr-warmup-samples 100 --lr-decay-style cosine",
        None,
        {"lr_warmup_steps": 100, "lr_decay_steps": 800, "wd_incr_steps": 960, "lr_decay_style": "cosine"},
    ),
    "fraction": (
        "--train-samples 960 --lr-warmup-fraction 0.033 --lr-decay-style linear",
        None,
        {"lr_warmup_steps": 0.033 * 960, "lr_decay_steps": 960, "wd_incr_steps": 960, "lr_decay_style": "linear"},
    ),
    "ramp": (
        "--train-samples 960 --rampup-batch-size 4 4 333 --lr-warmup-samples 64 --lr-decay-style cosine",
        (4, 4, 333),
        {"lr_warmup_steps": 64, "lr_decay_steps": 960, "wd_incr_steps": 960, "lr_decay_style": "cosine"},
    ),
    "ramp in steps": (
        "--train-iters 60 --rampup-batch-size 4 4 333 --lr-warmup-fraction 0.1 --lr-decay-style linear",
        (4, 4, 333),
        {
            "lr_warmup_steps": 0.1 * 60 * 12,
            "lr_decay_steps": 60 * 12,
            "wd_incr_steps": 60 * 12,
            "lr_decay_style": "linear",
        },
    ),
    "steps": (
        "--train-iters 60 --lr-warmup-iters 7 --lr-decay-iters 50 --lr-decay-style cosine",
        None,
        {"lr_warmup_steps": 7 * 12, "lr_decay_steps": 50 * 12, "wd_incr_steps": 60 * 12, "lr_decay_style": "cosine"},
    ),
    "inverse square root": (
        "--train-samples 960 --lr-warmup-samples 120 --lr-decay-style inverse-square-root",
        None,
        {
            "lr_warmup_steps": 120,
            "lr_decay_steps": 960,
            "wd_incr_steps": 960,
            "lr_decay_style": "inverse-square-root",
        },
    ),
    "wsd and growing weight decay": (
        "--train-samples 960 --lr-warmup-samples 96 --lr-decay-style WSD --lr-wsd-decay-samples 240 "
        "--lr-wsd-decay-style minus_sqrt --weight-decay-incr-style cosine --start-weight-decay 0.01 "
        "--end-weight-decay 0.2",
        None,
        {
            "lr_warmup_steps": 96,
            "lr_decay_steps": 960,
            "wd_incr_steps": 960,
            "lr_decay_style": "WSD",
            "wsd_decay_steps": 240,
            "lr_wsd_decay_style": "minus_sqrt",
            "wd_incr_style": "cosine",
            "start_wd": 0.01,
            "end_wd": 0.2,
        },
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_megatrons_ramp if SCHEDULES[name][1] else ()) for name in SCHEDULES]
)
@pytest.mark.parametrize("world_size", [1, 4])
def test_every_step_is_megatrons(name: str, world_size: int) -> None:
    """Bit for bit, beyond the end of the decay. A batch of 12 is no power of two, so counting steps would round."""
    flags, ramp, arguments = SCHEDULES[name]
    common = "--micro-batch-size 1 --global-batch-size 12 --lr 1e-3 --min-lr 1e-4 --weight-decay 0.05"
    usual = {"init_lr": 0.0, "max_lr": 1e-3, "min_lr": 1e-4, "start_wd": 0.05, "end_wd": 0.05}
    scheduler = OptimizerParamScheduler(groups(), **(usual | {"wd_incr_style": "constant"} | arguments))
    batches: Any = (
        ConstantNumMicroBatchesCalculator(12, 1, world_size, False, 1)
        if ramp is None
        else MegatronsRamp(12, 1, world_size, False, 1, *ramp)
    )
    count = 12 if "--train-iters" in flags else None  # Megatron refuses a ramp there
    expected = list(megatrons_steps(100, batches=batches, scheduler=scheduler, count=count))
    assert list(our_steps(f"{common} {flags}", 100, world_size)) == expected
    assert len({lr for lr, _, _ in expected}) > 20


def test_steps_of_a_growing_batch_count_alike() -> None:
    """Three of ten steps warm up and four decay, whatever their batches; weight decay grows to the last."""
    flags = "--micro-batch-size 2 --train-iters 10 --lr 1e-3 --lr-decay-style WSD --lr-warmup-iters 3 "
    flags += "--lr-wsd-decay-iters 4 --weight-decay-incr-style linear --start-weight-decay 0.0 --end-weight-decay 0.1 "
    ramps = ("--global-batch-size 8 --rampup-batch-size 2 2 16", "--step-batch-size-schedule 0:2 1K:4 2K:8")
    for ramp in ramps:
        steps = list(our_steps(flags + ramp, 11))
        assert len({batch for *_, batch in steps}) > 2
        rates = [lr for lr, _, _ in steps]
        assert rates[:4] == pytest.approx([0.0, 1e-3 / 3, 2e-3 / 3, 1e-3])
        assert rates[4:7] == [1e-3] * 3 and rates[7] < 1e-3 and rates[10] == 0.0
        assert [decay for _, decay, _ in steps] == pytest.approx([0.01 * step for step in range(11)])


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--train-samples 960", []),
        ("--train-samples 971", []),  # as in Megatron
        ("--train-samples 971 --rampup-batch-size 4 4 40", ["train_samples(971): the last 3 samples fill no global"]),
        (
            "--step-batch-size-schedule 0:4 128K:12 --train-samples 3000",
            ["train_samples(3000): the last 8 samples fill no global batch and are not trained"],
        ),
        (
            "--train-samples 960 --lr-warmup-samples 960",
            ["lr_warmup_samples(960) does not fit into train_samples(960)"],
        ),
        ("--train-iters 8 --lr-warmup-iters 7", []),
        (
            "--train-iters 8 --lr-warmup-iters 9",
            ["lr_warmup_iters(9) does not fit into train_iters(8): the warm-up is"],
        ),
    ],
)
def test_what_is_cut_has_a_line(flags: str, expected: list[str]) -> None:
    words = f"--mock-data --vocab-size 64 --seq-length 128 --micro-batch-size 1 --global-batch-size 12 {flags}"
    config = parse_config(words.split())
    for found, start in zip(schedule_notes(config, 1), expected, strict=True):
        assert found.startswith(start)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--train-samples 960", 80),
        ("--train-samples 971", 80),  # 11 samples are no batch
        ("--train-samples 960 --rampup-batch-size 4 4 40", 84),
        ("--step-batch-size-schedule 0:4 128K:12 --train-samples 3000", 416),  # 1,000 samples of 128 tokens by fours
    ],
)
def test_the_number_of_steps_follows_from_the_samples(flags: str, expected: int) -> None:
    """Megatron's `update_train_iters` drops an incomplete last batch too, but for a schedule of steps."""
    words = f"--mock-data --vocab-size 64 --seq-length 128 --micro-batch-size 1 --global-batch-size 12 {flags}"
    config = parse_config(words.split())
    assert config.train_iters(1) == expected
    batches, consumed = config.batch_schedule(1), 0
    for iteration in range(expected):
        assert config.train_iters(1, iteration=iteration, consumed_samples=consumed) == expected
        consumed += batches.batch_size(consumed)
    assert consumed <= config.train_counts < consumed + batches.batch_size(consumed)


def megatrons_samples(prefixes: list[str], *, num_samples: int, seq_length: int, cache: Path) -> list[list[int]]:
    """Tokens of the training samples in Megatron's order, from megatron-core's builder as Megatron calls it."""
    config = blend_config(prefixes, cache, seq_length=seq_length, split="99,1,0")
    with process_group():
        train, *_ = BlendedMegatronDatasetBuilder(GPTDataset, [num_samples, 4, 0], lambda: True, config).build()
    return [train[index]["tokens"].tolist() for index in range(num_samples)]


def two_files(folder: Path) -> list[str]:
    """A blend of two token files, as words of --data-path."""
    rng = np.random.default_rng(5)
    for name in ("a", "b"):
        documents = [rng.integers(63, size=rng.integers(5, 90)).tolist() for _ in range(60)]
        write_token_files(folder / name, documents)
    return ["0.3", str(folder / "a"), "0.7", str(folder / "b")]


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float, list[list[int]]]]:
    """Fills with (learning rate, weight decay, tokens) of each training step from here on."""
    steps: list[tuple[float, float, list[list[int]]]] = []
    plain = training_run.train_step

    def train_step(state: Any, loader: Iterator[Any], **settings: Any) -> torch.Tensor:
        taken = [next(loader) for _ in range(settings["num_micro_batches"])]
        group = next(group for group in state.optimizer.param_groups if group["wd_mult"] == 1.0)
        steps.append((group["lr"], group["weight_decay"], [row for batch in taken for row in batch["tokens"].tolist()]))
        return plain(state, iter(taken), **settings)

    monkeypatch.setattr(training_run, "train_step", train_step)
    return steps


RAMP = {
    "mock_data": None,
    "tokenizer_type": "NullTokenizer",
    "split": "99,1,0",
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "rampup_batch_size": ["2", "2", "30"],
    "train_iters": None,
    "train_samples": 100,
    "lr_warmup_samples": 12,
    "lr_decay_style": "cosine",
    "lr": 1e-3,
    "weight_decay_incr_style": "linear",
    "start_weight_decay": 0.01,
    "end_weight_decay": 0.1,
}


@needs_megatrons_ramp
def test_a_run_on_samples_is_megatrons_step_for_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One .bin/.idx blend and a schedule in samples: rates, weight decay, batches and the tokens of every sample.

    It stops in the middle of the ramp and goes on from its checkpoint.
    """
    words = two_files(tmp_path)
    steps = recorded(monkeypatch)
    settings = {**RAMP, "data_path": words, "save": tmp_path / "saved", "data_cache_path": tmp_path / "cache"}
    Trainer(parse_config(tiny_flags(tmp_path / "run", exit_interval=7, **settings))).fit()
    assert len(steps) == 7
    Trainer(parse_config(tiny_flags(tmp_path / "run", load=tmp_path / "saved", **settings))).fit()

    config = parse_config(tiny_flags(tmp_path / "run", **settings))
    batches = MegatronsRamp(8, 2, 1, False, 1, 2, 2, 30)
    scheduler = OptimizerParamScheduler(groups(), 0.0, 1e-3, 0.0, 12, 100, "cosine", 0.01, 0.1, 100, "linear")
    scheduler.optimizer.param_groups[0]["min_lr"] = 0.0
    scheduler.step(0)
    samples = megatrons_samples(
        words, num_samples=100, seq_length=config.model.seq_length, cache=tmp_path / "megatrons"
    )
    expected, consumed = [], 0
    for lr, decay, batch in megatrons_steps(len(steps), batches=batches, scheduler=scheduler):
        expected.append((lr, decay, samples[consumed : consumed + batch]))
        consumed += batch
    assert steps == expected
    assert consumed <= 100 < consumed + 8 and len({len(tokens) for _, _, tokens in steps}) == 4
    records = [record for record in read_rows(tmp_path / "run" / METRICS_FILE) if record["kind"] == "train"]
    assert [record["global_batch_size"] for record in records] == [len(tokens) for _, _, tokens in steps]
    assert records[-1]["consumed_samples"] == consumed and records[-1]["iteration"] == len(steps)
    assert [record["learning_rate"] for record in records] == [lr for lr, _, _ in steps]


def fit(folder: Path, **settings: object) -> list[dict[str, Any]]:
    """Train the tiny run; the records of its training steps."""
    Trainer(parse_config(tiny_flags(folder, **settings))).fit()
    return [record for record in read_rows(folder / METRICS_FILE) if record["kind"] == "train"]


def test_a_ramp_resumes_bitwise(tmp_path: Path) -> None:
    """Inside of it and after it, with gradients of one to four micro-batches."""
    ramp = {"global_batch_size": 8, "rampup_batch_size": [2, 2, 30], "train_iters": 12, "lr_warmup_iters": 3}
    straight = fit(tmp_path / "straight", **ramp)
    for halt in (4, 9):
        folder = tmp_path / str(halt)
        fit(folder, save=folder / "saved", exit_interval=halt, **ramp)
        resumed = fit(folder, save=folder / "saved", load=folder / "saved", **ramp)
        for name in ("loss", "grad_norm", "learning_rate", "global_batch_size", "consumed_samples"):
            assert [record[name] for record in resumed] == [record[name] for record in straight], name
    assert [record["global_batch_size"] for record in straight] == [2] * 5 + [4] * 3 + [6] * 2 + [8] * 2


def test_a_first_start_has_all_batches_of_the_ramp_even_with_load(tmp_path: Path) -> None:
    """--load may be the folder of --save, which holds nothing yet. A step of 3 samples would train on other ones."""
    saved = tmp_path / "saved"
    ramp = {"global_batch_size": 6, "rampup_batch_size": [3, 3, 6], "train_iters": 4}
    with pytest.raises(ConfigError, match=r"^global_batch_size\(3\), which the batch grows through, is not a multiple"):
        fit(tmp_path / "first", save=saved, load=saved, **ramp)
    fit(tmp_path / "one", micro_batch_size=1, save=saved, exit_interval=2, **ramp)
    resumed = fit(tmp_path / "resumed", save=saved, load=saved, **ramp)  # behind the batches of 3
    assert [record["consumed_samples"] for record in resumed] == [12, 18]


def test_a_first_start_has_all_batches_of_the_ramp_for_its_stages_too(ranks: RankPool, tmp_path: Path) -> None:
    """The interleaved schedule of two stages takes pairs of micro-batches; the batch of 2 samples is one."""
    stages = {"num_layers": 4, "pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}
    ramp = {"global_batch_size": 8, "rampup_batch_size": [2, 6, 6], "train_iters": 4}
    saved = tmp_path / "saved"
    with pytest.raises(RankError, match=r"the interleaved schedule .* but there are 1 per step"):
        ranks.run(_fit, tmp_path / "run", {**stages, **ramp, "save": saved, "load": saved}, num_ranks=2)


def _fit(folder: Path, settings: dict[str, Any]) -> None:
    fit(folder, **settings)


def test_a_step_of_the_ramp_is_that_of_a_run_with_its_batch(tmp_path: Path) -> None:
    """The first loss and gradient do not depend on how far the batch will grow: BF16 adds in FP32 in any case."""
    first = fit(tmp_path / "small", precision="bf16", global_batch_size=4, train_iters=1)
    ramp = {"global_batch_size": 8, "rampup_batch_size": [4, 4, 30]}
    grown = fit(tmp_path / "ramp", precision="bf16", train_iters=1, **ramp)
    assert (grown[0]["loss"], grown[0]["grad_norm"]) == (first[0]["loss"], first[0]["grad_norm"])
    assert grown[0]["tokens_per_second_per_gpu"] == pytest.approx(4 * 16 / grown[0]["step_seconds"])


def test_an_iteration_to_skip_trains_on_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its data is gone, the schedule stands still, and a resumed run agrees."""
    steps = recorded(monkeypatch)
    settings = {"train_iters": 8, "lr_warmup_iters": 2, "lr_decay_style": "linear"}
    plain = fit(tmp_path / "plain", **settings)
    usual, steps[:] = list(steps), []
    skipping = fit(tmp_path / "skipping", iterations_to_skip=[3, 4], **settings)
    assert [record["iteration"] for record in skipping] == [1, 2, 5, 6, 7, 8]
    assert [record["learning_rate"] for record in skipping] == [record["learning_rate"] for record in plain[:6]]
    assert [tokens for _, _, tokens in steps] == [tokens for _, _, tokens in usual[:2] + usual[4:]]
    assert skipping[-1]["consumed_samples"] == plain[-1]["consumed_samples"]
    saved = tmp_path / "halves" / "saved"
    fit(tmp_path / "halves", save=saved, exit_interval=5, iterations_to_skip=[3, 4], **settings)
    resumed = fit(tmp_path / "halves", save=saved, load=saved, iterations_to_skip=[3, 4], **settings)
    assert [(r["iteration"], r["loss"], r["learning_rate"]) for r in resumed] == [
        (r["iteration"], r["loss"], r["learning_rate"]) for r in skipping
    ]


def test_a_signal_before_what_is_left_out_ends_the_run_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_step = training_run.train_step

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        return train_step(*args, **{**kwargs, "stop": StopReason.SIGNAL})

    monkeypatch.setattr(training_run, "train_step", interrupted)
    saved = tmp_path / "saved"
    records = fit(tmp_path, train_iters=9, save=saved, save_interval=2, iterations_to_skip=[2, 3])
    assert [record["iteration"] for record in records] == [1] and saved_iterations(saved) == [1]


def test_a_save_and_the_end_come_after_an_iteration_that_is_left_out(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    settings = {"save": saved, "save_interval": 3, "exit_interval": 7, "iterations_to_skip": [3, 7]}
    records = fit(tmp_path, train_iters=12, **settings)
    assert [record["iteration"] for record in records] == [1, 2, 4, 5, 6, 8]
    assert saved_iterations(saved) == [4, 6, 8]


def test_embedding_and_output_layer_follow_the_decoupled_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As megatron-core names them, and nothing else; weights of a rate near 0 hardly move."""
    seen: list[dict[str, tuple[float, float]]] = []
    plain = training_run.train_step

    def train_step(state: Any, *arguments: Any, **settings: Any) -> torch.Tensor:
        groups = zip(state.optimizer.states, state.optimizer.param_groups, strict=True)
        seen.append({slot.name: (g["lr"], g["min_lr"]) for space, g in groups for slot in space.space.slots})
        return plain(state, *arguments, **settings)

    monkeypatch.setattr(training_run, "train_step", train_step)
    settings = {"train_iters": 3, "lr_decay_style": "constant", "untie_embeddings_and_output_weights": True}
    records = fit(tmp_path, decoupled_lr=1e-9, **settings)
    own = {name for name, rates in seen[0].items() if rates == (1e-9, 0.0)}
    assert own == {"embedding.word_embeddings.weight", "output_layer.weight"}
    assert {rates[0] for name, rates in seen[0].items() if name not in own} == {1e-2}
    assert [record["learning_rate"] for record in records] == [1e-2] * 3


def _fit_with_an_embedding_alone(folder: Path) -> None:
    stages = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "E|ttL"}
    words = {**LLAMA_STYLE_FLAGS, **stages, "decoupled_lr": 1e-9, "train_iters": 3, "lr_decay_style": "linear"}
    Trainer(parse_config(tiny_flags(folder, **words))).fit()


def test_the_reported_rate_is_not_the_decoupled_one(ranks: RankPool, tmp_path: Path) -> None:
    """Where the first stage, which reports, holds the embedding and nothing else."""
    ranks.run(_fit_with_an_embedding_alone, tmp_path, num_ranks=2)
    records = [record for record in read_rows(tmp_path / METRICS_FILE) if record["kind"] == "train"]
    assert [record["learning_rate"] for record in records] == pytest.approx([1e-2, 2e-2 / 3, 1e-2 / 3])


def saved_schedule(batch_size: int, **settings: object) -> Progress:
    """The progress of a run of 10 steps of which 4 are done, through the file that a checkpoint holds."""
    config = parse_config(tiny_flags(Path("unused"), global_batch_size=batch_size, **settings))
    schedule = RunSchedule(groups(), config, 1)
    place = 4 * batch_size
    progress = {"iteration": 4, "consumed_samples": place, "skipped_steps": 0, "scheduled_samples": place}
    return Progress.of(json.loads(json.dumps(progress | {"schedule": schedule.as_saved()})))


@pytest.mark.parametrize(
    ("flags", "rate", "warning"),
    [
        ({}, 0.6e-2, None),
        ({"global_batch_size": 24}, 0.6e-2, None),  # steps count: the fourth of ten, whatever its batch
        ({"lr": 2e-2}, 1.2e-2, "the schedule is not the checkpoint's (lr 0.01 → 0.02); "),
        ({"lr": 2e-2, "override_opt_param_scheduler": True, "load": "."}, 1.2e-2, None),
        ({"lr": 2e-2, "train_iters": 40, "use_checkpoint_opt_param_scheduler": True, "load": "."}, 0.6e-2, None),
        ({"train_iters": 40}, 0.9e-2, "decay_samples 120 → 480, weight_decay_incr_samples 120 → 480"),
    ],
)
def test_a_resumed_schedule(
    flags: dict[str, Any], rate: float, warning: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The flags' schedule, with a warning that names each difference, or the checkpoint's where it is asked for."""
    settings = {"train_iters": 10, "lr_decay_style": "linear", "global_batch_size": 12}
    progress = saved_schedule(**{"batch_size": settings.pop("global_batch_size")} | settings)
    words = tiny_flags(Path("unused"), **{"global_batch_size": 12, **settings, **flags})
    optimizer = groups()
    for group in optimizer.param_groups:
        group["max_lr"], group["min_lr"] = flags.get("lr", 1e-2), 0.0
    schedule = RunSchedule(optimizer, parse_config(words), 1)
    schedule.resume(progress)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == (warning is not None) and all(warning in text for text in said if warning)


def test_a_checkpoint_without_a_schedule_resumes_by_its_iteration() -> None:
    """Earlier versions saved none."""
    optimizer = groups()
    words = tiny_flags(Path("unused"), train_iters=10, lr_decay_style="linear", global_batch_size=12)
    schedule = RunSchedule(optimizer, parse_config(words), 1)
    progress = Progress.of({"iteration": 4, "consumed_samples": 48, "skipped_steps": 0})
    schedule.resume(progress)
    assert schedule.counted_samples == 48
    asked = parse_config([*words, "--load", ".", "--use-checkpoint-opt_param-scheduler"])
    with pytest.raises(
        ConfigError, match="the checkpoint of iteration 4 does not say which schedule it followed; drop"
    ):
        RunSchedule(optimizer, asked, 1).resume(progress)
    RunSchedule(optimizer, asked, 1).resume(Progress())  # the weights of --pretrained-checkpoint
