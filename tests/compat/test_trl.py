"""TRL's SFTTrainer over a model in FP8, whole and with PEFT's adapters beside frozen FP8 weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fp8_megatron
from fp8_megatron.dtypes import E4M3

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")


def tiny_llama() -> Any:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        pad_token_id=0,
        eos_token_id=1,
    )
    return transformers.LlamaForCausalLM(config)


def tokenizer(folder: Path) -> Any:
    """Words of numbers; SFTTrainer wants one, although the data has tokens already."""
    import tokenizers

    words = {"<pad>": 0, "</s>": 1, **{str(number): number for number in range(2, 64)}}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="</s>")


def keeps_head(name: str, _: torch.nn.Module) -> bool:
    """TRL multiplies with the head's weight itself."""
    return "lm_head" not in name


def train(model: Any, optimizer: Any, folder: Path) -> list[float]:
    starts = torch.randint(2, 40, (64, 1), generator=torch.Generator().manual_seed(3))
    data = datasets.Dataset.from_dict({"input_ids": (starts + torch.arange(16)).tolist()})
    config = trl.SFTConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=True,
        max_steps=10,
        per_device_train_batch_size=8,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
    )
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    trainer = trl.SFTTrainer(
        model, config, train_dataset=data, processing_class=tokenizer(folder), optimizers=(optimizer, scheduler)
    )
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_fine_tuning_the_whole_model(tmp_path: Path) -> None:
    model = tiny_llama()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = train(*fp8_megatron.initialize(model, adamw, opt_level="O2", filter=keeps_head), tmp_path)
    assert losses[-1] < 0.8 * losses[0]


def test_adapters_beside_frozen_fp8_weights(tmp_path: Path) -> None:
    """The base weights rest in E4M3 and do not change; only adapters have state."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny_llama(), config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = fp8_megatron.initialize(model, torch.optim.AdamW(trained, lr=3e-2), filter=keeps_head)
    frozen = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
    assert frozen.payload.dtype == E4M3
    before = frozen.payload.clone()
    losses = train(model, optimizer, tmp_path)
    assert losses[-1] < losses[0]
    assert torch.equal(frozen.payload.view(torch.uint8), before.view(torch.uint8))
