"""RoBERTa learns masked words, in BF16 AMP and in FP8, with transformers.

python examples/roberta_mlm.py            a small model and sentences made on the spot; a CPU takes seconds
python examples/roberta_mlm.py --model FacebookAI/roberta-large --data Salesforce/wikitext \\
    --subset wikitext-103-raw-v1 --batch-size 32 --length 512   the shape of a real model, and real text
"""

import argparse
import random
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, DataCollatorForLanguageModeling, RobertaConfig, RobertaForMaskedLM

import fp8_megatron
from fp8_megatron.any_model.meter import Meter, Row, table

#: Of the sentences made on the spot.
_WORDS = 27


def param_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Vectors have no weight decay. A list of these that lived on would keep the weights that `initialize` replaces."""
    decays, others = [], []
    for parameter in model.parameters():
        (decays if parameter.dim() > 1 else others).append(parameter)
    return [{"params": decays, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]


def train(name: str, config: Any, batches: list[dict[str, torch.Tensor]], *, lr: float) -> Row:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = RobertaForMaskedLM(config).to(device)
    optimizer = torch.optim.AdamW(param_groups(model), lr=lr, betas=(0.9, 0.98), eps=1e-6)
    if name != "BF16 AMP":
        model, optimizer = fp8_megatron.initialize(model, optimizer, opt_level=name)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=10)

    meter = Meter(name, model, optimizer)
    for batch in batches:
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(**{key: tensor.to(device) for key, tensor in batch.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        meter.step(loss)
        optimizer.zero_grad()
    return meter.finish()


def made_tokenizer() -> Any:
    """Words of a small language, and RoBERTa's special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    vocabulary = {word: number for number, word in enumerate([*special, *(f"w{index}" for index in range(_WORDS))])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token", "mask_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=words, **names)


def made_sentences(number: int) -> list[str]:
    """Each sentence repeats three words of its own: a model can learn to look for them."""
    draw = random.Random(0)
    topics = [draw.sample(range(_WORDS), 3) for _ in range(number)]
    return [" ".join(f"w{draw.choice(topic)}" for _ in range(30)) for topic in topics]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a RoBERTa whose shape and tokenizer are taken: its folder, or name on the hub")
    parser.add_argument("--data", help="a data set with a column text: its folder, or name on the hub")
    parser.add_argument("--subset", help="of --data")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    arguments = parser.parse_args()
    if arguments.model:
        tokenizer, config = AutoTokenizer.from_pretrained(arguments.model), AutoConfig.from_pretrained(arguments.model)
    else:
        tokenizer = made_tokenizer()
        sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = RobertaConfig(vocab_size=_WORDS + 5, **sizes, max_position_embeddings=arguments.length + 2)
    number = arguments.steps * arguments.batch_size
    if arguments.data:
        from datasets import load_dataset

        rows = load_dataset(arguments.data, arguments.subset, split="train").filter(lambda row: len(row["text"]) > 200)
        texts = rows.select(range(number))["text"]
    else:
        texts = made_sentences(number)
    torch.manual_seed(0)
    mask = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
    encoded = [tokenizer(text, truncation=True, max_length=arguments.length) for text in texts]
    size = arguments.batch_size
    batches = [dict(mask(encoded[start : start + size])) for start in range(0, number, size)]
    print(table([train(name, config, batches, lr=arguments.lr) for name in ("BF16 AMP", "O1", "O2", "O3")]))


if __name__ == "__main__":
    main()
