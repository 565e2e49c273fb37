"""Two GPUs train as one: the real program under torchrun, on NCCL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pretrain_gpt
from fp8_megatron.reporting.metrics_file import METRICS_FILE, read_rows
from tests.harness.runs import EXPERT_FLAGS, GPU_RUN, tiny_flags

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

MODEL = {
    **GPU_RUN,
    "make_vocab_size_divisible_by": 64,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "train_iters": 12,
}
RECOMPUTED_MLPS = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
LAYOUTS = {
    "tp2_sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "pp2_vpp2": {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1},
    "dp2": {},
    "cp2": {"context_parallel_size": 2},
    "cp2_gather": {"context_parallel_size": 2, "cp_comm_type": "all_gather"},
    "cp2_a2a": {"context_parallel_size": 2, "cp_comm_type": "a2a"},
}
EXPERTS = {**EXPERT_FLAGS, "fp8_recipe": None, "num_layers": 2}
#: Relative difference of a step's loss from one GPU's. bf16: sums in another order, each rounded to 2⁻⁸ of its size
#: and averaged over 512 tokens and 4 layers. O3: every rank's shard of a weight has a scale of its own, so its E4M3
#: rounding (31.5 dB) is drawn anew; the difference of two such draws moved tiny models' losses by up to 0.2%.
TOLERANCE = {"bf16": 1e-3, "fp8": 5e-3}


def losses(output_dir: Path, num_gpus: int, **overrides: object) -> list[float]:
    """Losses of a run on `num_gpus` GPUs."""
    flags = tiny_flags(output_dir, **{**MODEL, **overrides})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_gpus)]
    root = Path(pretrain_gpt.__file__).parent
    environment = {**os.environ, "OMP_NUM_THREADS": "4"}
    subprocess.run([*command, "pretrain_gpt.py", *flags], cwd=root, env=environment, check=True, timeout=300)
    return [r["loss"] for r in read_rows(output_dir / METRICS_FILE) if r["kind"] == "train"]


@pytest.fixture(scope="module")
def one_gpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Losses on one GPU by precision."""
    folder = tmp_path_factory.mktemp("one")
    return {precision: losses(folder / precision, 1, precision=precision) for precision in TOLERANCE}


@pytest.mark.parametrize(
    "setting",
    [
        {"grad_accumulation": "local"},
        {"overlap_grad_reduce": False, "overlap_param_gather": False},
        {"fp8_grad_reduce": "hierarchical"},
        {"fp8_grad_reduce": "nccl"},
        {"ddp_bucket_size": 1_000_000},
    ],
    ids=lambda setting: "-".join(map(str, setting.values())),
)
def test_every_way_to_reduce_trains_as_one_gpu(tmp_path: Path, one_gpu: dict[str, list[float]], setting: dict) -> None:
    measured = losses(tmp_path, 2, precision="fp8", **setting)
    assert measured == pytest.approx(one_gpu["fp8"], rel=TOLERANCE["fp8"])


def test_fp8_attention_of_exchanged_heads(tmp_path: Path) -> None:
    pytest.importorskip("cudnn", reason="FP8 attention needs nvidia-cudnn-frontend")
    settings = {"precision": "fp8", "fp8_dot_product_attention": True, "kv_channels": 128}
    alone = losses(tmp_path / "alone", 1, **settings)
    assert losses(tmp_path / "shared", 2, **settings, **LAYOUTS["cp2_a2a"]) == pytest.approx(alone, rel=5e-3)


@pytest.mark.parametrize("layout", ["dp2", "cp2", "cp2_gather"])
def test_replicas_repeat_bit_for_bit(tmp_path: Path, layout: str) -> None:
    """Sums are taken in rank order; deterministic mode asks the same of every other kernel."""
    settings = {"precision": "fp8", "deterministic_mode": True, **LAYOUTS[layout]}
    first, second = (losses(tmp_path / name, 2, **settings) for name in ("first", "second"))
    assert first == second


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"first_last_layers_bf16": True},
        {"main_params_dtype": "split"},
        {"fp8_recipe": "delayed", "fp8_weight_grad_scaling": "delayed"},
    ],
    ids=str,
)
def test_copy_engines_bring_what_nccl_brings(tmp_path: Path, settings: dict) -> None:
    """Bit for bit: the bytes are the same, and so is the order of the sums."""
    settings = {"precision": "fp8", "deterministic_mode": True, **settings}
    measured = [losses(tmp_path / way, 2, dp_transport=way, **settings) for way in ("nccl", "copy_engine")]
    assert measured[0] == measured[1]


