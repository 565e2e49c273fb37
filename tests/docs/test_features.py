"""The table of features: every cell that says yes is run here or by a test that is named here, every refusal too."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import fp8_megatron
from fp8_megatron.any_model import report
from fp8_megatron.config.io import parse_config
from fp8_megatron.dtypes import StorageDtype
from fp8_megatron.errors import UserError
from fp8_megatron.training.trainer import Trainer
from fp8_megatron.update_rules import RULES
from tests.any_model.test_rules import Lion
from tests.docs.documents import ROOT
from tests.docs.test_supported import STEPS, VOCABULARY, adamw, build, train
from tests.harness.fp8_models import shard
from tests.harness.ranks import RankPool, on_default_group
from tests.harness.runs import tiny_flags
from tests.harness.token_files import write_token_files

TABLE = (ROOT / "docs" / "supported.md").read_text().partition("## Features")[2]
#: Feature → trainer, `initialize`, `fully_shard`, other libraries.
ROWS = {
    feature: [cell.strip() for cell in cells.split("|")]
    for feature, cells in re.findall(r"^\| ([^|]+) \| (.*) \|$", TABLE, flags=re.MULTILINE)
    if feature not in ("feature", "---")
}
#: A cell that this file runs, and one for which there is no flag and no argument.
HERE, NOTHING = "docs/test_features.py", "-"
_RANKS, _SHARDS = "any_model/test_data_parallel.py", "any_model/test_fsdp_optimizer.py"
#: What holds each cell.
HELD = {
    "levels O1, O2, O3": (HERE, HERE, HERE, "compat/test_trainer.py::test_trainer_learns_and_resumes_bit_for_bit"),
    "5-byte form, gradients released into the step": (HERE, NOTHING, NOTHING, NOTHING),
    "recipes `delayed`, `tensorwise`": (HERE, HERE, HERE, HERE),
    "recipes `blockwise`, `mxfp8`": (HERE, HERE, HERE, HERE),
    "recipe `nvfp4`": (HERE, HERE, HERE, HERE),
    "AdamW, Adam, SGD, Lion": (HERE, HERE, HERE, HERE),
    "Muon, with AdamW beside it": (HERE, HERE, HERE, HERE),
    "FP8 LM head": (HERE, HERE, HERE, "compat/test_trl.py::test_fine_tuning_the_whole_model"),
    "experts in FP8": (
        "parallel/test_experts.py::test_a_layout_trains_as_one_rank",
        "any_model/test_experts.py::test_any_librarys_experts",
        "any_model/test_experts_ranks.py::test_fully_shard",
        "any_model/test_experts.py::test_transformers_saves_them",
    ),
    "FP8 attention": ("parallel/test_variants.py::test_fp8_attention_on_ranks", NOTHING, NOTHING, NOTHING),
    "steps as CUDA graphs": (
        "training/test_step_graph.py::test_a_step_is_the_same_through_a_recording",
        "any_model/test_recorded_step.py::test_a_step_that_waits_is_found_before_it_is_recorded",
        HERE,
        NOTHING,
    ),
    "`torch.compile`": (
        NOTHING,
        "any_model/test_compiled_ranks.py::test_compiled_ranks_have_the_bits_of_eager_ones",
        f"{_SHARDS}::test_compiled_blocks_and_recipes",
        HERE,
    ),
    "gradients and state shared by data-parallel ranks": (
        "parallel/test_layouts.py::test_layout_trains_as_one_rank",
        f"{_RANKS}::test_ranks_equal_one_rank",
        f"{_SHARDS}::test_equals_one_rank",
        "compat/test_accelerate.py::test_its_fsdp2_shards_fp8_weights",
    ),
    "tensor, sequence, context, expert parallelism": (
        "parallel/test_layouts.py::test_layout_trains_as_one_rank",
        "any_model/test_tensor_parallel.py::test_tensor_parallelism_is_an_error_with_the_fix",
        "any_model/test_tensor_parallel.py::test_tensor_parallelism_is_an_error_with_the_fix",
        NOTHING,
    ),
    "pipeline stages": ("parallel/test_layouts.py::test_layout_trains_as_one_rank", HERE, NOTHING, NOTHING),
    "checkpoints resume bit for bit": (
        "checkpoint/test_resume.py::test_resuming_is_not_noticed",
        "any_model/test_state_dicts.py::test_a_resumed_run_goes_on_bit_for_bit",
        "any_model/test_fsdp_checkpoint.py::test_resumes_bit_for_bit",
        "compat/test_accelerate.py::test_save_state_continues_bit_for_bit",
    ),
    "checkpoints under another number of ranks": (
        "checkpoint/test_resharding.py::test_another_layout_takes_over",
        f"{_RANKS}::test_another_number_of_ranks_resumes_the_run",
        "any_model/test_fsdp_checkpoint.py::test_resumes_bit_for_bit",
        f"{_RANKS}::test_another_number_of_ranks_resumes_the_run",
    ),
    "frozen weights and PEFT's adapters": (
        NOTHING,
        "any_model/test_copies.py::test_adapters_beside_frozen_fp8_weights",
        HERE,
        "compat/test_trl.py::test_adapters_beside_frozen_fp8_weights",
    ),
    "page of FP8 health, restarts, `plan`": (
        "watch/test_restarts_end_to_end.py",
        NOTHING,
        NOTHING,
        NOTHING,
    ),
}


def test_every_cell_is_held() -> None:
    """By a test that exists. A cell without a flag or an argument says no, and no other says so but by a refusal."""
    assert {feature: len(cells) for feature, cells in ROWS.items()} == dict.fromkeys(HELD, 4)
    for feature, held in HELD.items():
        for cell, name in zip(ROWS[feature], held, strict=True):
            assert name != NOTHING or cell == "no", (feature, cell)
            file, _, function = name.partition("::")
            if name != NOTHING:
                assert f"def {function or 'test_'}" in (ROOT / "tests" / file).read_text(), name


def test_defaults() -> None:
    precision = parse_config([]).precision
    defaults = {name: one.default for name, one in inspect.signature(fp8_megatron.initialize).parameters.items()}
    given = {"opt_level": precision.opt_level, "recipe": precision.fp8_recipe}
    cells = ROWS["levels O1, O2, O3"] + ROWS["recipes `delayed`, `tensorwise`"]
    for door, values in enumerate((given, defaults)):
        assert f"{values['opt_level']} by default" in cells[door]
        assert f"`{values['recipe']}` by default" in cells[4 + door]


def falls(losses: list[float]) -> None:
    """Steps alternate between two batches: each batch's loss falls."""
    assert losses[-2] < losses[0] and losses[-1] < losses[1] and all(map(math.isfinite, losses))


