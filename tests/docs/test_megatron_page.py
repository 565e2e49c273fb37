"""docs/from-megatron.md has the tables of the options as they are."""

from __future__ import annotations

from tests.docs.megatron_page import PAGE, written


def test_the_tables_are_those_of_the_options() -> None:
    assert PAGE.read_text(encoding="utf-8") == written(), "run python -m tests.docs.megatron_page"
