"""Which cuDNN is loaded beside Transformer Engine, and the warning about another one."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from fp8_megatron.device import cudnn


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Site-packages with PyTorch and Transformer Engine, in an environment without a cuDNN of the user's."""
    for name in cudnn.VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # what the test sets is gone after it
    monkeypatch.setattr(cudnn, "_home", None)
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def _broken_bundled(site: Path) -> Path:
    """A cuDNN beside PyTorch that nobody can load."""
    library = site / "nvidia" / "cudnn" / "lib" / "libcudnn.so.9"
    library.parent.mkdir(parents=True)
    library.touch()
    return library


def _library(path: Path, version: int, *linked: Path) -> None:
    """A shared library whose `<its stem>()` gives `version`, or that of the first library it is linked to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.name.partition(".")[0].removeprefix("lib")
    other = linked[0].name.partition(".")[0].removeprefix("lib") if linked else ""
    value = f"{other}()" if linked else version
    source = f"{f'int {other}(void);' if linked else ''} int {name}(void) {{ return {value}; }}"
    flags = ["-shared", "-fPIC", "-x", "c", "-", f"-Wl,-soname,{path.name}", "-o", str(path), "-x", "none"]
    linking = [*map(str, linked), *(f"-Wl,-rpath,{library.parent}" for library in linked)]
    subprocess.run(["cc", *flags, *linking], input=source, text=True, check=True)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("folder", ["cudnn", "cu13"])
def test_linked_to_the_systems_it_runs_the_bundled(home: Path, folder: str) -> None:
    """As Transformer Engine's library is linked; the names are this test's own, so that no other library has them."""
    graph, adv, engine = f"libcudnn_graph.so.{folder}", f"libcudnn_adv.so.{folder}", f"libengine.so.{folder}"
    bundled, of_system = home / "nvidia" / folder / "lib", home / "system"
    _library(bundled / graph, 91900)
    _library(of_system / graph, 91400)
    _library(bundled / adv, 0, of_system / graph)  # as LD_LIBRARY_PATH would lead it
    _library(home / engine, 0, of_system / graph)
    cudnn.load_bundled()
    assert ctypes.CDLL(str(home / engine)).engine() == 91900
    assert os.environ["CUDNN_HOME"] == str(bundled.parent)
    assert "CUDNN_HOME" not in cudnn.users_environment() and "PATH" in cudnn.users_environment()


@pytest.mark.parametrize("missing", ["nvidia", "transformer_engine"])
def test_does_nothing_without_either(home: Path, missing: str) -> None:
    if missing == "transformer_engine":
        shutil.rmtree(home / "transformer_engine")
        _broken_bundled(home)
    cudnn.load_bundled()
    assert not any(name in os.environ for name in cudnn.VARIABLES)


def test_a_library_that_cannot_be_loaded_is_passed_over(home: Path) -> None:
    _broken_bundled(home)
    cudnn.load_bundled()
    assert os.environ["CUDNN_HOME"] == str(home / "nvidia" / "cudnn")
    assert cudnn.fix() == "take the other cuDNN out of LD_LIBRARY_PATH"