def test_rows_by_parts_are_the_bytes_that_were_given() -> None:
    """Hundreds of exchanges beside other copies, with memory used again at once."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    root = Path(pretrain_gpt.__file__).parent
    # With one queue every stream would wait for any stream that waits.
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    command += ["-m", "tests.multigpu.exchanges", "600"]
    subprocess.run(command, cwd=root, env=environment, check=True, timeout=200)


@pytest.mark.parametrize(
    "settings",
    [{}, {"fp8_recipe": "delayed", "fp8_lm_head": True}, {"swiglu": True}, {"fp8_recipe": "blockwise"}],
    ids=str,
)
def test_rows_by_copy_engines_train_as_rows_by_nccl(tmp_path: Path, settings: dict) -> None:
    """A GEMM's rows do not depend on each other; who of two ranks adds a bias before the sum moves its last bit."""
    settings = {"precision": "fp8", "deterministic_mode": True, **LAYOUTS["tp2_sp"], **settings}
    measured = [losses(tmp_path / way, 2, tp_transport=way, **settings) for way in ("nccl", "copy_engine")]
    assert measured[0] == pytest.approx(measured[1], rel=2e-3)


@pytest.mark.parametrize("transport", ["nccl", "copy_engine"])
def test_recomputed_mlps_train_bit_for_bit(tmp_path: Path, transport: str) -> None:
    """Backward gathers the MLP's input once more, into memory that the next gather uses again."""
    settings = {"precision": "fp8", "deterministic_mode": True, "tp_transport": transport, **LAYOUTS["tp2_sp"]}
    measured = [
        losses(tmp_path / name, 2, **settings, **own) for name, own in (("kept", {}), ("again", RECOMPUTED_MLPS))
    ]
    assert measured[0] == measured[1]


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("precision", list(TOLERANCE))
def test_layout_trains_as_one_gpu(tmp_path: Path, one_gpu: dict[str, list[float]], precision: str, layout: str) -> None:
    measured = losses(tmp_path, 2, precision=precision, **LAYOUTS[layout])
    assert measured == pytest.approx(one_gpu[precision], rel=TOLERANCE[precision])


@pytest.mark.parametrize("transport", ["nccl", "copy_engine"])
@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("dp2", {}),
        ("dp2", {"fp8_recipe": "delayed", "fp8_weight_grad_scaling": "delayed", "keep_fp8_transpose_cache": 2}),
        ("dp2", {"overlap_param_gather": False, "first_last_layers_bf16": True}),
        ("dp2", {"fp8_grad_reduce": "nccl"}),
        ("dp2", {"fp8_grad_reduce": "hierarchical", "grad_accumulation": "local"}),
        ("tp2_sp", {"fp8_recipe": "delayed", "fp8_lm_head": True}),
        ("tp2_sp", {"hidden_dropout": 0.1, "attention_dropout": 0.1}),
        ("tp2_sp", {"fp8_recipe": "delayed", **RECOMPUTED_MLPS}),
    ],
    ids=[
        *("dp2", "dp2-delayed", "dp2-bf16-layers", "dp2-native", "dp2-stages"),
        *("tp2_sp", "tp2_sp-dropout", "tp2_sp-recomputed-mlps"),
    ],
)
def test_recorded_steps_train_bit_for_bit(tmp_path: Path, layout: str, settings: dict, transport: str) -> None:
    """One CUDA graph a step, with the exchanges in it, beside Python's launches; validation between the steps."""
    settings = {
        "precision": "fp8",
        "deterministic_mode": True,
        "eval_interval": 4,
        "eval_iters": 2,
        "log_interval": 5,
        "tp_transport" if layout == "tp2_sp" else "dp_transport": transport,
        **LAYOUTS[layout],
        **settings,
    }
    python, graph = (losses(tmp_path / way, 2, cuda_graph_impl=way, **settings) for way in ("none", "local"))
    assert graph == python


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("pp2", {"fp8_recipe": "delayed", "fp8_weight_grad_scaling": "delayed"}),
        ("pp2", {"precision": "bf16"}),
        ("pp2", {"fp8_pipeline_communication": True}),
        ("pp2_vpp2", {"fp8_recipe": "delayed"}),
        ("cp2", {"fp8_recipe": "delayed"}),
        ("cp2_gather", {}),
        ("cp2_a2a", {}),
    ],
    ids=["pp2", "pp2-bf16", "pp2-fp8-messages", "pp2_vpp2", "cp2", "cp2_gather", "cp2_a2a"],
)
def test_recorded_stages_and_context_ranks_train_bit_for_bit(tmp_path: Path, layout: str, settings: dict) -> None:
    """The messages between ranks are in the graph."""
    every = {"eval_interval": 4, "eval_iters": 2, "log_interval": 5}
    settings = {"precision": "fp8", "deterministic_mode": True, **every, **LAYOUTS[layout], **settings}
    python, graph = (losses(tmp_path / way, 2, cuda_graph_impl=way, **settings) for way in ("none", "local"))
    assert graph == python


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("tp2_sp", {"precision": "bf16"}),
        ("tp2_sp", {"sequence_parallel": False}),
        ("dp2", {"precision": "bf16"}),
        ("dp2", {"precision": "fp16"}),
    ],
    ids=["tp2_sp-bf16", "tp2", "dp2-bf16", "dp2-fp16"],
)
def test_what_is_recorded_by_default_trains_bit_for_bit(tmp_path: Path, layout: str, settings: dict) -> None:
    """What the cases above leave out: layers of megatron-core, and tensor parallelism's sums of whole outputs."""
    settings = {"precision": "fp8", "deterministic_mode": True, **LAYOUTS[layout], **settings}
    python, default = (losses(tmp_path / way, 2, cuda_graph_impl=way, **settings) for way in ("none", "auto"))
    assert default == python


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
def test_four_tensor_parallel_ranks_are_recorded_over_copy_engines(tmp_path: Path) -> None:
    """By default; beside Python's launches bit for bit, and beside NCCL, which adds four summands in an order of its
    own: as between two ranks, where who adds a bias moves the last bit of a sum."""
    settings = {
        "precision": "fp8",
        "deterministic_mode": True,
        "fp8_recipe": "delayed",
        "fp8_lm_head": True,
        "tensor_model_parallel_size": 4,
        "sequence_parallel": True,
    }
    default = losses(tmp_path / "default", 4, **settings)
    python = losses(tmp_path / "python", 4, cuda_graph_impl="none", tp_transport="copy_engine", **settings)
    over_nccl = losses(tmp_path / "nccl", 4, cuda_graph_impl="local", tp_transport="nccl", **settings)
    assert default == python
    assert default == pytest.approx(over_nccl, rel=2e-3)


