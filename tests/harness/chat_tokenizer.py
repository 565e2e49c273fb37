"""A small tokenizer of transformers with a chat template, made of nothing; a model and conversations for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: Written as most templates are: the prompt of an answer is the beginning of its turn.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
#: The same text, with its answers marked.
MARKED_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>\\n' }}"
    "{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
)
VOCAB_SIZE = 259


def save_chat_tokenizer(folder: Path, template: str | None = CHATML) -> str:
    """Write a tokenizer of 256 bytes and the tokens <|endoftext|>, <|im_start|>, <|im_end|>; its folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    made.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    made.chat_template = template
    made.save_pretrained(str(folder))
    return str(folder)


def save_chat_model(root: str) -> None:
    """Write a small Llama with its tokenizer, ``model``, and conversations, ``train.jsonl`` and ``valid.jsonl``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = Path(root)
    save_chat_tokenizer(folder / "model")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCAB_SIZE, **sizes, num_key_value_heads=4, max_position_embeddings=256)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    for name, numbers in {"train": range(60), "valid": range(60, 70)}.items():
        write_lines(folder / f"{name}.jsonl", [talk(f"{n} + {n}?", f"It is {2 * n}.") for n in numbers])


def talk(*turns: str, system: str | None = None) -> dict[str, Any]:
    """A line's content: turns of the user and the assistant in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(turns)]
    first = [] if system is None else [{"role": "system", "content": system}]
    return {"messages": first + messages}


def write_lines(path: Path, lines: Sequence[Any]) -> str:
    """Write JSON lines; the path."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)
