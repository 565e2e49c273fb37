"""Two routines run in one order, whatever their threads do, and the error of one ends both."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Thread, active_count

import pytest

from fp8_megatron.collectives.turns import Turns


def routine(
    turns: Turns, events: list[str], name: str, steps: int, *, fails_at: int | None = None
) -> Callable[[], str]:
    """Notes each of its steps, and waits behind all but the last."""

    def run() -> str:
        for step in range(steps):
            if step == fails_at:
                raise ValueError(f"{name} cannot")
            events.append(f"{name}{step}")
            if step < steps - 1:
                turns.exchange().wait()
        return name

    return run


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (3, 3, "a0 b0 a1 b1 a2 b2"),
        (2, 4, "a0 b0 a1 b1 b2 b3"),
        (4, 2, "a0 b0 a1 b1 a2 a3"),
        (1, 3, "a0 b0 b1 b2"),
        (3, 1, "a0 b0 a1 a2"),
    ],
)
def test_they_alternate_until_one_is_over(first: int, second: int, expected: str) -> None:
    turns, events = Turns(), list[str]()
    for _ in range(2):
        result = turns.alternate(routine(turns, events, "a", first), routine(turns, events, "b", second))
        assert result == "a"
    assert " ".join(events) == f"{expected} {expected}"


def test_outside_there_is_nobody_to_wait_for() -> None:
    turns = Turns()
    before = turns.exchange()
    before.wait()
    turns.alternate(before.wait, lambda: None)
    turns.exchange().wait()


def test_exchanges_that_a_turn_has_covered_are_not_waited_for_again() -> None:
    turns, events = Turns(), list[str]()

    def first() -> None:
        one, two = turns.exchange(), turns.exchange()
        events.append("a0")
        two.wait()
        events.append("a1")
        one.wait()
        three = turns.exchange()
        events.append("a2")
        one.wait()
        three.wait()
        three.wait()
        events.append("a3")

    turns.alternate(first, routine(turns, events, "b", 4))
    assert " ".join(events) == "a0 b0 a1 a2 b1 a3 b2 b3"


def test_threads_of_the_second_routine_belong_to_it() -> None:
    """As autograd's does on CUDA. The first routine is slow: only its wait lets the other one go on."""
    turns, events = Turns(), list[str]()

    def second() -> None:
        thread = Thread(target=routine(turns, events, "b", 2))
        thread.start()
        thread.join()

    def first() -> None:
        for step in range(3):
            time.sleep(0.02)
            events.append(f"a{step}")
            turns.exchange().wait()

    turns.alternate(first, second)
    assert events == ["a0", "b0", "a1", "b1", "a2"]


@pytest.mark.parametrize(
    ("failing", "steps", "fails_at", "expected"),
    [
        ("a", 3, 0, ""),
        ("a", 3, 2, "a0 b0 a1 b1"),
        ("b", 3, 0, "a0"),
        ("b", 3, 1, "a0 b0 a1"),
        ("b", 5, 4, "a0 b0 a1 b1 a2 b2 b3"),  # the first one is over
    ],
)
def test_an_error_ends_both(failing: str, steps: int, fails_at: int, expected: str) -> None:
    turns, events, threads = Turns(), list[str](), active_count()
    cases = {name: (steps, fails_at) if name == failing else (3, None) for name in "ab"}
    routines = [routine(turns, events, name, count, fails_at=last) for name, (count, last) in cases.items()]
    with pytest.raises(ValueError, match=f"^{failing} cannot$"):
        turns.alternate(*routines)
    assert " ".join(events) == expected and active_count() == threads
    assert turns.alternate(routine(turns, events, "a", 2), routine(turns, events, "b", 2)) == "a"