# The trainer

RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4")
_RATES = {"sgd": 0.2, "lion": 3e-3}
_FIVE_BYTES = {"main_params_dtype": "split", "exp_avg_dtype": "int8", "exp_avg_sq_dtype": "uint8"}
_IN_TRAINER = {
    **{level: {"opt_level": level} for level in ("O1", "O2", "O3")},
    **{recipe: {"fp8_recipe": recipe, "hidden_size": 128, "micro_batch_size": 8} for recipe in RECIPES},
    **{rule: {"optimizer": rule, "lr": _RATES.get(rule, 1e-2)} for rule in RULES},
    "5 bytes, released": {**_FIVE_BYTES, "release_gradients": True, "clip_grad": 0},
}


def trainer_losses(flags: list[str], folder: Path) -> list[float]:
    Trainer(parse_config(flags)).fit()
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["kind"] == "train"]


@pytest.mark.slow
@pytest.mark.parametrize("case", list(_IN_TRAINER))
def test_in_the_trainer(ranks: RankPool, tmp_path: Path, case: str) -> None:
    """Tokens count upwards, so the loss falls from log 64 = 4.2; that of random tokens stays within 1%."""
    write_token_files(tmp_path / "tokens", [[token % 60 for token in range(start, start + 400)] for start in range(40)])
    data = {"mock_data": False, "data_path": str(tmp_path / "tokens"), "split": "100,0,0"}
    data |= {"tokenizer_type": "NullTokenizer", "train_iters": 20}
    flags = tiny_flags(tmp_path, **{**data, "log_interval": 1, **_IN_TRAINER[case]})
    (losses,) = ranks.run(trainer_losses, flags, tmp_path, num_ranks=1)
    assert losses[-1] < 0.97 * losses[0] and all(map(math.isfinite, losses))


def test_the_head_of_the_trainer() -> None:
    def head(*words: str) -> bool:
        return parse_config(list(words)).has_fp8_lm_head

    assert head("--fp8-recipe", "delayed") and not head("--fp8-recipe", "tensorwise")


# `initialize` and `fully_shard`


def optimizers_of(rule: str) -> Callable[[torch.nn.Module], Any]:
    """The user's own, for a model."""
    if rule == "muon":
        return muon
    if rule == "lion":
        return lambda model: Lion(model.parameters(), lr=1e-3)
    kinds = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    return lambda model: kinds[rule](model.parameters(), lr=0.1 if rule == "sgd" else 3e-3)


