"""The distribution `ms-amp`, installed from compat/ into a temporary folder as a user would install it."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAND_INS = Path(__file__).parent / "stand_ins"


@pytest.fixture(scope="session")
def msamp_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds the installed module and its metadata."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "compat", source, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", str(site), str(source)], check=True, capture_output=True, text=True)
    return site


@pytest.fixture
def msamp(msamp_site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """The module `msamp`, importable during the test."""
    monkeypatch.syspath_prepend(str(msamp_site))
    yield importlib.import_module("msamp")


@pytest.fixture
def script_environment(msamp_site: Path) -> dict[str, str]:
    """For a program in a process of its own: `msamp`, this package and the stand-ins, on the CPU."""
    folders = [str(STAND_INS), str(msamp_site), str(ROOT)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout of MS-AMP without its module: its examples and tests. MSAMP_REPOSITORY may name a clone."""
    clone = os.environ.get("MSAMP_REPOSITORY", "https://github.com/Azure/MS-AMP")
    folder = tmp_path_factory.mktemp("original") / "MS-AMP"
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    try:
        subprocess.run(
            ["git", "clone", "--quiet", "--depth", "1", clone, str(folder)],
            check=True,
            capture_output=True,
            timeout=60,
            env=environment,
        )
    except (subprocess.SubprocessError, OSError):
        pytest.skip(f"cannot clone {clone}; MSAMP_REPOSITORY names another place")
    shutil.rmtree(folder / "msamp")
    return folder
