"""The batch of each step against megatron-core's calculator, and the number of steps against a step-by-step count."""

from __future__ import annotations

import itertools

import pytest

from fp8_megatron.config.batch_schedule import BatchSchedule
from fp8_megatron.config.checks import ConfigError, check_config
from fp8_megatron.config.io import parse_config
from tests.harness.megatrons_ramp import MegatronsRamp, needs_megatrons_ramp

#: start, increment, samples, global batch. The last has fewer samples than increments; two have thirds as shares.
RAMPS = [(16, 8, 3000, 64), (4, 4, 1000, 16), (1, 1, 100, 4), (2, 2, 7, 8), (8, 8, 997, 1024), (1, 1, 5, 12)]
#: That of Megatron's examples/gpt3/train_gpt3_175b_distributed.sh.
GPT3 = (16, 16, 5859375, 1536)


@needs_megatrons_ramp
@pytest.mark.parametrize("ramp", RAMPS)
def test_a_ramp_is_megatrons_at_every_sample(ramp: tuple[int, int, int, int]) -> None:
    start, increment, samples, batch = ramp
    theirs = MegatronsRamp(batch, 1, 1, False, 1, start, increment, samples)
    ours = BatchSchedule.ramp(start, increment, samples, batch)
    for consumed in range(samples + 50):
        theirs.update(consumed, consistency_check=False)
        assert ours.batch_size(consumed) == theirs.get_current_global_batch_size(), consumed


@needs_megatrons_ramp
def test_the_ramp_of_a_large_run_is_megatrons_at_every_step() -> None:
    start, increment, samples, batch = GPT3
    theirs = MegatronsRamp(batch, 1, 8, False, 1, start, increment, samples)
    ours = BatchSchedule.ramp(start, increment, samples, batch)
    consumed, met = 0, []
    while consumed < samples + 10 * batch:
        theirs.update(consumed, consistency_check=True)
        met.append(theirs.get_current_global_batch_size())
        assert ours.batch_size(consumed) == met[-1], consumed
        consumed += met[-1]
    assert ours.batches_from(0) == sorted(set(met)) and len(set(met)) == 96
    assert ours.num_steps(consumed) == len(met) and ours.num_samples(len(met)) == consumed


