"""Documents and sliding windows: what is read, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from megatron.core.transformer.utils import is_layer_window_attention

from fp8_megatron.config.checks import ConfigError, check_config
from fp8_megatron.config.io import parse_config
from fp8_megatron.config.model import ModelConfig, layer_pattern, window_sizes

MOCK = "--mock-data --vocab-size 512 "
TEXT = "--data-path a --vocab-size 512 --tokenizer-type NullTokenizer --reset-attention-mask "


def problems(flags: str) -> list[str]:
    try:
        check_config(parse_config(flags.split()), 1, on_this_machine=False)
    except ConfigError as error:
        return str(error).splitlines()
    return []


@pytest.mark.parametrize(
    "flags",
    [
        TEXT,
        TEXT + "--window-size 100,0 --attention-backend flash --bf16",
        MOCK + "--window-size (100,0)",
        MOCK + "--window-size 0,-1 --attention-backend math",
        MOCK + "--window-size 5000,0 --window-attn-skip-freq 6",
        MOCK + "--window-size 5,0 --window-attn-skip-freq ([1]*5+[0])*4",
        MOCK + "--window-size 5,0 --precision te",
        TEXT + "--softmax-type learnable --attention-dropout 0 --window-size 100,0",
        MOCK + "--softmax-type off-by-one --attention-dropout 0 --attention-backend cudnn",
    ],
)
def test_what_works_passes(flags: str) -> None:
    assert problems(flags) == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (TEXT + "--precision te", "reset_attention_mask: Transformer Engine's attention cannot keep documents"),
        (TEXT + "--attention-backend cudnn", "reset_attention_mask runs in FlashAttention's kernels, not attention_ba"),
        (MOCK + "--window-size 5,0 --attention-backend cudnn", "window_size(5,0) runs in FlashAttention's kernels,"),
        (MOCK + "--window-size 5,0 --hidden-size 4608 --num-attention-heads 16", "up to 256, not 288; choose another"),
        (TEXT + "--kv-channels 36", "heads have a multiple of 8 columns up to 256, not 36"),
        (
            MOCK + "--softmax-type learnable",
            "softmax_type(learnable) has no dropout, attention_dropout is 0.1; give --at",
        ),
        (
            MOCK + "--softmax-type learnable --precision te --attention-dropout 0",
            "softmax_type(learnable) is for this project's attention, not",
        ),
        (
            MOCK + "--softmax-type off-by-one --kv-channels 36 --attention-dropout 0",
            "softmax_type(off-by-one) runs in FlashAttention's kernels",
        ),
        (
            MOCK + "--softmax-type learnable --fp8-dot-product-attention --attention-dropout 0 --kv-channels 128",
            "fp8_dot_product_attention has no sinks; drop it or softmax_type(learnable)",
        ),
        (MOCK + "--window-size 5", "window_size(5) is not LEFT,RIGHT; give for example --window-size 1024,0"),
        (MOCK + "--window-size 5,x", "window_size(5,x) is not LEFT,RIGHT"),
        (MOCK + "--window-size -1,0", "window_size(-1,0): LEFT is 0 or more, and RIGHT is 0, as no token attends to"),
        (MOCK + "--window-size 5,5", "window_size(5,5): LEFT is 0 or more, and RIGHT is 0, as no token attends to"),
        (MOCK + "--window-size 5,0 --window-attn-skip-freq 0", "window_attn_skip_freq(0) is below 1; give at least 2"),
        (MOCK + "--window-size 5,0 --window-attn-skip-freq 1", "leaves no layer with window_size(5,0); drop both"),
        (MOCK + "--window-size 5,0 --window-attn-skip-freq [0]*24", "leaves no layer with window_size(5,0); drop both"),
        (MOCK + "--window-size 5,0 --window-attn-skip-freq [1,0]", "has 2 layers, num_layers is 24; give one 0 or 1"),
        (MOCK + "--window-size 5,0 --window-attn-skip-freq [2]*24", "is neither a number nor a list of 0 and 1"),
        (MOCK + "--window-size 5,0 --window-attn-skip-freq f()", "is neither a number nor a list of 0 and 1"),
    ],
)
def test_what_cannot_work_is_one_line(flags: str, said: str) -> None:
    (problem,) = problems(flags)
    assert said in problem


@pytest.mark.parametrize("pattern", [None, "1", "2", "3", "[1,0,0,1,1,0]", "[0]*2+[1]*4", "2*([1]*2+[0])"])
def test_layers_with_a_window_are_megatrons(pattern: str | None) -> None:
    model = replace(ModelConfig(num_layers=6), window_size="7,0", window_attn_skip_freq=pattern)
    theirs = None if pattern is None else eval(pattern)
    expected = [is_layer_window_attention((7, 0), theirs, layer) for layer in range(1, 7)]
    assert model.windows == [7 if has_one else None for has_one in expected]


def test_what_is_no_pattern() -> None:
    for text in (
        "",
        "[",
        "1.5",
        "[[1]]",
        "-1+[0]",
        "[1]*10**9",
        "[1]*99999999",
        "__import__('os')",
        "[True]",
        "(" * 5000,
    ):
        with pytest.raises(ValueError):
            layer_pattern(text)
    for text in ("", "1", "1,2,3", "(1,2", "1;2", "1.0,0"):
        if text == "(1,2":
            assert window_sizes(text) == (1, 2)
            continue
        with pytest.raises(ValueError):
            window_sizes(text)