@pytest.fixture(scope="module")
def experts_of_one_gpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Losses of a model with experts on one GPU by precision."""
    folder = tmp_path_factory.mktemp("experts")
    return {precision: losses(folder / precision, 1, **EXPERTS, precision=precision) for precision in TOLERANCE}


@pytest.mark.parametrize("precision", list(TOLERANCE))
@pytest.mark.parametrize(
    "settings",
    [
        {"dp_transport": "nccl"},
        {"dp_transport": "copy_engine"},
        {"moe_token_dispatcher_type": "alltoall"},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1},
        {"context_parallel_size": 2},
    ],
    ids=["nccl", "copy_engine", "alltoall", "tp2_sp", "cp2"],
)
def test_experts_of_two_gpus_train_as_those_of_one(
    tmp_path: Path, experts_of_one_gpu: dict[str, list[float]], precision: str, settings: dict
) -> None:
    """Each GPU has half of the experts."""
    settings = {**EXPERTS, "precision": precision, "expert_model_parallel_size": 2, **settings}
    measured = losses(tmp_path, 2, **settings)
    assert measured == pytest.approx(experts_of_one_gpu[precision], rel=TOLERANCE[precision])


def test_recorded_steps_of_experts_train_bit_for_bit(tmp_path: Path) -> None:
    settings = {**EXPERTS, "precision": "fp8", "deterministic_mode": True, "expert_model_parallel_size": 2}
    python, graph = (losses(tmp_path / way, 2, cuda_graph_impl=way, **settings) for way in ("none", "local"))
    assert graph == python


@pytest.mark.parametrize(
    "settings",
    [
        {"cuda_graph_impl": "none"},
        {"cuda_graph_impl": "local"},
        {"moe_token_dispatcher_type": "alltoall"},
        {"moe_token_dispatcher_type": "alltoall", "moe_shared_expert_intermediate_size": 256},
    ],
    ids=["allgather", "recorded", "alltoall", "alltoall-shared"],
)
def test_overlapped_micro_batches_of_experts_train_bit_for_bit(tmp_path: Path, settings: dict) -> None:
    settings = {**EXPERTS, "precision": "fp8", "deterministic_mode": True, "expert_model_parallel_size": 2, **settings}
    settings["global_batch_size"] = 12
    plain, overlapped = (
        losses(tmp_path / str(on), 2, overlap_moe_expert_parallel_comm=on, **settings) for on in (False, True)
    )
    assert overlapped == plain


@pytest.mark.parametrize("precision", list(TOLERANCE))
def test_muon_of_two_gpus_trains_as_that_of_one(tmp_path: Path, precision: str) -> None:
    settings = {"optimizer": "muon", "precision": precision}
    alone, shared = (losses(tmp_path / str(gpus), gpus, **settings) for gpus in (1, 2))
    assert shared == pytest.approx(alone, rel=TOLERANCE[precision])