@pytest.mark.parametrize(
    "words", [["0:16", "2.4B:320", "4.8B:624"], ["0:16 2.4B:320 4.8B:624"], ["2.4b:320,0:16,4_800M:6_24"]]
)
def test_steps_of_tokens(words: list[str]) -> None:
    """The words of a shell that split them, of one that did not, and with commas; tokens become whole samples."""
    schedule = BatchSchedule.steps(words, seq_length=2048)
    assert schedule.phases == ((0, 16), (2_400_000_000 // 2048, 320), (4_800_000_000 // 2048, 624))
    assert [schedule.batch_size(samples) for samples in (0, 1_171_874, 1_171_875, 10**9)] == [16, 16, 320, 624]
    assert schedule.largest == 624 and not schedule.is_constant


@pytest.mark.parametrize("phases", [((0, 4),), ((0, 2), (5, 4)), ((0, 2), (3, 4), (4, 6), (40, 8)), ((0, 7), (1, 9))])
def test_counts_are_those_of_single_steps(phases: tuple[tuple[int, int], ...]) -> None:
    """From every sample, to every end: an incomplete last batch is dropped."""
    schedule = BatchSchedule(phases)
    for first, end in itertools.product(range(45), range(0, 90, 7)):
        consumed, count, met = first, 0, []
        while consumed + schedule.batch_size(consumed) <= end:
            met.append(schedule.batch_size(consumed))
            consumed += met[-1]
            count += 1
        assert schedule.num_steps(end, first) == count
        assert schedule.num_samples(count, first) == max(consumed, first) - first
        assert schedule.batches_from(first)[: len(set(met))] == sorted(set(met))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--rampup-batch-size 4 4", "rampup_batch_size(4 4) cannot be followed: give three whole numbers above 0"),
        ("--rampup-batch-size 4 4 0", "give three whole numbers above 0: start, increment, samples"),
        ("--rampup-batch-size 16 4 100", "its start is not below global_batch_size(16)"),
        ("--rampup-batch-size 4 5 100", "global_batch_size(16) - 4 is not a multiple of the increment 5"),
        ("--rampup-batch-size 2 2 100", "global_batch_size(2), which the batch grows through, is not a multiple of"),
        ("--step-batch-size-schedule 0:4 16", "'16' is not TOKENS:BATCH, such as 2.4B:320"),
        ("--step-batch-size-schedule 0:4 1Q:16", "'1Q' is no number such as 320 or 2.4B"),
        ("--step-batch-size-schedule 0:4 infB:16", "'infB' is no number"),
        ("--step-batch-size-schedule 1M:4 2M:16", "its first batch does not start at 0 tokens"),
        ("--step-batch-size-schedule 0:16 1M:4", "a batch of 4 follows one of 16: batches may only grow"),
        ("--step-batch-size-schedule 0:4 1:16", "two batches start at sample 0"),
        ("--step-batch-size-schedule 0:0 1M:16", "a batch has at least one sample"),
        ("--rampup-batch-size 4 4 100 --step-batch-size-schedule 0:4", "both set the global batch; drop one"),
        ("--train-samples 15", "train_samples(15) are fewer than one global batch of 16; raise it"),
        ("--train-samples 640 --train-iters 40", "train_iters(40) does not fit train_samples(640)"),
        ("--train-samples 640 --lr-warmup-iters 4", "lr_warmup_iters(4) does not fit train_samples(640), which"),
        ("--train-samples 640 --lr-decay-iters 4", "give lr_decay_samples, or drop one"),
        ("--train-iters 40 --lr-decay-samples 64", "lr_decay_samples(64) does not fit train_iters(40), which counts"),
        ("--train-samples 640 --lr-warmup-samples 64 --lr-decay-samples 64", "lr_warmup_samples(64) ≥ lr_decay_sampl"),
        ("--lr-warmup-fraction 0.1 --train-samples 640 --lr-warmup-samples 5", "both set the warm-up; drop one"),
        ("--train-samples 1_000_000_000_000", "train_samples(1000000000000) are 62500000000 steps, more than"),
        ("--train-samples 640 --lr-decay-style WSD", "needs lr_wsd_decay_samples, the samples of its final decay"),
        ("--train-samples 640 --lr-decay-style WSD --lr-wsd-decay-samples 641", "lr_wsd_decay_samples(641) > train_s"),
        ("--start-weight-decay 0.1", "start_weight_decay(0.1) has no effect under weight_decay_incr_style(constant)"),
        ("--weight-decay-incr-style linear --start-weight-decay 0", "needs end_weight_decay; give --end-weight-decay"),
        (
            "--weight-decay-incr-style cosine --start-weight-decay 0.2 --end-weight-decay 0.1",
            "end_weight_decay(0.1) < start_weight_decay(0.2); weight decay may only grow",
        ),
        ("--decoupled-lr 1e-5 --min-lr 1e-4", "min_lr(0.0001) > decoupled_lr(1e-05)"),
        ("--train-iters 40 --iterations-to-skip 3 41 50", "iterations_to_skip(41 50) come after the last"),
        ("--train-samples 640 --iterations-to-skip 40 41", "iterations_to_skip(41) come after the last"),
        ("--iterations-to-skip 0 3 x", "iterations_to_skip(0 x) are not iterations; give numbers from 1 on"),
        ("--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler --load .", "override_opt_param_schedul"),
    ],
)
def test_what_cannot_work_is_one_line(flags: str, message: str) -> None:
    base = "--mock-data --vocab-size 64 --micro-batch-size 1 --global-batch-size 16 --seq-length 128"
    with pytest.raises(ConfigError) as error:
        check_config(parse_config([*base.split(), *flags.split()]), 4)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("given_later", ["--train-samples 640", "--train-iters 40"])
def test_the_length_that_is_given_later_stands_alone(tmp_path, given_later: str) -> None:
    """A recipe in steps can be run for a number of samples, and the reverse."""
    file = tmp_path / "recipe.yaml"
    file.write_text("train_iters: 3" if "samples" in given_later else "train_samples: 48")
    training = parse_config(["--config", str(file), *given_later.split()]).training
    assert (training.train_iters, training.train_samples) == ((None, 640) if "samples" in given_later else (40, None))


def test_a_resumed_run_may_be_past_what_its_ranks_cannot_share() -> None:
    words = "--mock-data --vocab-size 64 --micro-batch-size 1 --global-batch-size 16 --rampup-batch-size 2 2 100"
    check_config(parse_config([*words.split(), "--load", "."]), 8)


def test_a_resumed_run_may_be_past_what_its_stages_cannot_take() -> None:
    """Two replicas of two stages have 1, 3, 5 and 7 micro-batches on the way to 8, which are no pairs."""
    words = "--mock-data --vocab-size 64 --micro-batch-size 1 --global-batch-size 16 --rampup-batch-size 2 2 100"
    stages = "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
    own = [*words.split(), *stages.split()]
    with pytest.raises(ConfigError, match=r"the interleaved schedule .* but there are 3 per step"):
        check_config(parse_config(own), 4)
    check_config(parse_config([*own, "--load", "."]), 4)
