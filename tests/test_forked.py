"""Programs in forks: what they are told, how they end, and what happens to those that do not."""

from __future__ import annotations

import os
from concurrent.futures import Executor
from functools import partial
from pathlib import Path

import pytest

from tests.harness.forked import Ending, run_forked, run_python

#: Ends with status 7 when it is asked to.
SLEEPER = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); time.sleep(100)"


def ending_of(
    forks: Executor, folder: Path, words: list[str], seconds: float = 60.0, more_seconds: float = 0.0
) -> Ending:
    program = partial(run_python, words, {**os.environ, "OF_THE_TEST": "here"})
    limits = {"folder": folder, "seconds": seconds, "more_seconds": more_seconds, "address_bytes": 1 << 32}
    return forks.submit(run_forked, program, **limits).result()


@pytest.mark.parametrize("words", [["of_a_test.py"], ["-m", "of_a_test"], ["-c", "from of_a_test import main; main()"]])
def test_a_program_is_told_and_ends_as_python_would(forks: Executor, tmp_path: Path, words: list[str]) -> None:
    code = "def main():\n    print(sys.argv[1:], os.environ['OF_THE_TEST'])\n    sys.exit(3)\n"
    (tmp_path / "of_a_test.py").write_text(f"import os, sys\n{code}if __name__ == '__main__':\n    main()\n")
    ending = ending_of(forks, tmp_path, [*words, "word", "--flag"])
    assert (ending.status, ending.output, ending.errors) == (3, "['word', '--flag'] here\n", "")


def test_an_error_is_no_success(forks: Executor, tmp_path: Path) -> None:
    ending = ending_of(forks, tmp_path, ["-c", "print(1 / 0)"])
    assert ending.status and "ZeroDivisionError" in ending.errors


@pytest.mark.parametrize(("more_seconds", "status"), [(0.0, None), (60.0, 7)])
def test_who_does_not_end_is_asked_to_or_killed(
    forks: Executor, tmp_path: Path, more_seconds: float, status: int | None
) -> None:
    assert ending_of(forks, tmp_path, ["-c", SLEEPER], 2.0, more_seconds).status == status
