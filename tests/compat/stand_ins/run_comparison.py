"""Runs a script of Accelerate's FP8 comparison on a CPU: python -m run_comparison script.py

`FP8RecipeKwargs(backend="msamp")` of Accelerate 1.15 asks for Transformer Engine, whatever the backend. It is replaced
by `MSAMPRecipeKwargs`, the class that its deprecation names.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

import accelerate.utils
import cuda_on_cpu


def _msamp_recipe(backend: str, opt_level: str) -> Any:
    assert backend == "msamp", backend
    return accelerate.utils.MSAMPRecipeKwargs(opt_level=opt_level)


if __name__ == "__main__":
    cuda_on_cpu.install()
    accelerate.utils.FP8RecipeKwargs = _msamp_recipe
    sys.argv = sys.argv[1:]
    sys.path.insert(0, "")
    runpy.run_path(sys.argv[0], run_name="__main__")
