"""What the site does to pages that GitHub does not need: links that lead out of docs/ become plain names."""

from __future__ import annotations

import re
from typing import Any

_LINK_OUT = re.compile(r"(!?)\[((?:[^\]\[]|\[[^\]]*\])*)\]\((?:\.\./)+([^)\s]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace ``[text](../path)`` by the text, and by its path from the repository's root where that says more."""
    return _LINK_OUT.sub(_named, markdown)


def _named(link: re.Match[str]) -> str:
    image, text, path = link.groups()
    if image:
        return f"`{path}`"
    return text if path.rsplit("/", 1)[-1] in text else f"{text} (`{path}`)"
