"""--sft: what goes with it, and what would be ignored."""

from __future__ import annotations

import pytest

from fp8_megatron.config.checks import ConfigError, check_config
from fp8_megatron.config.io import parse_config

MODEL = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64 --vocab-size 300 --train-iters 5"
SFT = f"{MODEL} --sft --data-path chats.jsonl --tokenizer-type SFTTokenizer --tokenizer-model folder"


def problems(words: str) -> str:
    with pytest.raises(ConfigError) as error:
        check_config(parse_config(words.split()), 1)
    return str(error.value)


def test_megatrons_words_are_taken() -> None:
    data = parse_config([*SFT.split(), "--sft-tokenizer-prompt-format", "nemotron-nano-v2"]).data
    assert data.tokenizer_kind == "HuggingFaceTokenizer" and data.sft and data.keeps_documents_apart
    check_config(parse_config([*SFT.split(), "--no-sft-packing", "--sft-chat-template", "own.jinja"]), 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{MODEL} --sft --mock-data", "sft reads conversations, and mock_data are random tokens; give --data-path"),
        (f"{MODEL} --sft --data-path a.jsonl --tokenizer-model b.model", "not tokenizer_type(SentencePieceTokenizer)"),
        (f"{SFT} --sft-chat-template own.jinja --sft-tokenizer-prompt-format identity", "sft_chat_template(own.jinja"),
        (f"{MODEL} --data-path a --tokenizer-model b --no-sft-packing", "sft_packing(False) has no effect without sft"),
        (f"{MODEL} --data-path a --tokenizer-model b --sft-chat-template c", "sft_chat_template(c) has no effect"),
        (f"{SFT} --precision te", "sft: Transformer Engine's attention cannot keep documents apart"),
        (f"{SFT} --attention-backend cudnn", "sft runs in FlashAttention's kernels, not attention_backend(cudnn)"),
    ],
)
def test_what_cannot_work_or_is_ignored_is_named(words: str, message: str) -> None:
    assert message in problems(words)