def muon(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    names = {name for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name and "head" not in name}
    matrices = [p for name, p in model.named_parameters() if name in names]
    rest = [p for name, p in model.named_parameters() if name not in names]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=3e-3)]


#: (recipe, update rule) of any loop.
_IN_LOOPS = [*((recipe, "adamw") for recipe in RECIPES), *(("tensorwise", rule) for rule in RULES if rule != "adamw")]
#: Sizes that a block of 128 × 128 takes.
_WIDE = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
}


def llama(recipe: str = "tensorwise") -> Any:
    transformers = pytest.importorskip("transformers")
    if recipe != "blockwise":
        return build("llama")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**_WIDE, vocab_size=VOCABULARY, max_position_embeddings=64)
    return transformers.LlamaForCausalLM(config)


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "rule"), _IN_LOOPS)
def test_in_initialize(recipe: str, rule: str) -> None:
    model = llama(recipe)
    model, optimizer = fp8_megatron.initialize(model, optimizers_of(rule)(model), recipe=recipe)
    assert any("mlp" in name for name in report(model).fp8)
    assert recipe == "blockwise" or "lm_head" in report(model).fp8
    falls(train(model, optimizer))


def sharded(
    group: torch.distributed.ProcessGroup, recipe: str, rule: str, level: str, weight: StorageDtype, adapts: bool
) -> list[float]:
    model = llama(recipe)
    fp8_megatron.replace_linears(model, recipe=recipe, weight=weight)
    assert any("mlp" in name for name in report(model).fp8)
    layers = model.model.layers
    if adapts:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules=["q_proj", "v_proj"]))
        layers = model.base_model.model.model.layers
    shard(*layers, model)
    if adapts:
        optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-2)
    else:
        optimizer = optimizers_of(rule)(model)
    model, optimizer = fp8_megatron.initialize(model, optimizer, level)
    with pytest.raises(UserError, match="FSDPModule"):
        fp8_megatron.record_step(lambda batch: model(**batch).loss, model)
    return train(model, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "rule", "level"),
    [
        *((*case, "O3") for case in _IN_LOOPS),
        *(("tensorwise", "adamw", level) for level in ("O1", "O2")),
        ("tensorwise", "adapters", "O3"),
    ],
)
def test_in_fully_shard(ranks: RankPool, recipe: str, rule: str, level: str) -> None:
    weight = StorageDtype.FP8 if level == "O3" else StorageDtype.FP16
    first, second = ranks.run(on_default_group, sharded, recipe, rule, level, weight, rule == "adapters", num_ranks=2)
    assert first == second
    falls(first)


def stage_losses(group: torch.distributed.ProcessGroup) -> list[float]:
    """A stage of two linear layers on each of two ranks."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    stage = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
    alone = [torch.distributed.new_group([one]) for one in range(2)][rank]
    stage, optimizer = fp8_megatron.initialize(stage, adamw(stage), process_group=alone)
    schedule = ScheduleGPipe(
        PipelineStage(stage, rank, 2, torch.device("cpu"), input_args=torch.empty(16, 64), group=group),
        n_microbatches=4,
        loss_fn=torch.nn.functional.mse_loss,
    )
    losses = []
    for _ in range(STEPS):
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(7))
        parts: list[torch.Tensor] = []
        schedule.step(*([x] if rank == 0 else []), **({} if rank == 0 else {"target": x.sin(), "losses": parts}))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(sum(part.item() for part in parts)))
    return losses


@pytest.mark.slow
def test_stages_of_torchs_pipelines(ranks: RankPool) -> None:
    _, losses = ranks.run(on_default_group, stage_losses, num_ranks=2)
    falls(losses)


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "rule"), _IN_LOOPS)
def test_in_a_compiled_trainer(tmp_path: Path, recipe: str, rule: str) -> None:
    """transformers' Trainer with `torch_compile`; graphs run by Python, which needs no compiler."""
    transformers = pytest.importorskip("transformers")
    model = llama(recipe)
    model, optimizer = fp8_megatron.initialize(model, optimizers_of(rule)(model), recipe=recipe)
    rows = torch.arange(16) + torch.arange(32)[:, None]
    settings = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, bf16=True, max_steps=4, per_device_train_batch_size=8, logging_steps=1,
        save_strategy="no", report_to="none", disable_tqdm=True, torch_compile=True, torch_compile_backend="aot_eager",
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = transformers.Trainer(model, settings, train_dataset=data, optimizers=(optimizer, schedule))
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < losses[0]
