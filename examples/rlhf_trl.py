"""Reinforcement learning from feedback with TRL's GRPO: a policy, its frozen reference, and a frozen reward model.

The frozen models keep their linear weights in FP8: one byte a parameter, and no state. The table counts the three
models together, beside BF16 AMP with the frozen models in BF16.

python examples/rlhf_trl.py               small models and prompts made on the spot; a CPU takes a minute
python examples/rlhf_trl.py --model Qwen/Qwen2.5-1.5B-Instruct --reward Skywork/Skywork-Reward-V2-Qwen3-0.6B \\
    --data trl-lib/ultrafeedback-prompt --batch-size 8 --generations 8 --length 256 --lr 1e-6   real ones
"""

import argparse
import tempfile
from dataclasses import replace
from typing import Any

import torch
from datasets import Dataset, load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

import fp8_megatron
from fp8_megatron.any_model.meter import Bytes, Meter, Row, table


class Measures(TrainerCallback):
    """Calls the meter between the optimizer's step and `zero_grad`."""

    def __init__(self, meter: Meter):
        self.meter = meter

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.meter.step()


def layers_in_fp8(name: str, _: torch.nn.Module) -> bool:
    """All but the heads, whose weights TRL and a reward model's output of one column read themselves."""
    return "lm_head" not in name and not name.endswith("score")


def train(name: str, rows: Dataset, arguments: argparse.Namespace) -> Row:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).to(device)
    reward = AutoModelForSequenceClassification.from_pretrained(arguments.reward, num_labels=1, dtype=torch.bfloat16)
    reward.to(device).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=arguments.lr)
    if name != "BF16 AMP":
        fp8_megatron.replace_linears(reward, filter=layers_in_fp8)
        policy, optimizer = fp8_megatron.initialize(policy, optimizer, opt_level=name, filter=layers_in_fp8)

    meter = Meter(name, policy, optimizer)
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            max_steps=arguments.steps,
            per_device_train_batch_size=arguments.batch_size,
            num_generations=arguments.generations,
            max_completion_length=arguments.length,
            learning_rate=arguments.lr,
            beta=0.04,
            bf16=True,
            use_cpu=device == "cpu",
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            policy,
            reward_funcs=reward,
            args=settings,
            train_dataset=rows,
            processing_class=AutoTokenizer.from_pretrained(arguments.model, padding_side="left"),
            reward_processing_classes=AutoTokenizer.from_pretrained(arguments.reward),
            optimizers=(optimizer, None),
            callbacks=[Measures(meter)],
        )
        reference = trainer.ref_model.to(torch.bfloat16).requires_grad_(False)
        if name != "BF16 AMP":
            fp8_megatron.replace_linears(reference, filter=layers_in_fp8)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    row = meter.finish(loss=losses[-1])
    frozen = Bytes.of(reference, None).weights + Bytes.of(reward, None).weights
    return replace(row, bytes=replace(row.bytes, weights=row.bytes.weights + frozen))


def make_models(folder: str) -> tuple[str, str]:
    """Save a policy and a reward model with random weights, and a tokenizer of 256 bytes; their folders."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_ = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(
        vocab_size=272, **sizes, num_key_value_heads=4, pad_token_id=tokenizer.pad_token_id, tie_word_embeddings=True
    )
    paths = (f"{folder}/policy", f"{folder}/reward")
    for path, kind in zip(paths, (Qwen2ForCausalLM, Qwen2ForSequenceClassification), strict=True):
        config.num_labels = 1
        kind(config).save_pretrained(path)
        tokenizer.save_pretrained(path)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="the policy: its folder, or name on the hub")
    parser.add_argument("--reward", help="the reward model: its folder, or name on the hub")
    parser.add_argument("--data", help="a data set with a column prompt: its folder, or name on the hub")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--generations", type=int, default=4)
    parser.add_argument("--length", type=int, default=8, help="tokens of a completion")
    parser.add_argument("--lr", type=float, default=1e-3)
    arguments = parser.parse_args()
    if arguments.data:
        rows = load_dataset(arguments.data, split="train")
    else:
        rows = Dataset.from_list([{"prompt": f"Count to {number}: "} for number in range(64)])
    with tempfile.TemporaryDirectory() as folder:
        if not arguments.model:
            arguments.model, arguments.reward = make_models(folder)
        print(table([train(name, rows, arguments) for name in ("BF16 AMP", "O1", "O2", "O3")]))


if __name__ == "__main__":
    main()
