"""Amax histories of any steps: slots without values, jumps, values that are not finite, skips and resumes."""

from __future__ import annotations

import math
import random
from typing import Literal

import pytest
import torch

from fp8_megatron.dtypes import E4M3
from fp8_megatron.formats.tensorwise import Tensorwise
from fp8_megatron.optimizer.loss_scale import LossScale
from fp8_megatron.quantization.amax_history import RECURS_WITHIN, AmaxHistory, SquareSum
from fp8_megatron.quantization.cast_report import Role
from fp8_megatron.quantization.recipe import Quantizer
from fp8_megatron.quantization.sources import TensorSource
from tests.harness.fields import differing_fields

Algo = Literal["max", "most_recent"]
LENGTH = 4
#: Written before they are read in a step; when steps are recorded is no number; times.
NOT_READ = frozenset({"report", "_square_sum", "_num_unchanged", "_cast_cold", "ended"})


def make_history(num_slots: int = 1, algo: Algo = "max", role: Role = Role.INPUT) -> AmaxHistory:
    history = AmaxHistory(LENGTH, algo, power_of_two=False)
    for _ in range(num_slots):
        history.add_slot(E4M3, role=role)
    history.allocate(torch.device("cpu"))
    return history


def resumed(history: AmaxHistory) -> AmaxHistory:
    """Another one with its state, as from a file."""
    other = make_history(history.num_slots, history.algo)
    other.load_state_dict({name: value.clone() for name, value in history.state_dict().items()})
    return other


def reach(history: AmaxHistory, slot: int) -> float:
    """The largest value that the delayed scale of a slot represents."""
    assert history.knows(slot)
    reached = history.scale_of(slot).item() * 448.0
    assert 0.0 < reached < math.inf and math.isfinite(history.inverse_of(slot).item())
    return reached


def step_of(histories: list[AmaxHistory], amaxes: list[list[float]], beside: float = 0.0) -> float:
    """A step of model chunks' casts whose magnitudes are spread evenly up to `amaxes`; returns the sum of squares that
    ranks find.

    Args:
        beside: what is in the sum beside these casts.
    """
    total = SquareSum(torch.tensor([beside]))
    for history, own in zip(histories, amaxes, strict=True):
        assert history.record is not None
        for slot, amax in enumerate(own):
            clamped = 0.0
            if history.knows(slot) and math.isfinite(amax) and amax > 0.0:
                clamped = 100.0 * max(0.0, 1.0 - reach(history, slot) / amax)
            history.record[slot, :3] = torch.tensor([amax, clamped, 100.0 if history.knows(slot) else 0.0])
        history.examine(total)
    for history in histories:
        history.update(None, total)
    return total.item()


def step(history: AmaxHistory, amaxes: list[float], beside: float = 0.0) -> float:
    """`step_of` the only chunk."""
    return step_of([history], [amaxes], beside)


def test_a_slot_without_values_has_no_scale_until_it_has_seen_one() -> None:
    """The host learns of it a step late. A slot that has had values keeps its scale through zeros."""
    history, x = make_history(2), torch.full((16, 16), 1e-6)
    quantizer = Quantizer(Tensorwise(E4M3), history, slot=1)
    for amax, is_known in ((0.0, False), (0.0, False), (1e-6, False), (1e-6, True), (0.0, True), *[(0.0, True)] * 5):
        cast = quantizer.quantize(TensorSource(x))
        torch.testing.assert_close(cast.payload.float() * cast.scale, x, rtol=2**-4, atol=0.0)
        history.discard_current_step()
        step(history, [1.0, amax])
        assert history.knows(0) and history.knows(1) is is_known, amax
        assert math.isfinite(history.scale_of(1).item()) is (is_known or amax > 0.0)
    assert reach(history, 1) == pytest.approx(1e-6)


def test_saturation_is_counted_against_known_scales_alone() -> None:
    history = make_history(2)
    step(history, [1.0, 0.0])
    for amax in (1.0, 100.0, 1.5):
        step(history, [1.0, amax])
        assert history.report is not None
        assert history.report[3:].view(len(Role), 3)[Role.INPUT, 2] == 0.0
        assert history.knows(1) is (amax > 1.0)


def test_steps_are_settled_when_no_slot_is_waited_for() -> None:
    """A slot that is cast and sees zeros alone is waited for for some time, one that nobody casts is not."""
    history = make_history(3)
    for slot in (0, 1):
        history.raise_amax(slot, torch.zeros(1))
    for _ in range(17):
        assert not history.is_settled
        step(history, [1.0, 0.0, 0.0])
    assert history.is_settled and history.has_cold_casts and history.num_known == 1
    step(history, [1.0, 1.0, 0.0])
    step(history, [1.0, 1.0, 0.0])
    assert history.is_settled and not history.has_cold_casts and history.num_known == 2


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("num_steps", range(1, 8))
def test_a_resumed_history_is_the_one_that_was_saved(algo: Algo, num_steps: int) -> None:
    """Field by field: with values, without, known since the last step, behind one or two steps that clamped."""
    history = make_history(3, algo)
    steps = [[1.0, 0.0, 0.0], [1.0, 2.0, 0.0], [1000.0, 2.0, 0.0], [1000.0, 2.0, 0.0], *[[1000.0, 0.0, 3.0]] * 3]
    for amaxes in steps[:num_steps]:
        step(history, amaxes)
    assert differing_fields(history, make_history(3, algo), ignored=NOT_READ) != []
    assert differing_fields(history, resumed(history), ignored=NOT_READ) == []


