"""What the site does to pages that GitHub does not need.

Links that lead out of docs/ become plain names, and charts of benchmarks/results are copied.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_LINK_OUT = re.compile(r"(!?)\[((?:[^\]\[]|\[[^\]]*\])*)\]\(((?:\.\./)*)\.\./([^)\s]+)\)")
_CHARTS = re.compile(r"benchmarks/(results/[\w.-]+\.png)")


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the charts to the files of the site, as ``results/NAME.png``."""
    from mkdocs.structure.files import File

    root = Path(config["docs_dir"]).parent / "benchmarks"
    for chart in sorted(root.glob("results/*.png")):
        name = chart.relative_to(root).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(chart)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace ``[text](../path)`` by the text, and by its path from the repository's root where that says more."""
    return _LINK_OUT.sub(_named, markdown)


def _named(link: re.Match[str]) -> str:
    image, text, above, path = link.groups()
    if image:
        chart = _CHARTS.fullmatch(path)
        return f"![{text}]({above}{chart[1]})" if chart else f"`{path}`"
    return text if path.rsplit("/", 1)[-1] in text else f"{text} (`{path}`)"
