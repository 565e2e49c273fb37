"""The table of models: what the trainer reads is the registry's, and every other yes is a small model that trains."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import fp8_megatron
from fp8_megatron.any_model import report
from fp8_megatron.models.registry import ARCHITECTURES
from fp8_megatron.update_rules import RULES
from tests.any_model.architectures import ARCHITECTURES as TRAINED
from tests.docs.documents import ROOT
from tests.harness.fp8_models import shard
from tests.harness.ranks import RankPool, on_default_group

#: model_type → trainer, initialize, fully_shard.
ROWS: dict[str, list[str]] = {
    kind: [cell.strip() for cell in cells.split("|")]
    for kinds, cells in re.findall(
        r"^\| [^|]+ \| ((?:`\w+`(?:, )?)+) \| (.*) \|$",
        (ROOT / "docs" / "supported.md").read_text(),
        flags=re.MULTILINE,
    )
    for kind in re.findall(r"`(\w+)`", kinds)
    if kind != "model_type"
}
VOCABULARY, STEPS = 96, 6
_COMMON = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCABULARY, "max_position_embeddings": 64},
    "pad_token_id": 0,
}
_EXPERTS = {
    **{"intermediate_size": 64, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
}
_LATENT = {
    **{"num_key_value_heads": 4, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "q_lora_rank": 32},
    **{"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32},
}
_OWN: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY},
    **{kind: {**_COMMON, **_EXPERTS} for kind in ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss")},
    "deepseek_v3": {**_COMMON, **_EXPERTS, **_LATENT},
}


def says(kind: str, door: int) -> bool:
    return ROWS[kind][door].startswith("yes")


def train(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(STEPS):
        tokens = torch.randint(VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(step % 2))
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def build(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **_OWN.get(kind, _COMMON))
    return transformers.AutoModelForCausalLM.from_config(config)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def through_initialize(kind: str, level: str) -> list[float]:
    model = build(kind)
    model, optimizer = fp8_megatron.initialize(model, adamw(model), level)
    assert len(report(model).fp8) >= 8  # both layers
    return train(model, optimizer)


def through_fully_shard(group: torch.distributed.ProcessGroup, kind: str) -> list[float]:
    model = build(kind)
    fp8_megatron.replace_linears(model, filter=lambda name, layer: "lm_head" not in name)
    shard(*(model.transformer.h if kind == "gpt2" else model.model.layers), model)
    model, optimizer = fp8_megatron.initialize(model, adamw(model), "O3")
    return train(model, optimizer)


def test_the_trainers_models_are_the_registrys() -> None:
    families = {kind for one in ARCHITECTURES for kind in one.hugging_face().families}
    assert {kind for kind in ROWS if says(kind, 0)} == families


def test_models_that_are_no_decoders_are_trained_elsewhere() -> None:
    """`test_architectures` compares their losses with FP32's."""
    assert {"bert", "t5", "vit", "swin", "convnext"} <= set(TRAINED)
    assert all(says(kind, 1) for kind in ROWS)


_DECODERS = [kind for kind in ROWS if says(kind, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", _DECODERS)
def test_initialize(kind: str) -> None:
    """Losses are within 2% of FP32's, which fall by more than that."""
    expected = train(model := build(kind), adamw(model))
    assert expected[-1] < 0.95 * expected[0]
    for level in ("O2", "O3"):
        assert through_initialize(kind, level)[-1] == pytest.approx(expected[-1], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("kind", _DECODERS)
def test_fully_shard(kind: str, ranks: RankPool) -> None:
    """Two ranks with equal batches train as FP32 does, within 2%."""
    first, second = ranks.run(on_default_group, through_fully_shard, kind, num_ranks=2)
    assert first == second
    assert first[-1] == pytest.approx(train(model := build(kind), adamw(model))[-1], rel=0.02)


def test_its_optimizers_are_the_registrys() -> None:
    text = (ROOT / "docs" / "supported.md").read_text()
    rows = re.findall(r"^\| ([^|]*(?:SGD|Muon)[^|]*) \| yes \| yes \| yes \|", text, flags=re.MULTILINE)
    assert {word.lower() for row in rows for word in row.partition(", with")[0].split(", ")} == set(RULES)
