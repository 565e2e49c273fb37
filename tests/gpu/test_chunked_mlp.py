"""--mlp-chunks-for-training on a GPU: the losses of whole MLPs, recorded steps too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fp8_megatron.dtypes import E4M3, E5M2
from fp8_megatron.formats.tensorwise import Tensorwise
from fp8_megatron.quantization.weight_grad import WeightGradSum
from tests.harness.runs import GPU_LLAMA_RUN
from tests.harness.training_states import losses
from tests.parallel.layouts import RECOMPUTE

pytestmark = pytest.mark.gpu

#: Two micro-batches a step.
MODEL = {**GPU_LLAMA_RUN, "global_batch_size": 8, "train_iters": 12}
FULL, MLP = RECOMPUTE["full"], RECOMPUTE["mlp"]


@pytest.mark.parametrize(
    "form",
    [
        MLP | {"fp8_recipe": "delayed", "fp8_weight_grad_scaling": "delayed"},
        FULL | {"fp8_recipe": "delayed", "cpu_offloading_num_layers": 3},
        MLP | {"fp8_recipe": "tensorwise", "opt_level": "O1"},
        FULL | {"fp8_recipe": "blockwise", "seq_length": 384, "ffn_hidden_size": 1280},
        MLP | {"precision": "bf16", "fp8_recipe": None},
        MLP | {"fp8_recipe": "delayed", "cuda_graph_impl": "local"},
    ],
    ids=["delayed", "full+offload", "tensorwise+O1", "blockwise", "bf16", "recorded"],
)
def test_the_losses_follow(tmp_path: Path, form: dict) -> None:
    """As `test_training.test_every_level_follows_bf16`: 1% over the last five steps."""
    expected = losses(tmp_path / "whole", **MODEL | form)
    measured = losses(tmp_path / "parts", **MODEL | form, mlp_chunks_for_training=3)
    assert len(measured) == 12
    assert measured[0] == pytest.approx(expected[0], rel=1e-3)
    assert sum(measured[-5:]) == pytest.approx(sum(expected[-5:]), rel=1e-2)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_gemm_adds_to_its_own_output(dtype: torch.dtype) -> None:
    """In FP32: against float64 of the same FP8 values. Hopper's split accumulation keeps about 2⁻¹³ of a sum."""
    torch.manual_seed(1)
    total, exact = WeightGradSum(torch.bfloat16, None), torch.zeros(512, 256, dtype=torch.float64, device="cuda")
    for rows in (256, 256, 128):
        g, x = (torch.randn(rows, columns, device="cuda") for columns in (512, 256))
        g_t = Tensorwise(dtype).cast(g, rowwise=False, transposed=True).t
        x_t = Tensorwise(E4M3).cast(x, rowwise=False, transposed=True).t
        total.add(g_t, x_t)
        wide = [operand.payload.double() * operand.scale.double() for operand in (g_t, x_t)]
        exact += wide[0] @ wide[1].t()
    found = total.take().wide()
    assert found.dtype is torch.float32
    assert (found.double() - exact).norm() < 2**-12 * exact.norm()
