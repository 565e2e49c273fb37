"""benchmarks/before_after.py: what it calls alike, and how it ends."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "before_after.py"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("before_after", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "before_after", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _steps(loss: float) -> list[dict[str, Any]]:
    return [{"loss": loss, "grad_norm": 1.0, "step_seconds": 0.5, "peak_memory_gib": 2.0}] * 8


@pytest.mark.parametrize(("loss", "status"), [(3.0, 0), (3.0 + 2**-22, 1)])
def test_one_bit_of_one_loss_is_a_difference(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, loss: float, status: int
) -> None:
    steps = {"change": _steps(3.0), "base": _steps(loss)}

    def run_case(tree: Path, *unused: Any, **unused_kwargs: Any) -> list[dict[str, Any]]:
        return steps["change" if tree == program.ROOT else "base"]

    monkeypatch.setattr(program, "run_case", run_case)
    monkeypatch.setattr(sys, "argv", ["before_after.py", "--base", "HEAD", "--only", "fast"])
    assert program.main() == status


def test_an_unknown_case_is_refused(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["before_after.py", "--base", "HEAD", "--only", "fats"])
    with pytest.raises(SystemExit):
        program.main()
    assert "--only fats: --cases cpu has tensorwise, fast" in capsys.readouterr().err


@pytest.mark.slow
def test_a_tree_agrees_with_itself(program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    case = next(case for case in program.CASES["cpu"] if case.name == "fast")
    row = program.compare_case(case, {"base": program.ROOT, "change": program.ROOT}, tmp_path, on_cpu=True)
    assert row.losses_alike and len(row.step_ms) == 2
