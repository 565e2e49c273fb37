"""The site's changes to pages that GitHub shows unchanged, and that every page is in its menu."""

from __future__ import annotations

import re

import pytest

from docs.site_hooks import on_page_markdown
from tests.docs.documents import ROOT


@pytest.mark.parametrize(
    ("markdown", "shown"),
    [
        ("see [design](design.md)", "see [design](design.md)"),
        ("[`a.json`](../benchmarks/results/a.json)", "`a.json`"),
        ("[the results](../benchmarks/results/README.md).", "the results (`benchmarks/results/README.md`)."),
        ("![chart](../benchmarks/results/a.png)", "![chart](results/a.png)"),
        ("![icon](../tools/a.png)", "`tools/a.png`"),
    ],
)
def test_links_out_of_the_site_become_names(markdown: str, shown: str) -> None:
    assert on_page_markdown(markdown) == shown


def test_every_page_is_in_the_menu() -> None:
    menu = set(re.findall(r": ([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert pages == menu
