"""DeepSpeed's engine over models in FP8: the ``"msamp"`` section, stages 0 to 2, and what is refused."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8_megatron.any_model.deepspeed_engine import DeepSpeedConfigError, read_section
from tests.compat import small_training as small
from tests.harness.ranks import RankPool

NUM_STEPS, ACCUMULATE, MAX_NORM = 4, 2, 0.05


def config_of(level: str, stage: int, **more: Any) -> dict[str, Any]:
    """A configuration as MS-AMP's users have it."""
    return {
        "train_micro_batch_size_per_gpu": small.BATCH,
        "gradient_accumulation_steps": ACCUMULATE,
        "gradient_clipping": MAX_NORM,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "msamp": {"enabled": True, "opt_level": level},
        **more,
    }


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"msamp": {"enabled": True, "opt_level": "O4"}}, r"opt_level\('O4'\) is not one of O1, O2, O3"),
        ({"zero_optimization": {"stage": 3}}, r"stage\(3\).*use stage 0, 1 or 2"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, "offload_optimizer"),
        ({"fp16": {"enabled": True}}, 'use "bf16"'),
    ],
)
def test_what_cannot_work_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(DeepSpeedConfigError, match=message):
        read_section(config_of("O2", 1) | changed)


def test_what_deepspeed_reads_of_the_configuration() -> None:
    section = read_section(config_of("O3", 2, steps_per_print=7))
    assert section.opt_level == "O3" and section.max_norm == MAX_NORM
    assert not {"msamp", "zero_optimization", "bf16"} & set(section.config)
    assert section.config["gradient_clipping"] == 0.0  # the optimizer clips
    assert section.config["torch_autocast"] == {"enabled": True, "dtype": "bfloat16"}
    assert section.config["steps_per_print"] == 7
    assert read_section({"zero_optimization": {"stage": 3}}) is None
    assert read_section({"msamp": {"enabled": False}}) is None
    assert read_section({"msamp": {"enabled": True}}).max_norm == 1.0  # as DeepSpeed does without being told


def _start(level: str, stage: int, seed: int) -> tuple[Any, Any]:
    from fp8_megatron.any_model import deepspeed_engine

    model, optimizer = small.build(seed)
    engine, *_ = deepspeed_engine.initialize(model=model, optimizer=optimizer, config=config_of(level, stage))
    return engine, small.weights_of(model)


def _train(engine: Any, data: Any) -> list[float]:
    losses = []
    for tokens, classes in data:
        loss = torch.nn.functional.cross_entropy(engine(tokens).float(), classes)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def _on_a_rank(level: str, stage: int, folder: str) -> dict[str, Any]:
    """DeepSpeed's loop, a checkpoint in its middle, and the checkpoint's continuation."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29531", DS_ACCELERATOR="cpu")
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    deepspeed = pytest.importorskip("deepspeed")
    torch.distributed.init_process_group("gloo")
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    try:
        data = list(small.batches(2 * NUM_STEPS * ACCUMULATE, seed=10 + rank))
        half = NUM_STEPS * ACCUMULATE
        engine, _ = _start(level, stage, 1 + rank)
        losses = _train(engine, data[:half])
        norm = float(engine.get_global_grad_norm())
        engine.save_checkpoint(folder, tag="middle")
        losses += _train(engine, data[half:])
        weights = small.weights_of(engine.module)
        resumed, _ = _start(level, stage, 5)
        resumed.load_checkpoint(folder, tag="middle")
        continued = _train(resumed, data[half:])
        torch.distributed.barrier()
        return {"losses": losses, "continued": continued, "weights": weights, "norm": norm}
    finally:
        torch.distributed.destroy_process_group()


def _raw_on_a_rank(level: str) -> dict[str, Any]:
    """The plain loop."""
    import fp8_megatron

    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo")
    try:
        model, optimizer = fp8_megatron.initialize(*small.build(1 + rank), opt_level=level)
        data = small.batches(2 * NUM_STEPS * ACCUMULATE, seed=10 + rank)
        clip = fp8_megatron.clip_grad_norm_
        losses = small.train(model, optimizer, data, accumulate=ACCUMULATE, max_norm=MAX_NORM, clip=clip)
        weights = small.weights_of(model)
        torch.distributed.barrier()
        return {"losses": losses, "weights": weights}
    finally:
        torch.distributed.destroy_process_group()


#: DeepSpeed compiles its exchange between CPUs at first use. A rank that is killed meanwhile leaves a lock behind, in
#: ~/.cache/torch_extensions, which the next one waits for.
_BUILDS_SECONDS = 600.0


@pytest.mark.slow
@pytest.mark.parametrize(("level", "stage", "world"), [("O1", 0, 1), ("O2", 1, 2), ("O3", 2, 2)])
def test_the_engine_is_the_raw_loop(ranks: RankPool, level: str, stage: int, world: int, tmp_path: Path) -> None:
    """Accumulation, clipping and data parallelism of DeepSpeed's loop; a checkpoint continues bit for bit."""
    pytest.importorskip("deepspeed")
    with RankPool(world) as fresh:  # DeepSpeed keeps process groups in globals
        results = fresh.run(_on_a_rank, level, stage, str(tmp_path), num_ranks=world, timeout_seconds=_BUILDS_SECONDS)
    raw = ranks.run(_raw_on_a_rank, level, num_ranks=world)
    for result, expected in zip(results, raw, strict=True):
        assert result["losses"] == expected["losses"]
        assert result["continued"] == result["losses"][NUM_STEPS * ACCUMULATE :]
        assert result["norm"] > MAX_NORM, "nothing was clipped"
        for name, value in result["weights"].items():
            assert torch.equal(value, expected["weights"][name]), name


def _with_accelerate(site: str) -> list[float]:
    """Accelerate's own DeepSpeed integration, with its MS-AMP switch."""
    sys.path.insert(0, site)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29532", LOCAL_WORLD_SIZE="1", DS_ACCELERATOR="cpu")
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    import accelerate

    torch.distributed.init_process_group("gloo")

    plugin = accelerate.DeepSpeedPlugin(
        zero_stage=2,
        enable_msamp=True,
        msamp_opt_level="O2",
        gradient_accumulation_steps=ACCUMULATE,
        gradient_clipping=MAX_NORM,
    )
    accelerator = accelerate.Accelerator(mixed_precision="fp8", deepspeed_plugin=plugin)
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = small.BATCH
    model, optimizer = accelerator.prepare(*small.build(1))
    losses = []
    for tokens, classes in small.batches(2 * NUM_STEPS * ACCUMULATE, seed=10):
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(tokens).float(), classes)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_accelerates_deepspeed_with_msamp(ranks: RankPool, msamp_site: Path) -> None:
    pytest.importorskip("deepspeed")
    pytest.importorskip("accelerate")
    with RankPool(1) as fresh:
        losses = fresh.run(_with_accelerate, str(msamp_site), num_ranks=1)[0]
    assert losses == ranks.run(_raw_on_a_rank, "O2", num_ranks=1)[0]["losses"]
