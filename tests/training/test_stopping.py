"""Signals become a flag, and runs of skipped steps an error that says what to try."""

from __future__ import annotations

import os
import signal

import pytest

from fp8_megatron.training.stopping import NonFiniteGuard, SignalHandler, TrainingDiverged


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_sets_the_flag(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_DFL)  # these tests may run under nohup
    try:
        with SignalHandler() as handler:
            assert not handler.received()
            os.kill(os.getpid(), number)
            assert handler.received()
    finally:
        signal.signal(number, before)


def test_an_interrupt_is_taken_where_a_shell_ignores_it_for_background_jobs() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with SignalHandler() as handler:
            os.kill(os.getpid(), signal.SIGINT)
            assert handler.received()
    finally:
        signal.signal(signal.SIGINT, before)


def test_second_interrupt_raises_even_after_a_sigterm_between() -> None:
    with SignalHandler() as handler:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert handler.received()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_repeated_sigterm_does_not_raise() -> None:
    with SignalHandler() as handler:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert handler.received()


def test_a_signal_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalHandler() as handler:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not handler.received()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_previous_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with SignalHandler():
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_guard_raises_at_the_limit_of_consecutive_skips() -> None:
    guard = NonFiniteGuard(3)
    for iteration in (11, 12):
        guard.update(True, iteration=iteration)
    with pytest.raises(TrainingDiverged, match=r"last 3 steps \(iterations 11 to 13; 3 skipped steps in all.*--lr"):
        guard.update(True, iteration=13)


def test_a_good_step_restarts_the_consecutive_count_but_not_the_total() -> None:
    guard = NonFiniteGuard(2, num_skipped=5)
    for iteration, skipped in enumerate([True, False, True, False], start=1):
        guard.update(skipped, iteration=iteration)
    assert (guard.num_skipped, guard.num_consecutive) == (7, 0)
