"""--mlp-chunks-for-training on a GPU: the losses of whole MLPs, recorded steps too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fp8_megatron.config.io import parse_config
from fp8_megatron.dtypes import E4M3, E5M2
from fp8_megatron.formats.tensorwise import Tensorwise
from fp8_megatron.quantization.weight_grad import WeightGradSum
from fp8_megatron.reporting.metrics_file import METRICS_FILE, read_rows
from fp8_megatron.training.trainer import Trainer
from tests.harness.runs import GPU_RUN, LLAMA_STYLE_FLAGS, tiny_flags

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with FP8"),
]

MODEL = {**GPU_RUN, **LLAMA_STYLE_FLAGS, "num_layers": 4, "cuda_graph_impl": "none"}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MLP = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
CHUNKS = {"mlp_chunks_for_training": 3}


def records(output_dir: Path, **overrides: object) -> list[dict]:
    """Of every step of a run on random tokens, two micro-batches a step."""
    settings = {**MODEL, "global_batch_size": 8, "train_iters": 12, **overrides}
    Trainer(parse_config(tiny_flags(output_dir, **settings))).fit()
    return [record for record in read_rows(output_dir / METRICS_FILE) if record["kind"] == "train"]


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
    whole, parts = records(tmp_path / "whole", **form), records(tmp_path / "parts", **form, **CHUNKS)
    expected, measured = ([record["loss"] for record in run] for run in (whole, parts))
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
