"""Fill-in-the-middle: a document's three parts are all there, in the order of PSM or SPM, between their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from fp8_megatron.config.fim import FimConfig
from fp8_megatron.config.schema import DataConfig
from fp8_megatron.data.datasets import build_datasets
from fp8_megatron.data.fim import FimRule
from fp8_megatron.data.tokenizer import Tokenizer
from fp8_megatron.data.tokenizer_settings import TokenizerOptions, build_tokenizer
from fp8_megatron.errors import UserError
from tests.harness.token_files import write_token_files

PREFIX, MIDDLE, SUFFIX, PAD, EOD, FILE = 200, 201, 202, 203, 204, 205
NAMES = {"<fim_prefix>": PREFIX, "<fim_middle>": MIDDLE, "<fim_suffix>": SUFFIX, "<fim_pad>": PAD, "<|endoftext|>": EOD}
TEXT = "the quick brown fox jumps over the lazy dog"


class Letters(Tokenizer):
    """One id a character."""

    def __init__(self) -> None:
        super().__init__(256, EOD, None)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(map(ord, text)) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    def token_id(self, token: str) -> int | None:
        return {**NAMES, "<file>": FILE}.get(token)


def rule(**settings: object) -> FimRule:
    return FimRule.of(FimConfig(fim_data=True, **settings), Letters())  # type: ignore[arg-type]


def permuted(sample: Sequence[int], number: int = 0, **settings: object) -> list[int]:
    tokens = np.array(sample, dtype=np.int64)
    return rule(**settings).permuted(tokens, np.random.default_rng(number)).tolist()


def text_of(cut: list[int]) -> str:
    """The document that was cut into `cut`, whichever way."""
    middle = cut.index(MIDDLE)
    assert cut[0] == PREFIX
    if cut[1] == SUFFIX:
        parts = (cut[middle + 1 :], cut[2:middle])
        return Letters().decode(parts[0] + parts[1])
    suffix = cut.index(SUFFIX)
    return Letters().decode(cut[1:suffix] + cut[middle + 1 :] + cut[suffix + 1 : middle])


@pytest.mark.parametrize("spm", [0.0, 1.0])
def test_a_document_is_its_three_parts(spm: float) -> None:
    """With room for the three tokens, which is taken from the end of a sample otherwise."""
    orders = set()
    for number in range(50):
        tokens = np.array(Letters().encode(TEXT))
        cut = rule(fim_rate=1.0, fim_spm_rate=spm)._document(tokens, np.random.default_rng(number)).tolist()
        assert text_of(cut) == TEXT and len(cut) == len(TEXT) + 3
        assert (cut[1] == SUFFIX) >= (spm == 1.0)
        orders.add(cut.index(MIDDLE))
    assert len(orders) > 20, "cuts are everywhere"


def test_each_document_of_a_sample_is_cut() -> None:
    sample = [*Letters().encode("first"), EOD, EOD, *Letters().encode("second one"), EOD, *Letters().encode(TEXT)]
    cut = permuted(sample, fim_rate=1.0)
    assert len(cut) == len(sample)
    first, empty, second, rest = " ".join(map(str, cut)).replace(f" {EOD} {EOD} ", f" {EOD}  {EOD} ").split(f" {EOD} ")
    assert not empty.strip()
    assert [text_of(list(map(int, part.split()))) for part in (first, second)] == ["first", "second one"]
    assert rest.split()[0] == str(PREFIX)


def test_rates_are_those_of_documents() -> None:
    tokens = Letters().encode(TEXT)
    assert permuted(tokens, fim_rate=0.0) == tokens
    cut = [permuted(tokens, number) for number in range(400)]
    assert 150 < sum(sample[0] == PREFIX for sample in cut) < 250  # 200 ± 5 σ of 10
    assert 60 < sum(sample[:2] == [PREFIX, SUFFIX] for sample in cut) < 140
    assert permuted(tokens, 7) == permuted(tokens, 7)


def test_fragments_are_cut_one_by_one() -> None:
    sample = [*Letters().encode("one file"), FILE, *Letters().encode("two"), FILE, *Letters().encode(TEXT)]
    split = {"fim_rate": 1.0, "fim_split_sample": "<file>", "fim_fragment_rate": 1.0}
    cut = permuted(sample, **split)
    ends = [place for place, token in enumerate(cut) if token == FILE]
    assert text_of(cut[: ends[0]]) == "one file" and text_of(cut[ends[0] + 1 : ends[1]]) == "two"
    assert permuted(sample, **{**split, "fim_fragment_rate": 0.0}) == sample
    assert permuted(sample, **{**split, "fim_rate": 0.0}) == sample


def test_what_begins_with_a_text_is_left_alone() -> None:
    tokens = Letters().encode(TEXT)
    assert permuted(tokens, fim_rate=1.0, fim_no_prefix="the quick") == tokens
    assert permuted(tokens, fim_rate=1.0, fim_no_prefix="quick") != tokens


def test_a_shorter_sample_is_filled() -> None:
    class Pairs(Letters):
        """Reads a quarter of the text, so that a cut sample is shorter."""

        def decode(self, ids: Sequence[int]) -> str:
            return super().decode(ids)[::4]

    own = FimRule.of(FimConfig(fim_rate=1.0), Pairs())
    cut = own.permuted(np.array(Letters().encode(TEXT)), np.random.default_rng(0)).tolist()
    assert len(cut) == len(TEXT) and cut[-1] == PAD and cut.count(MIDDLE) == 1


def test_missing_tokens_are_named() -> None:
    with pytest.raises(UserError, match=r"no token of --fim-prefix-token <PRE>: give others, or add them with --tok"):
        rule(fim_prefix_token="<PRE>")


def test_samples_of_token_files(python_source: str, tmp_path: Path) -> None:
    """A sample depends on the seed and its number, and is what GPTDataset gives, cut."""
    special = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>")
    model = tokenizers.ByteLevelBPETokenizer()
    model.train_from_iterator([python_source], vocab_size=500, special_tokens=["<|endoftext|>"], show_progress=False)
    model.save_model(str(tmp_path))
    files = (str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    options = TokenizerOptions(*files, tokenizer_special_tokens=special)
    tokenizer = build_tokenizer("GPT2BPETokenizer", None, options=options)
    documents = [[*tokenizer.encode(f"{TEXT} {number}" * 4), tokenizer.eod] for number in range(40)]
    write_token_files(tmp_path / "a", documents)

    def samples(**settings: object) -> list[list[int]]:
        data = DataConfig(data_path=(str(tmp_path / "a"),), split="1,0,0", **settings)  # type: ignore[arg-type]
        sizes = {"num_train_samples": 8, "num_valid_samples": 0, "num_test_samples": 0}
        built = build_datasets(data, seq_length=64, seed=3, tokenizer=tokenizer, **sizes).train
        return [built[index]["tokens"].tolist() for index in range(8)]  # type: ignore[index]

    plain, cut = samples(), samples(fim_data=True, fim_rate=1.0)
    assert samples(fim_data=True, fim_rate=0.0) == plain
    assert cut != plain and samples(fim_data=True, fim_rate=1.0) == cut
    prefix = tokenizer.token_id("<fim_prefix>")
    assert all(prefix in sample and len(sample) == 64 for sample in cut)
    assert samples(fim_data=True, fim_rate=1.0)[::-1][-1] == cut[0]
