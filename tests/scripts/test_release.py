"""The steps of the release workflow that change files or refuse a tag."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import fp8_megatron
from tests.docs.documents import ROOT, links

_WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())


def run_step(begin: str, folder: Path, tag: str) -> int:
    """Run the step whose name begins so; its exit status."""
    steps = _WORKFLOW["jobs"]["build"]["steps"]
    script = next(step["run"] for step in steps if step.get("name", "").startswith(begin))
    github = {"GITHUB_REF_NAME": tag, "GITHUB_SERVER_URL": "https://host", "GITHUB_REPOSITORY": "owner/name"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, **github, "PATH": path, "PYTHONPATH": str(ROOT)}
    return subprocess.run(["bash", "-ec", script], cwd=folder, env=environment, timeout=60, check=False).returncode


def test_links_lead_to_the_repository(tmp_path: Path) -> None:
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    before = links(tmp_path / "README.md")
    assert run_step("Links", tmp_path, "v1") == 0
    for old, new in zip(before, links(tmp_path / "README.md"), strict=True):
        if old.startswith(("https://", "#")):
            assert new == old
        else:
            assert new == f"https://host/owner/name/{'raw' if old.endswith('.png') else 'blob'}/v1/{old}"
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert project["urls"]["Repository"] == "https://host/owner/name"


@pytest.mark.parametrize(("tag", "status"), [(f"v{fp8_megatron.__version__}", 0), ("v0.0.0", 1)])
def test_a_tag_names_the_version(tag: str, status: int, tmp_path: Path) -> None:
    assert run_step("The tag", tmp_path, tag) == status


def test_the_wheel_has_every_file_of_the_package() -> None:
    """Also those behind links, which setuptools takes by name."""
    package = ROOT / "fp8_megatron"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["fp8_megatron"]
    named = {path for pattern in patterns for path in package.glob(pattern)}
    files = {Path(folder, name) for folder, _, names in os.walk(package, followlinks=True) for name in names}
    assert {path for path in files if path.suffix not in (".py", ".pyc")} == named