def test_a_resumed_loss_scale_is_the_one_that_was_saved() -> None:
    def new() -> LossScale:
        return LossScale(1024.0, torch.device("cpu"), window=5, hysteresis=2)

    saved, other = new(), new()
    for overflowed in (False, True, False, True, False):
        saved.update(torch.tensor([overflowed]))
    assert differing_fields(saved, other) != []
    other.load_state_dict({name: value.clone() for name, value in saved.state_dict().items()})
    assert differing_fields(saved, other) == []


def test_states_of_earlier_versions_load() -> None:
    """They have a history and scales alone; a slot that saw zeros has the scale 1, and before the first step all 0."""
    saved = make_history(3, role=Role.ATTENTION_GRAD)
    for _ in range(LENGTH + 1):
        step(saved, [2.0, 0.0, 448.0 if saved.num_known == 0 else 0.0])
    state = {name: saved.state_dict()[name].clone() for name in ("history", "scale")}
    state["scale"][2] = 3.0  # zeros have pushed its value out
    history = make_history(3, role=Role.ATTENTION_GRAD)
    history.load_state_dict(state, gradient_factor=2.0)
    assert [history.knows(slot) for slot in range(3)] == [True, False, True] and history.scale_of(2).item() == 6.0
    assert step(history, [2.0, 0.5, 0.0]) == 0.0
    step(history, [2.0, 0.5, 0.0])
    assert reach(history, 1) == pytest.approx(0.5)
    fresh = make_history(3)
    fresh.load_state_dict({name: torch.zeros_like(value) for name, value in state.items()})
    assert not fresh.is_warm


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("seed", range(20))
def test_no_sequence_skips_for_ever_or_keeps_a_scale_that_does_not_fit(algo: Algo, seed: int) -> None:
    """Amaxes stay for a while and jump by up to 12 decades, to zero and back; steps are skipped for other reasons, hold
    values that are not finite, and the run is resumed. A tensor beyond twice its scale's reach is cast at most twice,
    but for steps that are skipped for another reason, and a resumed run is the straight one."""
    draw = random.Random(seed)
    straight, run = make_history(3, algo), make_history(3, algo)
    seen: list[list[float]] = []
    for _ in range(25):
        amaxes = [
            draw.choice([0.0, 10.0 ** draw.uniform(-6.0, 6.0), 10.0 ** draw.uniform(-40.0, -6.0)]) for _ in range(3)
        ]
        num_beyond = [0, 0, 0]
        for _ in range(draw.randint(4, 12)):
            bad = draw.choice([0.0] * 8 + [math.nan, math.inf, -1.0])
            here = [math.nan, *amaxes[1:]] if bad == -1.0 else amaxes
            beside = max(bad, 0.0)
            for slot, amax in enumerate(here):
                num_beyond[slot] += bad == 0.0 and run.knows(slot) and amax > 2.0 * reach(run, slot)
            if draw.random() < 0.3:
                run = resumed(run)
            total, resumed_total = step(straight, list(here), beside), step(run, list(here), beside)
            assert total == resumed_total or (math.isnan(total) and math.isnan(resumed_total))
            assert differing_fields(straight, run, ignored=NOT_READ) == []
            if straight.is_warm and not math.isnan(total):
                seen.insert(0, list(here))
            check_scales(straight, seen)
        assert max(num_beyond) <= 2, (amaxes, num_beyond)
    assert [step(straight, [1.0, 1.0, 1.0]) for _ in range(6)][3:] == [0.0] * 3
    assert straight.num_known == 3


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("seed", range(20))
def test_batches_that_differ_do_not_skip_for_ever(algo: Algo, seed: int) -> None:
    """Each slot's amaxes swing between levels up to 12 decades apart, at each step, in a pattern or now and then, also
    over model chunks with histories of their own. A chunk skips at most two of any `RECURS_WITHIN` steps, and the
    scales behind a step that counts represent it. A pattern that the history holds skips none in the end."""
    draw = random.Random(seed)
    histories = [make_history(2, algo) for _ in range(draw.randint(1, 3))]
    levels = [
        [[10.0 ** draw.uniform(-6.0, 6.0) for _ in range(draw.randint(1, 3))] for _ in range(2)] for _ in histories
    ]
    changes, period = draw.choice([0.03, 0.3, 1.0]), draw.choice([None, 2, 3, LENGTH])
    amaxes = [[draw.choice(of_slot) for of_slot in of_chunk] for of_chunk in levels]
    skipped: list[bool] = []
    for number in range(150):
        for chunk, of_chunk in enumerate(levels):
            for slot, of_slot in enumerate(of_chunk):
                if period is not None:
                    amaxes[chunk][slot] = of_slot[(number + chunk) % period % len(of_slot)]
                elif draw.random() < changes:
                    amaxes[chunk][slot] = draw.choice(of_slot)
        skipped.append(not math.isfinite(step_of(histories, amaxes)))
        assert sum(skipped[-RECURS_WITHIN:]) <= 2 * len(histories), skipped
        if not skipped[-1]:
            for history, own in zip(histories, amaxes, strict=True):
                for slot, amax in enumerate(own):
                    assert history.scale_of(slot).item() * 448.0 >= amax * (1.0 - 1e-6)
    if algo == "max" and period is not None:
        assert not any(skipped[-100:]), skipped


def check_scales(history: AmaxHistory, seen: list[list[float]]) -> None:
    """Scales fit the largest finite amax of the window, or the last one; while there is none, they stay."""
    for slot in range(history.num_slots):
        window = [row[slot] for row in (seen[:LENGTH] if history.algo == "max" else seen[:1])]
        largest = max((amax for amax in window if math.isfinite(amax)), default=0.0)
        if largest > 448.0 * 2.0**-126:  # below, the scale stays normal
            assert history.scale_of(slot).item() * 448.0 == pytest.approx(largest, rel=1e-6)
