"""The trainer without what its import would load: torch's compiler, wandb, Matplotlib."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from fp8_megatron.mcore.quick_import import quick_import

ASKED = """
import sys
import torch
before = torch.compile
{first}
import fp8_megatron.training.trainer
late = {{"torch._inductor.compile_fx", "torch._dynamo.convert_frame", "wandb", "matplotlib"}}
print(torch.compile is before, *late & set(sys.modules))
"""


@pytest.mark.parametrize(("first", "loaded"), [("", []), ("import wandb", ["wandb"])])
def test_the_trainer_loads_nothing_that_it_may_never_use(first: str, loaded: list[str]) -> None:
    code = ASKED.format(first=first)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", *loaded]


def test_functions_are_compiled_at_their_first_call() -> None:
    compiled = []

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        compiled.append(module)
        return module

    real = torch.compile
    with quick_import():

        @torch.compile(backend=backend)
        def twice(x: torch.Tensor, times: float = 2.0) -> torch.Tensor:
            """Docs."""
            return x * times

        plain = torch.compile(torch.sin)
        assert compiled == [] and twice(torch.ones(3)).tolist() == [2.0] * 3
    assert len(compiled) == 1
    assert torch.compile is real and twice.__doc__ == "Docs." and plain.__name__ == "sin"
    assert twice(torch.ones(3)).tolist() == [2.0] * 3 and len(compiled) == 1
    assert twice(torch.ones(3), times=3.0).tolist() == [3.0] * 3 and len(compiled) == 2


def test_all_is_as_before_after_an_error() -> None:
    real, had_wandb = torch.compile, "wandb" in sys.modules
    with pytest.raises(KeyError), quick_import():
        raise KeyError
    assert torch.compile is real and ("wandb" in sys.modules) == had_wandb
