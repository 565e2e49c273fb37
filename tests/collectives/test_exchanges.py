"""When recordings begin and end, and what a launch does around its replay."""

from __future__ import annotations

import pytest
import torch

from fp8_megatron.graphs import exchanges
from fp8_megatron.graphs.exchanges import Recordable


def test_everybody_counts_anew_inside_a_recording_alone(recordables: dict[str, Recordable]) -> None:
    events: list[str] = []
    for name in "ab":
        exchanges.register(
            name,
            Recordable(
                begin=lambda name=name: events.append(f"{name} begins"),
                end=lambda name=name: events.append(f"{name} ends"),
                places=torch.zeros(2),
                meet=lambda: None,
            ),
        )
    assert not exchanges.is_recording()
    with pytest.raises(ZeroDivisionError), exchanges.recording():
        assert exchanges.is_recording()
        events.append("recorded")
        raise ZeroDivisionError
    assert not exchanges.is_recording()
    assert events == ["a begins", "b begins", "recorded", "a ends", "b ends"]


def test_what_is_forgotten_is_not_met(recordables: dict[str, Recordable]) -> None:
    def refuse() -> None:
        raise AssertionError

    exchanges.register("a", Recordable(begin=refuse, end=refuse, places=torch.zeros(1), meet=refuse))
    exchanges.forget("a")
    exchanges.forget("b")
    with exchanges.recording():
        pass
    exchanges.launch(lambda: None)


def test_a_launch_meets_the_others_before_and_after(recordables: dict[str, Recordable]) -> None:
    """No rank writes to a place before its owner has reset it, and no later work starts during the launch."""
    events: list[str] = []
    places = [torch.ones(2), torch.ones(2)]
    for name, own in zip("ab", places, strict=True):
        exchanges.register(
            name,
            Recordable(
                begin=lambda: None,
                end=lambda: None,
                places=own,
                meet=lambda own=own: events.append(f"met at {own.tolist()}"),
            ),
        )

    def replay() -> None:
        events.append(f"replayed at {torch.cat(places).tolist()}")
        for own in places:
            own.fill_(7)

    for _ in range(2):
        events.clear()
        exchanges.launch(replay)
        assert events == [
            "met at [0.0, 0.0]",
            "met at [0.0, 0.0]",
            "replayed at [0.0, 0.0, 0.0, 0.0]",
            "met at [7.0, 7.0]",
            "met at [7.0, 7.0]",
        ]
