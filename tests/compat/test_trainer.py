"""transformers' Trainer with our model and optimizer (``optimizers=``), on one and two processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8_megatron
from tests.harness.ranks import RankPool, on_default_group

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

NUM_STEPS = 8


class Tokens(torch.utils.data.Dataset):
    """Sequences that count upwards: the next token is known."""

    def __init__(self, count: int = 64) -> None:
        starts = torch.randint(40, (count, 1), generator=torch.Generator().manual_seed(3))
        self.rows = starts + torch.arange(16)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def build(level: str, seed: int = 1) -> tuple[Any, Any]:
    """A tiny Llama in FP8 and its optimizer."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    model = transformers.LlamaForCausalLM(config)
    return fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), opt_level=level)


def trainer_of(model: Any, optimizer: Any, folder: str, **arguments: Any) -> Any:
    settings = {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": True,
        "max_steps": NUM_STEPS,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "save_steps": NUM_STEPS // 2,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "lr_scheduler_type": "linear",
        **arguments,
    }
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, NUM_STEPS)
    return transformers.Trainer(
        model, transformers.TrainingArguments(**settings), train_dataset=Tokens(), optimizers=(optimizer, scheduler)
    )


def logged(trainer: Any) -> dict[int, tuple[float, float]]:
    """Step → loss and gradient norm."""
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in rows}


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_trainer_learns_and_resumes_bit_for_bit(level: str, tmp_path: Path) -> None:
    trainer = trainer_of(*build(level), str(tmp_path))
    trainer.train()
    log = logged(trainer)
    assert log[NUM_STEPS][0] < 0.8 * log[1][0]
    assert all(norm > 0 for _, norm in log.values())

    again = trainer_of(*build(level, seed=9), str(tmp_path))
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{NUM_STEPS // 2}"))
    resumed = logged(again)
    for step in range(NUM_STEPS // 2 + 1, NUM_STEPS + 1):
        assert resumed[step] == log[step], step


def test_what_trainer_saves_is_a_plain_model(tmp_path: Path) -> None:
    """`from_pretrained` reads it; its logits are those of the FP8 weights up to the layers' casts."""
    model, optimizer = build("O2")
    trainer = trainer_of(model, optimizer, str(tmp_path), max_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model")
    state = model.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(value, state[name].to(value.dtype)), name
        assert type(value) is torch.Tensor


def _on_a_rank(group: Any, level: str, folder: str) -> dict[str, Any]:
    from fp8_megatron.any_model.transformers_callback import gather_state_callback

    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]

    def run(seed: int, **arguments: Any) -> dict[int, tuple[float, float]]:
        model, optimizer = build(level, seed)
        trainer = trainer_of(model, optimizer, folder)
        trainer.add_callback(gather_state_callback(optimizer))
        trainer.train(**arguments)
        trainer.save_model(f"{folder}/final")
        return logged(trainer)

    log = run(1 + group.rank())
    torch.distributed.barrier()
    resumed = run(7, resume_from_checkpoint=f"{folder}/checkpoint-{NUM_STEPS // 2}")
    return {"log": log, "resumed": resumed}


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_trainer_on_two_processes(ranks: RankPool, level: str, tmp_path: Path) -> None:
    results = ranks.run(on_default_group, _on_a_rank, level, str(tmp_path), num_ranks=2)
    log, resumed = results[0]["log"], results[0]["resumed"]
    assert log[NUM_STEPS][0] < 0.8 * log[1][0]
    for step in range(NUM_STEPS // 2 + 1, NUM_STEPS + 1):
        assert resumed[step] == log[step], step
