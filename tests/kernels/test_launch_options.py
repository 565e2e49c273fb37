"""What every launch of a Triton kernel says, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fp8_megatron

PACKAGE = Path(fp8_megatron.__file__).parent
MODULES = [path for path in sorted(PACKAGE.rglob("*triton.py")) if "import triton" in path.read_text()]


def launches(module: Path) -> Iterator[tuple[str, ast.Call]]:
    """The kernel's name and the call, of each ``kernel[grid](…)`` and ``PreparedLaunch(kernel, grid, …)``."""
    for call in ast.walk(ast.parse(module.read_text())):
        match call:
            case ast.Call(func=ast.Subscript(value=ast.Name(id=name), slice=ast.Tuple() | ast.Name(id="grid"))):
                yield name, call
            case ast.Call(func=ast.Name(id="PreparedLaunch"), args=[ast.Name(id=name), *_]):
                yield name, call


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_launch_says_whether_products_and_sums_fuse(module: Path) -> None:
    """Versions of Triton differ in what they do otherwise, and some warn."""
    unsaid = [
        f"{name} in line {call.lineno}"
        for name, call in launches(module)
        if "enable_fp_fusion" not in {keyword.arg for keyword in call.keywords}
    ]
    assert not unsaid


def test_launches_are_found() -> None:
    assert len({name for module in MODULES for name, _ in launches(module)}) > 40
