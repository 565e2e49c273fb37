"""What looks at an optimizer in front of its steps looks until it has seen enough, and lets other hooks run."""

from __future__ import annotations

import torch

from fp8_megatron.any_model.torch_optimizers import look_before_steps


def test_it_looks_until_it_has_seen_enough() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    looks, steps = [], []
    look_before_steps(optimizer, lambda one: looks.append(one) is None and len(looks) == 2)
    optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    for _ in range(4):
        optimizer.step()
    assert looks == [optimizer] * 2 and len(steps) == 4
