"""Supervised fine-tuning with TRL: chat data, packing, a loss over answers, in BF16 AMP and in FP8.

python examples/sft_trl.py                a small model and conversations made on the spot; a CPU takes seconds
python examples/sft_trl.py --model Qwen/Qwen2.5-1.5B-Instruct --data HuggingFaceH4/ultrachat_200k --split train_sft \\
    --template chatml.jinja --batch-size 8 --length 2048 --lr 1e-5   a real model and real conversations
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, TrainerCallback
from trl import SFTConfig, SFTTrainer

import fp8_megatron
from fp8_megatron.any_model.meter import Meter, Row, table

#: Answers are marked, so that TRL takes the loss over them alone.
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
)


class Measures(TrainerCallback):
    """Calls the meter between the optimizer's step and `zero_grad`."""

    def __init__(self, meter: Meter):
        self.meter = meter

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.meter.step()


def train(name: str, model: Any, tokenizer: Any, rows: Dataset, arguments: argparse.Namespace) -> Row:
    torch.manual_seed(0)
    model = model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    if name != "BF16 AMP":
        # TRL computes the loss from the weight of the language model's head itself, so the head stays as it is.
        model, optimizer = fp8_megatron.initialize(
            model, optimizer, opt_level=name, filter=lambda layer_name, _: "lm_head" not in layer_name
        )

    meter = Meter(name, model, optimizer)
    with tempfile.TemporaryDirectory() as folder:
        settings = SFTConfig(
            output_dir=folder,
            max_steps=arguments.steps,
            per_device_train_batch_size=arguments.batch_size,
            learning_rate=arguments.lr,
            max_length=arguments.length,
            packing=True,
            assistant_only_loss=True,
            bf16=True,
            use_cpu=not torch.cuda.is_available(),
            gradient_checkpointing=False,
            logging_steps=max(1, arguments.steps // 4),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = SFTTrainer(
            model,
            args=settings,
            train_dataset=rows,
            processing_class=tokenizer,
            optimizers=(optimizer, None),
            callbacks=[Measures(meter)],
        )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return meter.finish(loss=losses[-1])


def made_tokenizer() -> Any:
    """256 bytes and the tokens of the template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_ = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.add_tokens(["<|im_start|>"], special_tokens=True)
    return tokenizer


def made_conversations(number: int) -> Dataset:
    """Sums of two numbers."""
    sums = [(index * 7 % 50, index * 11 % 50) for index in range(number)]
    return Dataset.from_list(
        [
            {
                "messages": [
                    {"role": "user", "content": f"What is {a} plus {b}?"},
                    {"role": "assistant", "content": f"{a} plus {b} is {a + b}."},
                ]
            }
            for a, b in sums
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a causal language model: its folder, or name on the hub")
    parser.add_argument("--data", help="a data set with a column messages: its folder, or name on the hub")
    parser.add_argument("--split", default="train")
    parser.add_argument("--template", type=Path, help="file of a chat template with {%% generation %%} around answers")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--lr", type=float, default=3e-3)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.model:
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        model = lambda: AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).to(device)  # noqa: E731
    else:
        tokenizer = made_tokenizer()
        sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = Qwen2Config(vocab_size=272, **sizes, num_key_value_heads=2, max_position_embeddings=arguments.length)
        model = lambda: AutoModelForCausalLM.from_config(config).to(device)  # noqa: E731
    tokenizer.chat_template = arguments.template.read_text() if arguments.template else TEMPLATE
    rows = load_dataset(arguments.data, split=arguments.split) if arguments.data else made_conversations(200)
    names = ("BF16 AMP", "O1", "O2", "O3")
    print(table([train(name, model, tokenizer, rows, arguments) for name in names]))


if __name__ == "__main__":
    main()
