"""What a restarted job says of the attempts before it, and when it gives up."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from fp8_megatron.reporting.run_log import EVENTS_FILE, EventKind, add_event, logging_events, read_events
from fp8_megatron.watch.restarts import SAME_FAULT_LIMIT, Fault, GaveUp, Launch, begin_attempt, log_fault

LAUNCH = "job1"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", LAUNCH)
    caplog.set_level(logging.INFO)


def begin(folder: Path, *, num_nodes: int = 1, launch: str = LAUNCH, saves: bool = True) -> None:
    with logging_events(folder, is_writer=True):
        begin_attempt(folder, Launch(launch, 5, num_nodes), saves=saves, saves_by_interval=saves)


def fail(folder: Path, *, iteration: int = 8, host: str = "node7") -> None:
    log_fault(folder, Fault.RANK_LOST, "rank 1 is silent\nmore", iteration=iteration, hosts={1: host})


def kinds(folder: Path) -> list[str]:
    return [found["kind"] for found in read_events(folder / EVENTS_FILE)]


def test_a_first_attempt_says_nothing_and_warns_where_a_restart_begins_from_scratch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begin(tmp_path)
    assert caplog.messages == [] and kinds(tmp_path) == []
    begin(tmp_path, saves=False)
    assert caplog.messages == ["restarts(5) without --save begin from scratch: give --save"]


def test_a_restart_says_what_happened_and_names_a_host_that_failed_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fail(tmp_path, iteration=5)
    begin(tmp_path)
    assert caplog.messages == ["restart 1 of at most 5, after: rank 1 is silent"]
    fail(tmp_path, iteration=9)
    caplog.clear()
    begin(tmp_path, num_nodes=2)
    assert caplog.messages == [
        "restart 2 of at most 5, after: rank 1 is silent",
        "host node7 had 2 faults in this job; leave it out (Slurm: sbatch --exclude=node7)",
    ]
    assert kinds(tmp_path) == ["fault", "restart", "fault", "restart"]
    fault = read_events(tmp_path / EVENTS_FILE)[2]
    assert (fault["iteration"], fault["ranks"], fault["hosts"]) == (9, [1], ["node7"])


def test_an_attempt_that_ended_without_a_word_is_a_fault_too(tmp_path: Path) -> None:
    add_event(tmp_path, EventKind.START, "training starts", iteration=0, launch=LAUNCH)
    add_event(tmp_path, EventKind.SAVE, "saved iteration 4", iteration=4)
    begin(tmp_path)
    vanished, restart = read_events(tmp_path / EVENTS_FILE)[2:]
    assert (vanished["fault"], vanished["iteration"]) == ("vanished", 4)
    assert "their last event was: saved iteration 4" in restart["text"]
    begin(tmp_path)
    assert kinds(tmp_path)[4:] == ["fault", "restart"]


def test_the_same_fault_at_the_same_iteration_ends_the_job_with_a_report(tmp_path: Path) -> None:
    for number in range(SAME_FAULT_LIMIT - 1):
        fail(tmp_path, host=f"node{number}")
        begin(tmp_path)
    fail(tmp_path, host="node0")
    with pytest.raises(GaveUp) as caught:
        begin(tmp_path)
    first, *rest = str(caught.value).splitlines()
    assert first.startswith("no more restarts: iteration 8 failed 3 times in the same way (rank_lost); mend the cause")
    assert [line[21:] for line in rest[:3]] == [" iteration 8: rank 1 is silent"] * 3
    assert rest[3:] == ["host node0 had 2 faults in this job"]
    assert kinds(tmp_path)[-1] == "give_up"
    with pytest.raises(GaveUp):  # torchrun starts it again all the same
        begin(tmp_path)
    assert kinds(tmp_path)[-2:] == ["restart", "give_up"]


@pytest.mark.parametrize("changed", ["iteration", "launch"])
def test_other_faults_do_not_add_up(tmp_path: Path, changed: str) -> None:
    for number in range(2 * SAME_FAULT_LIMIT):
        fail(tmp_path, iteration=number if changed == "iteration" else 8)
    begin(tmp_path, launch=LAUNCH if changed == "iteration" else "job2")
