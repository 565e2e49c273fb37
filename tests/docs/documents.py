"""Parts of Markdown for the tests of the documents: sections, links, anchors, tagged blocks, quoted figures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = sorted(
    path
    for path in (
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "benchmarks").rglob("*.md"),
    )
    if path.is_file()
)

_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_HEADING = re.compile(r"^(#{1,6}) (.+)$", re.MULTILINE)
_LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)")
_FIGURES = re.compile(r"<!-- figures:?\s(.*?)-->", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.,-])[-−+]?\d(?:[\d,]*\d)?(?:\.\d+)?(?!\w)")


def name_of(page: Path) -> str:
    """A page's path from the repository's root, as a test's id."""
    return str(page.relative_to(ROOT))


def without_code(text: str) -> str:
    """A page's text without fenced blocks and comments."""
    return _COMMENT.sub("", _FENCE.sub("", text))


def links(page: Path) -> list[str]:
    """Targets of a page's links and images."""
    return _LINK.findall(without_code(page.read_text()))


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and the site make them."""
    text = _FENCE.sub("", page.read_text())
    return {_slug(heading) for _, heading in _HEADING.findall(text)}


def _slug(heading: str) -> str:
    plain = re.sub(r"[^\w\s-]", "", heading.replace("`", "").lower())
    return re.sub(r"\s", "-", plain.strip())


@dataclass(frozen=True)
class Block:
    """A fenced block and the comment right above it: ``run: …``, ``gpu``, ``ci`` or ``shown: why``."""

    page: Path
    language: str
    text: str
    tag: str | None

    @property
    def id(self) -> str:
        """Page and first line."""
        return f"{name_of(self.page)}: {self.text.splitlines()[0][:60]}"


def blocks(page: Path, language: str) -> list[Block]:
    """A page's fenced blocks of one language, in order."""
    text = page.read_text()
    found = []
    for fence in _FENCE.finditer(text):
        if fence[1] == language:
            tag = re.search(r"<!-- ((?:run|gpu|ci|shown)\b[^\n]*) -->\n\Z", text[: fence.start()])
            found.append(Block(page, language, fence[2], tag and tag[1]))
    return found


def commands(script: str) -> list[str]:
    """Commands of a shell block: continued lines joined, comments dropped."""
    joined = re.sub(r"\\\n\s*", " ", script)
    lines = (re.sub(r"(^|\s)#.*$", "", line).strip() for line in joined.splitlines())
    return [line for line in lines if line]


@dataclass(frozen=True)
class Figure:
    """A number that a page quotes and where it stands in benchmarks/results."""

    quoted: str
    source: str
    value: float

    def matches(self) -> bool:
        """Whether the value, rounded to the quoted digits, equals the quoted one."""
        text = self.quoted.replace(",", "").replace("−", "-")
        decimals = len(text.partition(".")[2])
        return abs(self.value - float(text)) <= 0.5 * 10.0**-decimals * (1 + 1e-9)


@dataclass(frozen=True)
class Section:
    """A part of a page between two headings: its visible text and the figures that its comments name."""

    title: str
    text: str
    figures: list[Figure]
    inputs: frozenset[str]


def sections(page: Path) -> list[Section]:
    """A page's sections, nested ones apart."""
    text = _FENCE.sub("", page.read_text())
    starts = [(match.start(), match[2]) for match in _HEADING.finditer(text)]
    ends = [start for start, _ in starts[1:]] + [len(text)]
    found = []
    for (start, title), end in zip(starts, ends, strict=True):
        body = text[start:end]
        figures, inputs = [], set[str]()
        for comment in _FIGURES.findall(body):
            more, given = parse_figures(comment)
            figures += more
            inputs |= given
        found.append(Section(title, _COMMENT.sub("", body), figures, frozenset(inputs)))
    return found


def parse_figures(comment: str) -> tuple[list[Figure], set[str]]:
    """The lines of a ``figures`` comment; a ``;`` separates two on one line.

    ``FILE.json`` opens a file of benchmarks/results; ``PATH: key=quoted …`` names numbers below a path;
    ``PATH = quoted`` names one, ``PATH over PATH = quoted`` a ratio, ``100 × PATH over PATH`` a percentage;
    ``inputs: …`` lists numbers that are settings and no results.
    A path's segments are separated by ``/``: a key, an index, or the ``name`` or ``run`` of a list's element.
    """
    figures, inputs = [], set[str]()
    document: Any = None
    file = ""
    for line in filter(None, map(str.strip, re.split(r"\n|;", comment))):
        if line.endswith(".json"):
            file, document = line, json.loads((RESULTS / line).read_text())
        elif line.startswith("inputs:"):
            inputs.update(line.removeprefix("inputs:").split())
        elif " = " in line:
            paths, _, quoted = line.rpartition(" = ")
            ratio = paths.removeprefix("100 × ")
            above, _, below = ratio.partition(" over ")
            value = (1 if ratio == paths else 100) * at(document, above)
            figures.append(Figure(quoted, f"{file}: {paths}", value / at(document, below) if below else value))
        else:
            path, _, pairs = line.rpartition(": ")
            for pair in pairs.split():
                key, _, quoted = pair.partition("=")
                source = f"{path}/{key}" if path else key
                figures.append(Figure(quoted, f"{file}: {source}", at(document, source)))
    return figures, inputs


def at(document: Any, path: str) -> float:
    """The number at a path.

    Raises:
        KeyError: a segment names nothing.
    """
    for segment in path.strip().split("/"):
        if isinstance(document, list):
            named = [
                item for item in document if isinstance(item, dict) and segment in (item.get("name"), item.get("run"))
            ]
            if named:
                document = named[0]
            elif segment.lstrip("-").isdigit():
                document = document[int(segment)]
            else:
                raise KeyError(f"no element '{segment}' (of '{path}')")
        elif segment in document:
            document = document[segment]
        else:
            raise KeyError(f"no key '{segment}' (of '{path}') among {list(document)[:12]}")
    assert isinstance(document, int | float), f"'{path}' is {type(document).__name__}, no number"
    return float(document)


def table_numbers(text: str) -> Iterator[str]:
    """Numbers in a section's tables that a result could be: with a decimal point, or of three digits."""
    for line in text.splitlines():
        if line.startswith("|"):
            for match in _NUMBER.finditer(re.sub(r"`[^`]*`", "", line)):
                if "." in match[0] or len(re.sub(r"\D", "", match[0])) >= 3:
                    yield match[0]


def prose_numbers(text: str) -> Iterator[str]:
    """Numbers with a unit of measurement in a section's sentences."""
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
    unit = r"(?:\s(?:tokens/s|GB\b|ms\b|µs\b|TFLOP/s|×(?! \d)|dB\b)|%)"
    for match in re.finditer(rf"({_NUMBER.pattern}){unit}", re.sub(r"`[^`]*`", "", prose)):
        yield match[1]
