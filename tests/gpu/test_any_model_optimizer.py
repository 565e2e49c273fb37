"""FP8Optimizer on a GPU: no step waits for it, the memory is what is counted, and the CPU's numbers come out."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from fp8_megatron.any_model.build import build_optimizer
from fp8_megatron.any_model.clip_grads import clip_grad_norm_
from fp8_megatron.any_model.linears import replace_linears
from fp8_megatron.any_model.optimizer import FP8Optimizer
from fp8_megatron.dtypes import LEVELS
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from fp8_megatron.quantization.stats import snr_db

pytestmark = pytest.mark.gpu

LEVEL_NAMES = ["O1", "O2", "O3"]


@pytest.fixture
def forbids_waiting() -> Iterator[None]:
    """A call that waits for the GPU is an error."""
    yield
    torch.cuda.set_sync_debug_mode("default")


def build(
    level: str, width: int, dtype: torch.dtype = torch.float32, device: str = "cuda", recipe: str = "tensorwise"
) -> tuple[torch.nn.Sequential, FP8Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(64, width),
        torch.nn.Linear(width, 2 * width),
        torch.nn.GELU(),
        torch.nn.LayerNorm(2 * width),
        torch.nn.Linear(2 * width, width),
    ).to(device, dtype)
    user = torch.optim.AdamW(model.parameters(), lr=1e-2)
    replaced = replace_linears(model, weight=LEVELS[level].weight, recipe=recipe)  # type: ignore[arg-type]
    return model, build_optimizer(model, user, replaced, level)


@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_nothing_waits_for_the_gpu(forbids_waiting: None, level: str, recipe: str) -> None:
    model, optimizer = build(level, 256, recipe=recipe)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    tokens = torch.randint(0, 64, (128,), device="cuda")
    for step in range(4):
        if step == 2:  # Triton compiles, and the scaler makes its tensors, in the first steps
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        optimizer.zero_grad()
        for _ in range(1 + step % 2):
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(tokens).float().square().mean()
            scaler.scale(loss).backward()
        if step % 2:
            clip_grad_norm_(model, 1.0)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    torch.cuda.set_sync_debug_mode("default")
    assert optimizer.num_skipped_steps == 0


@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gpu_steps_as_the_cpu(level: str, dtype: torch.dtype) -> None:
    """The GPU's kernels round the same numbers with the same random bits, and √ and ÷ are accurate to 2 ulp. A number
    that is within some ulp of where rounding turns differs by a unit: one in 2¹¹ of FP16 numbers, and 2⁻¹⁰ each, is far
    above 40 dB of the change."""
    outcomes = []
    for device in ("cpu", "cuda"):
        model, optimizer = build(level, 128, dtype, device)
        for step in range(5):
            generator = torch.Generator().manual_seed(step)
            for index, param in enumerate(model.parameters()):
                if index != 1 or step % 2:  # one is unused in every second step
                    grad = torch.randn(param.shape, generator=generator)
                    param.grad = grad.to(device, param.dtype)
                else:
                    param.grad = None
            optimizer.step()
        outcomes.append(
            [
                (param.master_value() if isinstance(param, ScaledTensor) else param.detach()).float().cpu()
                for param in model.parameters()
            ]
        )
    start, _ = build(level, 128, dtype, "cpu")
    for ours, expected, initial in zip(outcomes[1], outcomes[0], start.parameters(), strict=True):
        first = initial.master_value() if isinstance(initial, ScaledTensor) else initial.detach().float()
        assert snr_db(ours - first, expected - first) > 30.0


@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_memory_is_what_is_counted(level: str) -> None:
    """All of a model's lasting memory, for matrices of some million elements: 2% for the allocator's rounding."""
    tokens = torch.randint(0, 64, (128,), device="cuda")
    for width in (128, 1024):  # the first one makes the libraries' workspaces
        model, optimizer = None, None
        gc.collect()
        before = torch.cuda.memory_allocated()
        model, optimizer = build(level, width)
        for _ in range(2):
            optimizer.zero_grad()
            model(tokens).square().mean().backward()
            optimizer.step()
    torch.cuda.synchronize()
    assert optimizer is not None
    counted = sum(optimizer.storage_bytes.values())
    assert torch.cuda.memory_allocated() - before == pytest.approx(counted, rel=0.02)
