"""The table of mistakes and faults in docs/failures.md claims no case that no test tries."""

from __future__ import annotations

import pytest

from tests.docs.clumsy_cases import CLASSES, CaseClass, Collected, cases, documented
from tests.docs.conftest import COLLECTED


def test_every_class_has_its_row() -> None:
    assert list(documented()) == [*(one.name for one in CLASSES), "all"]


def test_the_last_row_is_the_sum() -> None:
    *rows, total = documented().values()
    assert total == (sum(fast for fast, _ in rows), sum(slow for _, slow in rows))


@pytest.mark.parametrize("one", CLASSES, ids=lambda one: one.name)
def test_every_case_is_tried(one: CaseClass, request: pytest.FixtureRequest) -> None:
    """The tests of a class have at least as many cases as the table says. All its files must have been collected."""
    found = request.config.stash[COLLECTED]
    files = {test.node.split("::")[0] for test in found}
    if not {name.split("::")[0] for name in one.tests} <= files:
        pytest.skip("not all files of this class are collected")
    fast, slow = cases(one, found)
    claimed = documented()[one.name]
    assert fast >= claimed[0] and slow >= claimed[1], f"{(fast, slow)}: run python -m tests.docs.clumsy_cases"


def test_a_test_that_is_gone_is_noticed() -> None:
    found = [Collected("tests/a.py::test_b[x]", False), Collected("tests/a.py::test_b[y]", True)]
    assert cases(CaseClass("", "", ("tests/a.py::test_b",)), found) == (1, 1)
    with pytest.raises(LookupError, match=r"tests/a.py::test_c is no test"):
        cases(CaseClass("", "", ("tests/a.py", "tests/a.py::test_c")), found)
