"""torch's transformer with FP8 attention over ranks: data parallel, under DDP, and on the shards of fully_shard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fp8_megatron
from fp8_megatron.any_model import replace_linears
from fp8_megatron.any_model.fsdp_reduce import reduce_in_own_dtype
from fp8_megatron.dtypes import LEVELS
from tests.any_model.test_fsdp_optimizer import whole_weights
from tests.harness.fp8_models import shard
from tests.harness.ranks import RankPool, on_default_group

Group = torch.distributed.ProcessGroup
WIDTH, BATCH = 64, 8


class Model(torch.nn.Module):
    """An encoder and a decoder, and an attention whose keys have a size of their own and that adds keys."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = torch.nn.Transformer(WIDTH, 4, 1, 1, 128, dropout=0.0, batch_first=True)
        self.look = torch.nn.MultiheadAttention(WIDTH, 4, kdim=32, vdim=32, add_bias_kv=True, batch_first=True)

    def forward(self, source: Tensor, target: Tensor, images: Tensor) -> Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=target.dtype)
        x = self.transformer(source, target, tgt_mask=mask, tgt_is_causal=True)
        y: Tensor = x + self.look(x, images, images, need_weights=False)[0]
        return y


def batch(step: int, dtype: torch.dtype) -> list[Tensor]:
    """Inputs and the outputs to learn, [BATCH, …]."""
    generator = torch.Generator().manual_seed(step % 3)
    shapes = ((12, WIDTH), (9, WIDTH), (5, 32), (9, WIDTH))
    return [torch.randn(BATCH, *shape, generator=generator).to(dtype) for shape in shapes]


def train_step(model: torch.nn.Module, optimizer: Any, parts: list[Tensor]) -> float:
    *inputs, expected = parts
    loss = torch.nn.functional.mse_loss(model(*inputs).float(), expected.float())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def sharded(level: str) -> tuple[Model, Any]:
    torch.manual_seed(0)
    model = Model().bfloat16()
    replace_linears(model, weight=LEVELS[level].weight)
    shard(*model.transformer.encoder.layers, *model.transformer.decoder.layers, model.look, model)
    model, optimizer = fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters(), lr=3e-3), level)
    reduce_in_own_dtype(model)
    return model, optimizer


def on_shards(group: Group, level: str, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    """Three steps, a checkpoint, and two more in a model that resumes: their losses and the weights at the end."""
    model, optimizer = sharded(level)
    losses = [train_step(model, optimizer, batch(step, torch.bfloat16)) for step in range(3)]
    model_state, optimizer_state = get_state_dict(model, optimizer)
    assert "look.q_proj_weight" in model_state
    assert "transformer.decoder.layers.0.multihead_attn.in_proj_weight" in model_state
    save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    losses += [train_step(model, optimizer, batch(step, torch.bfloat16)) for step in range(3, 5)]
    model, optimizer = sharded(level)
    train_step(model, optimizer, batch(7, torch.bfloat16))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert losses[3:] == [train_step(model, optimizer, batch(step, torch.bfloat16)) for step in range(3, 5)]
    return losses, whole_weights(model)


@pytest.mark.parametrize("level", [pytest.param("O2", marks=pytest.mark.slow), "O3"])
def test_shards_train_what_one_rank_trains_and_resume(ranks: RankPool, tmp_path: Path, level: str) -> None:
    """All ranks have the same batches: bit for bit. The second rank has no rows of ``bias_k`` [1, 1, 64]."""
    folders = [str(tmp_path / name) for name in ("one", "two")]
    ((losses, weights),) = ranks.run(on_default_group, on_shards, level, folders[0], num_ranks=1)
    assert losses[3] < losses[0]
    for other_losses, other_weights in ranks.run(on_default_group, on_shards, level, folders[1], num_ranks=2):
        assert other_losses == losses
        assert all(torch.equal(other_weights[name], weight) for name, weight in weights.items())
