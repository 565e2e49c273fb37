"""Links of README.md and docs/ lead somewhere: files and headings exist, paths in backticks too."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.docs.documents import PAGES, RESULTS, ROOT, anchors, links, name_of, without_code

#: Files that a page names and that are not here: the peer of older results.
_ELSEWHERE = {"megatron_te.py"}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    broken = []
    for link in links(page):
        if re.match(r"https?:|mailto:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@pytest.fixture(scope="module")
def file_names() -> set[str]:
    """Names of the repository's source files."""
    rooms = ("benchmarks", "csrc", "docs", "fp8_megatron", "scripts", "tests", "tools")
    return {path.name for room in rooms for path in (ROOT / room).rglob("*.*")} | {
        path.name for path in ROOT.glob("*.*")
    }


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_files_exist(page: Path, file_names: set[str]) -> None:
    """Paths count from the root or from the package; a name alone is that of some file."""
    missing = []
    for path in re.findall(r"`([\w./-]+\.(?:py|cu|sh))\b[^`]*`", without_code(page.read_text())):
        if "/" not in path:
            exists = path in file_names
        else:
            exists = (ROOT / path).exists() or (ROOT / "fp8_megatron" / path).exists()
        if not exists and path not in _ELSEWHERE:
            missing.append(path)
    assert not missing


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_performance_is_short() -> None:
    assert len((ROOT / "docs" / "performance.md").read_text().splitlines()) <= 300


def test_every_result_is_described() -> None:
    about = (RESULTS / "README.md").read_text()
    assert [path.name for path in sorted(RESULTS.glob("*.json")) if path.name not in about] == []


@pytest.fixture(scope="module")
def commits() -> list[str]:
    """Full hashes of this repository's commits."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout

    if git("rev-parse", "--is-shallow-repository").strip() != "false":
        pytest.skip("no whole git history here")
    return git("rev-list", "--all").split()


_HASH = r"(?<![\w.,/-])(?=[0-9]*[a-f])(?=[a-f]*[0-9])([0-9a-f]{7,40})(?![\w.])"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_commits_exist(page: Path, commits: list[str]) -> None:
    named = re.findall(_HASH, page.read_text())
    assert [commit for commit in named if not any(full.startswith(commit) for full in commits)] == []


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_results_name_commits_that_exist(path: Path, commits: list[str]) -> None:
    fields = re.findall(r'"commit": "([^"]*)"', path.read_text())
    named = [commit for field in fields for commit in re.findall(_HASH, field)]
    assert [commit for commit in named if not any(full.startswith(commit) for full in commits)] == []
