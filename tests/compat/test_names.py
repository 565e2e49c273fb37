"""Which names `msamp` gives, what it refuses and that it leaves torch alone."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import ModuleType

import pytest

#: Every module of MS-AMP 0.4 with the public classes and functions that live in it and are here.
PROVIDED = {
    "msamp": ["initialize", "clip_grad_norm_"],
    "msamp.common.dtype": ["Dtypes", "Floating", "QType"],
    "msamp.common.dtype.dtypes": ["Dtypes", "QType"],
    "msamp.common.dtype.floating": ["Floating"],
    "msamp.common.tensor": ["ScalingMeta", "ScalingTensor", "TypeCast"],
    "msamp.common.tensor.cast": ["TypeCast"],
    "msamp.common.tensor.meta": ["ScalingMeta"],
    "msamp.common.tensor.tensor": ["ScalingTensor"],
    "msamp.deepspeed": ["initialize"],
    "msamp.fsdp": ["FP8FullyShardedDataParallel", "FsdpReplacer"],
    "msamp.fsdp.fully_sharded_data_parallel": ["FP8FullyShardedDataParallel"],
    "msamp.fsdp.replacer": ["FsdpReplacer"],
    "msamp.nn": ["FP8Linear", "LinearReplacer", "clip_grad_norm_"],
    "msamp.nn.clip_grad": ["clip_grad_norm_"],
    "msamp.nn.distributed": ["FP8DistributedDataParallel"],
    "msamp.nn.linear": ["FP8Linear", "LinearReplacer"],
    "msamp.operators.arithmetic": ["Arithmetic"],
    "msamp.operators.arithmetic.arithmetic": ["Arithmetic"],
    "msamp.operators.gemm": ["Gemm"],
    "msamp.operators.gemm.gemm": ["Gemm"],
    "msamp.optim": ["DSAdam", "FSDPAdam", "FSDPAdamW", "LBAdam", "LBAdamW", "LBAdamWBase"],
    "msamp.optim.adam": ["DSAdam", "FSDPAdam", "LBAdam"],
    "msamp.optim.adamw": ["FSDPAdamW", "LBAdamW"],
    "msamp.optim.adamw_base": ["LBAdamWBase"],
    "msamp.te": ["TeReplacer"],
    "msamp.te.replacer": ["TeReplacer"],
}
#: Those that are not here. Without names it is the whole module, or the folder that it lies in.
REFUSED = {
    "msamp.common.tensor": ["HookManager", "TensorDist"],
    "msamp.common.tensor.hook": [],
    "msamp.common.tensor.tensor": ["TorchOverider"],
    "msamp.common.tensor.tensor_dist": [],
    "msamp.common.utils": [],
    "msamp.common.utils.device": [],
    "msamp.common.utils.dist": [],
    "msamp.common.utils.lazy_import": [],
    "msamp.common.utils.logging": [],
    "msamp.common.utils.transformer_engine_wrapper": [],
    "msamp.deepspeed.runtime.config": [],
    "msamp.deepspeed.runtime.engine": [],
    "msamp.deepspeed.runtime.fp8.fused_optimizer": [],
    "msamp.deepspeed.runtime.pipe.engine": [],
    "msamp.deepspeed.runtime.utils": [],
    "msamp.deepspeed.runtime.zero.fp8_stage_1_and_2": [],
    "msamp.deepspeed.runtime.zero.utils": [],
    "msamp.fsdp._runtime_utils": [],
    "msamp.fsdp.flat_param": [],
    "msamp.megatron": [],
    "msamp.megatron.distributed": [],
    "msamp.megatron.layers": [],
    "msamp.megatron.optimizer.clip_grads": [],
    "msamp.megatron.optimizer.distrib_optimizer": [],
    "msamp.nn": ["ScalingModule", "ScalingParameter", "model_state"],
    "msamp.nn.functional": [],
    "msamp.nn.module": [],
    "msamp.nn.parameter": [],
    "msamp.nn.state": [],
    "msamp.operators.dist_op": [],
    "msamp.operators.dist_op.dist_op": [],
    "msamp.operators.fp4_quantize": [],
    "msamp.operators.fp4_quantize.fp4_quantize": [],
    "msamp.optim": ["LBOptimizer"],
    "msamp.optim.optimizer": [],
    "msamp.te.extension": [],
    "msamp.te.modules": [],
}


@pytest.mark.parametrize("module", PROVIDED)
def test_classes_are_where_ms_amp_has_them(msamp: ModuleType, module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in PROVIDED[module] if not callable(getattr(found, name))] == []


@pytest.mark.parametrize("module", REFUSED)
def test_what_is_not_provided_says_why(msamp: ModuleType, module: str) -> None:
    names = REFUSED[module]
    if not names:
        with pytest.raises(ImportError, match=r"^msamp[\w.]* is not provided: .{20}") as caught:
            importlib.import_module(module)
        assert module.startswith(str(caught.value).split(" is not")[0])
    for name in names:
        with pytest.raises(ImportError, match=rf"{module}\.{name} is not provided: .{{20}}"):
            getattr(importlib.import_module(module), name)


def test_an_unknown_module_is_not_found(msamp: ModuleType) -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("msamp.nonsense")


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
