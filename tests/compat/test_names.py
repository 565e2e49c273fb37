"""Which names `msamp` gives, what it refuses and that it leaves torch alone."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import ModuleType

import pytest

#: Every public name of MS-AMP 0.4 that is not here, by module.
REFUSED = {
    "msamp.common.tensor": ["HookManager", "TensorDist"],
    "msamp.common.utils": [],
    "msamp.megatron": [],
    "msamp.nn": ["ScalingModule", "ScalingParameter", "model_state"],
    "msamp.operators.dist_op": [],
    "msamp.operators.fp4_quantize": [],
    "msamp.optim": ["LBOptimizer"],
}


@pytest.mark.parametrize("module", REFUSED)
def test_what_is_not_provided_says_why(msamp: ModuleType, module: str) -> None:
    names = REFUSED[module]
    if not names:
        with pytest.raises(ImportError, match=rf"{module} is not provided: .{{20}}"):
            importlib.import_module(module)
    for name in names:
        with pytest.raises(ImportError, match=rf"{module}\.{name} is not provided: .{{20}}"):
            getattr(importlib.import_module(module), name)


def test_other_names_are_no_attributes(msamp: ModuleType) -> None:
    assert not hasattr(importlib.import_module("msamp.common.tensor"), "Nonsense")


def test_importing_it_changes_nothing_of_torch(script_environment: dict[str, str]) -> None:
    """No attribute of torch, its Tensor or its distributed package is added or replaced."""
    program = """
import torch, torch.distributed, torch.nn.parallel, torch.nn.functional
owners = [torch, torch.Tensor, torch.nn.functional, torch.nn.parallel, torch.distributed, torch.nn.Module, torch.optim]
before = [dict(vars(owner)) for owner in owners]
import msamp, msamp.common.tensor, msamp.nn, msamp.optim, msamp.operators.arithmetic, msamp.operators.gemm
for owner, old in zip(owners, before):
    changed = [name for name, value in vars(owner).items() if old.get(name) is not value]
    assert not [name for name in changed if name not in ("_dynamo", "_inductor", "onnx")], (owner, changed)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=script_environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
