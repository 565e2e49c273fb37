"""Delayed scaling: the history's rules, alone and over ranks."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from torch import Tensor

from fp8_megatron.dtypes import E4M3, E5M2
from fp8_megatron.formats.tensorwise import Tensorwise
from fp8_megatron.quantization.amax_history import AmaxHistory, SquareSum
from fp8_megatron.quantization.cast_report import Role
from fp8_megatron.quantization.recipe import Quantizer
from fp8_megatron.quantization.sources import TensorSource
from tests.harness.ranks import RankPool, on_default_group


def make_history(
    algo: Literal["max", "most_recent"] = "max", length: int = 4, dtypes: tuple[torch.dtype, ...] = (E4M3, E5M2)
) -> AmaxHistory:
    history = AmaxHistory(length, algo, power_of_two=False)
    for index, dtype in enumerate(dtypes):
        assert history.add_slot(dtype) == index
    history.allocate(torch.device("cpu"))
    return history


def push(history: AmaxHistory, *amaxes: float) -> Tensor:
    """One step with these amaxes; the scales after it, times each slot's largest number."""
    assert history.amax is not None and history.scale is not None and history._fp_max is not None
    history.amax.copy_(torch.tensor(amaxes))
    history.update(None)
    assert not history.amax.any()
    return history.scale * history._fp_max


def test_starts_cold_and_takes_its_first_scale_from_the_first_step() -> None:
    history = make_history()
    assert not history.is_warm and not history.knows(0) and (history.state_dict()["known"] == -1.0).all()
    torch.testing.assert_close(push(history, 2.0, 3.0), torch.tensor([2.0, 3.0]))
    assert history.is_warm and history.knows(0, 1)


def test_skipped_first_steps_leave_it_cold() -> None:
    history = make_history()
    assert history.amax is not None and history.history is not None
    for _ in range(2):
        history.amax.copy_(torch.tensor([7.0, math.inf]))
        history.update(None, SquareSum(torch.tensor([math.nan])))
        assert not history.is_warm and not history.knows(0) and not history.amax.any()
    torch.testing.assert_close(push(history, 2.0, 3.0), torch.tensor([2.0, 3.0]))
    assert history.is_warm and not history.history[1:].any()


def test_max_remembers_and_most_recent_does_not() -> None:
    amaxes = [5.0, 1.0, 2.0, 1.5, 1.0, 0.5]
    remembering, forgetting = make_history("max"), make_history("most_recent")
    for step, amax in enumerate(amaxes):
        window = amaxes[max(0, step - 3) : step + 1]
        torch.testing.assert_close(push(remembering, amax, 7.0)[0].item(), max(window), rtol=1e-6, atol=0)
        torch.testing.assert_close(push(forgetting, amax, 7.0)[0].item(), amax, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("margin", "room"), [(0, [1.0, 4.0]), (1, [2.0, 4.0]), (3, [8.0, 8.0])])
def test_a_margin_is_room_above_the_amax(margin: int, room: list[float]) -> None:
    """Of every slot; one that has more keeps it. Values that grow by less than the room do not saturate."""
    history = AmaxHistory(4, "max", power_of_two=False, margin=margin)
    for headroom in (1.0, 4.0):
        history.add_slot(E4M3, headroom=headroom)
    history.allocate(torch.device("cpu"))
    assert history.amax is not None and history.scale is not None
    history.amax.copy_(torch.tensor([3.0, 3.0]))
    history.update(None)
    torch.testing.assert_close(history.scale * 448.0, 3.0 * torch.tensor(room))
    quantizer = Quantizer(Tensorwise(E4M3), history, slot=0)
    for growth, saturates in ((0.99 * room[0], False), (1.1 * room[0], True)):
        x = torch.full((16, 16), 3.0 * growth, dtype=torch.bfloat16)
        cast = quantizer.quantize(TensorSource(x))
        lost = (cast.payload.float() * cast.scale / x - 1).abs().max().item()
        assert (lost > 2**-4) == saturates, growth


@pytest.mark.parametrize("bad", [0.0, math.inf, math.nan])
@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_bad_amaxes_leave_the_old_scale_and_the_other_slot(algo: Literal["max", "most_recent"], bad: float) -> None:
    history = make_history(algo, length=2)
    push(history, 2.0, 3.0)
    for step in range(4):  # longer than the history: nothing good is left in it
        scales = push(history, bad, 10.0 + step)
        torch.testing.assert_close(scales, torch.tensor([2.0, 10.0 + step]))
    torch.testing.assert_close(push(history, 6.0, 1.0)[0], torch.tensor(6.0))


def test_slots_added_late_are_refused() -> None:
    with pytest.raises(AssertionError, match="before allocate"):
        make_history().add_slot(E4M3)


def test_state_dict_resumes() -> None:
    history, resumed = make_history(), make_history()
    push(history, 5.0, 3.0)
    push(history, 1.0, 4.0)
    state = {name: value.clone() for name, value in history.state_dict().items()}
    resumed.load_state_dict(state)
    assert resumed.is_warm
    for _ in range(5):  # until the 5 leaves the window
        assert torch.equal(push(history, 1.0, 1.0), push(resumed, 1.0, 1.0))
    fresh = make_history()
    fresh.load_state_dict({})
    assert not fresh.is_warm


def test_scales_of_gradients_follow_the_batch() -> None:
    """The last slot is of an output gradient. A checkpoint's amaxes are made four times as large."""
    histories = [AmaxHistory(4, "max", power_of_two=False) for _ in range(2)]
    for history in histories:
        history.add_slot(E4M3)
        history.add_slot(E5M2, role=Role.GRAD_OUTPUT)
        history.allocate(torch.device("cpu"))
    saved, resumed = histories
    before = push(saved, 5.0, 3.0).clone()
    resumed.load_state_dict(saved.state_dict(), gradient_factor=4.0)
    assert resumed.scale is not None and resumed._fp_max is not None
    assert torch.equal(resumed.scale * resumed._fp_max, before * torch.tensor([1.0, 4.0]))
    assert torch.equal(push(resumed, 1.0, 1.0), torch.tensor([5.0, 12.0]))


def test_slots_are_told_apart() -> None:
    """Two of one role in a layer, and the same layer's other role; the same slots under other names."""
    history = make_history()
    assert len(set(history.slot_keys().tolist())) == history.num_slots
    renamed = make_history()
    assert torch.equal(renamed.slot_keys(), history.slot_keys())
    renamed.name_layers({"layers.1.fc1": range(renamed.num_slots)})
    assert not torch.equal(renamed.slot_keys(), history.slot_keys())
    assert len(set(renamed.slot_keys().tolist())) == renamed.num_slots


def _update_on_a_rank(group: torch.distributed.ProcessGroup) -> tuple[Tensor, Tensor]:
    history = make_history()
    assert history.amax is not None and history.scale is not None and history.history is not None
    history.amax.copy_(torch.tensor([[1.0, 8.0], [4.0, 2.0]])[group.rank()])
    history.update(group)
    return history.history[0], history.scale


def test_update_takes_the_maximum_over_the_group(ranks: RankPool) -> None:
    for newest, scale in ranks.run(on_default_group, _update_on_a_rank, num_ranks=2):
        assert torch.equal(newest, torch.tensor([4.0, 8.0]))
        assert torch.equal(scale, torch.tensor([4.0 / 448.0, 8.0 / 57344.0]))
