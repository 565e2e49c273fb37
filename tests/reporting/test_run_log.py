"""events.jsonl: marked log lines reach it whole; torn lines, full disks and unreadable folders end nothing."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from fp8_megatron.reporting.run_log import (
    EVENTS_FILE,
    EventKind,
    add_event,
    event,
    events_of_run,
    last_run,
    logging_events,
    read_events,
)

logger = logging.getLogger("fp8_megatron.some.module")


@pytest.fixture(autouse=True)
def log_everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_a_marked_line_is_an_event_with_time_step_and_the_console_text(tmp_path: Path) -> None:
    with logging_events(tmp_path, is_writer=True) as log:
        assert log is not None
        log.iteration = 7
        logger.info("saved %s", "x", extra=event(EventKind.SAVE, seconds=1.5))
        logger.info("nothing of note")
        logger.warning("skipped", extra=event(EventKind.SKIP, iteration=9, loss=str(float("nan"))))
    logger.info("after", extra=event(EventKind.STOP))
    saved, skipped = read_events(tmp_path / EVENTS_FILE)
    assert {**saved, "time": 0} == {"time": 0, "iteration": 7, "kind": "save", "seconds": 1.5, "text": "saved x"}
    assert (skipped["iteration"], skipped["loss"]) == (9, "nan")
    assert skipped["time"].endswith("+00:00") and skipped["time"] >= saved["time"]


def test_a_torn_last_line_is_left_out_and_ended_by_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / EVENTS_FILE
    add_event(tmp_path, EventKind.START, "one", iteration=0)
    with path.open("ab") as stream:
        stream.write(b'{"time": "2026-01-01T00:00:00", "kind": "sa')
    assert [found["text"] for found in read_events(path)] == ["one"]
    add_event(tmp_path, EventKind.RESUME, "two", iteration=3)
    assert [found["text"] for found in read_events(path)] == ["one", "two"]
    assert path.read_text().count("\n") == 3


def test_a_folder_that_cannot_be_written_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with logging_events(tmp_path / "file" / "below", is_writer=True):
        logger.info("first", extra=event(EventKind.SAVE))
    add_event(tmp_path / "file" / "below", EventKind.STOP, "the end", iteration=1)
    assert sum("events.jsonl" in message for message in caplog.messages) == 2


def test_what_is_no_event_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / EVENTS_FILE
    assert read_events(path) == []
    good = json.dumps({"time": "t", "kind": "start"})
    path.write_bytes(b"\n".join([b"[]", b"3", b"\xff\xfe", b"[" * 100_000, b'{"kind": 1}', good.encode(), b""]))
    assert read_events(path) == [json.loads(good)]


def test_events_belong_to_runs(tmp_path: Path) -> None:
    """Two runs take turns in one file. A lost rank's last words name only its launch."""
    for run, launch, text in (("a", "1", "one"), ("b", "2", "two"), ("a", "3", "three")):
        with logging_events(tmp_path, is_writer=True, run=run, launch=launch):
            logger.info("%s", text, extra=event(EventKind.RESUME))
    add_event(tmp_path, EventKind.FAULT, "lost", iteration=1, launch="2")
    add_event(tmp_path, EventKind.GIVE_UP, "the end", iteration=1)
    events = read_events(tmp_path / EVENTS_FILE)
    assert [found["run"] for found in events[:3]] == ["a", "b", "a"]
    assert last_run(events) == "a" and last_run([]) is None
    assert [found["text"] for found in events_of_run(events, "a")] == ["one", "three", "the end"]
    assert [found["text"] for found in events_of_run(events, "b")] == ["two", "lost"]
    assert events_of_run(events, "c") == []
