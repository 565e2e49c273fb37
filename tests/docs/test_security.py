"""Each sentence of the security page's lists names the tests that hold it."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "security.md"


def test_every_sentence_is_held_by_tests_that_exist() -> None:
    text = PAGE.read_text()
    items = re.findall(r"^- .*?(?=^- |^$|^#)", text, flags=re.MULTILINE | re.DOTALL)
    assert len(items) > 20
    for item in items:
        held = re.search(r"<!-- held: (.*?) -->", item, flags=re.DOTALL)
        assert held, f"no test holds: {item}"
        for name in held.group(1).split(", "):
            file, _, function = name.partition("::")
            source = (TESTS / file).read_text()
            assert not function or f"def {function}(" in source, name
