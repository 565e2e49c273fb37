"""Conversations in samples: all of them, whole, with their own positions; once a pass, the same on every rank."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from fp8_megatron.config.schema import DataConfig
from fp8_megatron.data import sft_encoding, sft_files
from fp8_megatron.data.document_bounds import CU_SEQLENS, PositionBounds
from fp8_megatron.data.loader import build_loader
from fp8_megatron.data.sft_datasets import (
    build_sft_datasets,
    build_sft_validation_sets,
    most_conversations,
    pack_best_fit,
)
from fp8_megatron.data.sft_encoding import ConversationEncoding
from fp8_megatron.data.sft_files import open_conversations
from fp8_megatron.data.transformers_tokenizer import HuggingFaceTokenizer
from fp8_megatron.errors import UserError
from tests.harness.chat_tokenizer import CHATML, save_chat_tokenizer, talk, write_lines
from tests.harness.ranks import RankPool, on_default_group

pytest.importorskip("transformers")
pre_tokenizers = pytest.importorskip("tokenizers.pre_tokenizers")

SEQ = 160


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(save_chat_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def lines(number: int, seed: int = 0) -> list[dict[str, Any]]:
    """Conversations of one or two answers; no text is there twice."""
    rng = np.random.default_rng(seed)
    texts = iter([f"{index}".rjust(int(rng.integers(4, 20)), "abcdefgh"[index % 8]) for index in range(4 * number)])
    return [talk(*(next(texts) for _ in range(2 * int(rng.integers(1, 3))))) for _ in range(number)]


def data_of(tokenizer: HuggingFaceTokenizer, **settings: Any) -> DataConfig:
    own = {"sft": True, "tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": tokenizer.name, "split": "1,0,0"}
    return DataConfig(**{**own, **settings})


def train_set(data: DataConfig, tokenizer: HuggingFaceTokenizer, size: int = 1000, **changed: Any) -> Dataset:
    given = {"seq_length": SEQ, "seed": 3, "sizes": (size, 0, 0), "tokenizer": tokenizer, **changed}
    dataset = build_sft_datasets(data, **given).train
    assert dataset is not None and len(dataset) >= size  # type: ignore[arg-type]
    return dataset


def conversations_in(sample: dict[str, torch.Tensor], eod: int) -> list[tuple[list[int], list[float]]]:
    """(tokens, loss mask) of each conversation of a sample; the mask of token i + 1 is at i."""
    starts = [*(sample["position_ids"] == 0).nonzero().view(-1).tolist(), SEQ]
    found = []
    for start, end in pairwise(starts):
        assert sample["position_ids"][start:end].tolist() == list(range(end - start))
        if (sample["tokens"][start:end] == eod).all():  # padding
            assert end == SEQ and not sample["loss_mask"][start:end].any()
            continue
        text = [*sample["tokens"][start:end].tolist(), int(sample["labels"][end - 1])]
        assert sample["labels"][start:end].tolist() == text[1:]
        found.append((text, sample["loss_mask"][start:end].tolist()))
    return found


@pytest.mark.parametrize("packs", [True, False])
def test_a_pass_has_every_conversation_once_and_whole(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path, packs: bool
) -> None:
    content = lines(40)
    path = write_lines(tmp_path / "a.jsonl", content)
    # A chat template's own tokens, and ours with their mask.
    file = open_conversations(path, ConversationEncoding(tokenizer.name), str(tmp_path / "cache"))
    own = [(file.tokens[file.conversation(i)], file.is_answer[file.conversation(i)]) for i in range(40)]
    dataset = train_set(data_of(tokenizer, data_path=(path,), sft_packing=packs), tokenizer)
    size = len(dataset._packs)  # type: ignore[attr-defined]
    found = [conversations_in(dataset[index], tokenizer.eod) for index in range(size)]
    assert size == 40 if not packs else sum((len(tokens) - 1) for tokens, _ in own) / SEQ <= size < 20
    expected = Counter((tuple(tokens.tolist()), tuple(map(float, mask[1:]))) for tokens, mask in own)
    assert Counter((tuple(text), tuple(mask)) for sample in found for text, mask in sample) == expected
    assert max(map(len, found)) + 1 == most_conversations(dataset)
    # The next pass has the same samples in another order, and the last is reached without the ones before.
    again = [dataset[size + index]["tokens"] for index in range(size)]
    first = [dataset[index]["tokens"] for index in range(size)]
    assert sorted(map(str, map(list, again))) == sorted(map(str, map(list, first)))
    assert any(not torch.equal(a, b) for a, b in zip(first, again, strict=True))
    fresh = train_set(data_of(tokenizer, data_path=(path,), sft_packing=packs), tokenizer)
    assert torch.equal(fresh[3 * size + 1]["tokens"], dataset[3 * size + 1]["tokens"])
    assert not torch.equal(train_set(data_of(tokenizer, data_path=(path,)), tokenizer, seed=4)[0]["tokens"], first[0])


def test_a_line_of_several_conversations_is_a_sample_without_packing(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    parts = [talk("q1", "a1", system="s1"), talk("q2", "a2", system="s2")]
    path = write_lines(
        tmp_path / "a.jsonl", [{"messages": [message for part in parts for message in part["messages"]]}]
    )
    dataset = train_set(data_of(tokenizer, data_path=(path,), sft_packing=False), tokenizer)
    texts = [tokenizer.decode(text) for text, _ in conversations_in(dataset[0], tokenizer.eod)]
    template = tokenizer.backend.apply_chat_template
    assert texts == [template(part["messages"], tokenize=False) + "<|endoftext|>" for part in parts]


def test_what_is_too_long_is_cut_off_and_counted(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = [talk("q", "a" * 300), talk("q" * 300, "a"), talk("q", "a")]
    path = write_lines(tmp_path / "a.jsonl", content)
    with caplog.at_level("INFO", logger="fp8_megatron"):
        dataset = train_set(data_of(tokenizer, data_path=(path,)), tokenizer)
    assert "2 conversations are longer than --seq-length 160 and are cut off; 1 have no answer left" in caplog.text
    samples = {str(dataset[index]["tokens"].tolist()): dataset[index] for index in range(2)}.values()
    found = sorted((conversations_in(sample, tokenizer.eod) for sample in samples), key=lambda one: -len(one[0][0]))
    (long, mask), (short, _) = found[0][0], found[1][0]
    assert len(long) == SEQ + 1 and tokenizer.decode(long).endswith("aaa") and sum(mask) > 100
    assert tokenizer.decode(short).count("<|im_start|>") == 2
    hopeless = write_lines(tmp_path / "b.jsonl", content[1:2])
    with pytest.raises(UserError, match=r"no conversation has an answer within --seq-length 160; raise it"):
        train_set(data_of(tokenizer, data_path=(hopeless,)), tokenizer)


def test_splits_blends_and_validation_sets(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    paths = [write_lines(tmp_path / f"{name}.jsonl", lines(30, seed)) for seed, name in enumerate("ab")]
    common = {"seq_length": SEQ, "seed": 3, "tokenizer": tokenizer}
    split = data_of(tokenizer, data_path=(paths[0],), split="20,10,0", sft_packing=False)
    cut = build_sft_datasets(split, sizes=(20, 10, 0), **common)
    first, second = (
        {tuple(conversations_in(one[index], tokenizer.eod)[0][0]) for index in range(size)}
        for one, size in ((cut.train, 20), (cut.valid, 10))
    )
    assert (len(first), len(second)) == (20, 10) and not first & second and cut.test is None
    blend = data_of(tokenizer, data_path=("0.75", paths[0], "0.25", paths[1]))
    dataset = train_set(blend, tokenizer, 400)
    own = train_set(data_of(tokenizer, data_path=(paths[0],)), tokenizer, 20)
    ours = {str(own[index]["tokens"].tolist()) for index in range(len(own))}  # type: ignore[arg-type]
    share = sum(str(dataset[index]["tokens"].tolist()) in ours for index in range(400)) / 400
    assert share == pytest.approx(0.75, abs=0.01)  # the builder rounds by a sample
    apart = data_of(tokenizer, train_data_path=(paths[0],), valid_data_path=tuple(paths))
    whole = build_sft_validation_sets(apart, **common)
    counts = [
        sum(len(conversations_in(s, tokenizer.eod)) for s in map(one.__getitem__, range(len(one)))) for one in whole
    ]  # type: ignore[arg-type]
    assert counts == [30, 30]
    with pytest.raises(UserError, match=r"with --split 999,1,0, the valid part of .*a.jsonl has none of its 30 lines"):
        build_sft_datasets(replace(split, split="999,1,0"), sizes=(20, 10, 0), **common)
    with pytest.raises(UserError, match=r"the test part .*: give more conversations, .* 0 as its last weight$"):
        build_sft_datasets(replace(split, split="969,30,1"), sizes=(20, 0, 10), **common)


@pytest.mark.parametrize("packs", [True, False])
def test_a_blend_without_weights_reads_all_of_its_files_equally_often(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path, packs: bool
) -> None:
    """Though one has a tenth of the conversations, which are cut off, and nearly all of the tokens."""
    long = write_lines(tmp_path / "long.jsonl", [talk("a" * 20, str(number) * 2000) for number in range(4)])
    short = write_lines(tmp_path / "short.jsonl", lines(40))
    given = {path: data_of(tokenizer, data_path=(path,), sft_packing=packs) for path in (long, short)}
    sets = {
        path: build_sft_validation_sets(replace(data, split="0,1,0"), seq_length=SEQ, seed=3, tokenizer=tokenizer)
        for path, data in given.items()
    }
    sizes = {path: len(one) for path, (one,) in sets.items()}  # type: ignore[arg-type]
    both = train_set(data_of(tokenizer, data_path=(long, short), sft_packing=packs), tokenizer, sum(sizes.values()))
    read = Counter(int(both[index]["dataset_id"]) for index in range(sum(sizes.values())))
    assert read == {0: sizes[long], 1: sizes[short]}


def test_tokens_are_made_once_for_a_file_and_a_template(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    encode_all = sft_files.encode_all
    monkeypatch.setattr(sft_files, "encode_all", lambda name, own: made.append(name) or encode_all(name, own))
    path = write_lines(tmp_path / "a.jsonl", lines(5))
    encoding = ConversationEncoding(tokenizer.name)

    def tokens(encoding: ConversationEncoding) -> int:
        return len(open_conversations(path, encoding, None).tokens)

    size = tokens(encoding)
    assert tokens(encoding) == size and len(made) == 1
    (tmp_path / "own.jinja").write_text(CHATML.replace("<|im_end|>", ""))
    assert tokens(replace(encoding, template_file=str(tmp_path / "own.jinja"))) < size and len(made) == 2
    assert tokens(encoding) == size and len(made) == 2
    write_lines(tmp_path / "a.jsonl", lines(6))
    assert tokens(encoding) > size and len(made) == 3
    folders = [one.name for one in (tmp_path / "cache").iterdir()]
    assert len(folders) == 2 and all(name.startswith("sft-") for name in folders)  # the old state's are gone


def test_another_tokenizer_of_one_folder_makes_tokens_anew(tmp_path: Path) -> None:
    """Its files may have any names. What leaves it as it was makes nothing anew."""
    from transformers import AutoTokenizer

    folder = tmp_path / "tokenizer"
    folder.mkdir()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, "an", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: index for index, word in enumerate(words)}))
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    path = write_lines(tmp_path / "a.jsonl", [talk("banana?", "ananas")])

    def tokens() -> list[int]:
        return open_conversations(path, ConversationEncoding(str(folder)), None).tokens.tolist()

    (folder / "merges.txt").write_text("#version: 0.2\n")
    letter_by_letter = tokens()
    (folder / "merges.txt").write_text("#version: 0.2\na n\n")
    merged = tokens()
    assert len(merged) < len(letter_by_letter)
    own = AutoTokenizer.from_pretrained(str(folder)).apply_chat_template(talk("banana?", "ananas")["messages"])
    assert merged[: len(own["input_ids"])] == own["input_ids"]
    (folder / "README.md").write_text("two n")
    os.utime(folder / "tokenizer_config.json")
    made = sorted((tmp_path / "cache").iterdir())
    assert tokens() == merged and sorted((tmp_path / "cache").iterdir()) == made


@pytest.mark.parametrize("part", ["tokens", "is_answer", "conversation_ends", "line_ends"])
@pytest.mark.parametrize("damage", ["nothing", "header", "all but a byte", "a bit"])
def test_damaged_tokens_are_made_again(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str, part: str
) -> None:
    path = write_lines(tmp_path / "a.jsonl", lines(5))
    before = open_conversations(path, ConversationEncoding(tokenizer.name), None).tokens.tolist()
    (file,) = (tmp_path / "cache").glob(f"sft-*/{part}.npy")
    whole = file.read_bytes()
    flipped = whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:]
    file.write_bytes({"nothing": b"", "header": whole[:50], "all but a byte": whole[:-1], "a bit": flipped}[damage])
    assert open_conversations(path, ConversationEncoding(tokenizer.name), None).tokens.tolist() == before
    assert file.read_bytes() == whole and f"making {file} again" in caplog.text
    assert sorted(one.suffix for one in file.parent.iterdir()) == [".json"] + [".npy"] * 4


def test_an_index_of_a_blend_of_conversations_that_was_cut_short_is_made_again(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = [write_lines(tmp_path / f"{name}.jsonl", lines(5)) for name in "ab"]
    data = data_of(tokenizer, data_path=("1", paths[0], "1", paths[1]))
    before = [train_set(data, tokenizer)[index]["tokens"].tolist() for index in range(4)]
    (file,) = (tmp_path / "cache").glob("blend-*/*-dataset_sample_index.npy")
    file.write_bytes(file.read_bytes()[:50])
    assert [train_set(data, tokenizer)[index]["tokens"].tolist() for index in range(4)] == before
    assert f"making {file} again" in caplog.text


@pytest.mark.slow
def test_processes_give_the_same_tokens(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(tmp_path / "a.jsonl", lines(200))
    alone = open_conversations(path, ConversationEncoding(tokenizer.name), str(tmp_path / "alone"))
    read_batches = sft_encoding.read_batches
    monkeypatch.setattr(sft_encoding, "read_batches", lambda paths: read_batches(paths, batch_bytes=1000))
    monkeypatch.setattr(sft_encoding, "_ALONE_BELOW_BYTES", 0)
    monkeypatch.setattr(sft_encoding.os, "cpu_count", lambda: 2)
    several = open_conversations(path, ConversationEncoding(tokenizer.name), str(tmp_path / "several"))
    for name in ("tokens", "is_answer", "conversation_ends", "line_ends"):
        assert np.array_equal(getattr(alone, name), getattr(several, name))


def _error_of(_group: torch.distributed.ProcessGroup, path: str, tokenizer: str) -> str:
    try:
        open_conversations(path, ConversationEncoding(tokenizer), None)
    except UserError as error:
        return str(error)
    return ""


def test_every_rank_has_the_error(ranks: RankPool, tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [talk("q", "a"), {"messages": [{"role": "user", "content": "q"}]}])
    errors = ranks.run(on_default_group, _error_of, path, tokenizer.name, num_ranks=2)
    assert errors[0] == errors[1] and errors[0].startswith(f"{path}:2: no message of the assistant")


def test_a_loader_goes_on_after_consumed_samples(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    """Over other ranks too; each batch has the bounds of its conversations."""
    path = write_lines(tmp_path / "a.jsonl", lines(30))
    dataset = train_set(data_of(tokenizer, data_path=(path,)), tokenizer, 48)
    place = {"micro_batch_size": 2, "data_parallel_rank": 0, "data_parallel_size": 1}
    room = 2 * most_conversations(dataset)
    whole = list(build_loader(dataset, **place, documents=PositionBounds(room)))  # type: ignore[arg-type]
    rest = [
        list(
            build_loader(dataset, **{**place, "data_parallel_rank": rank, "data_parallel_size": 2}, consumed_samples=16)
        )  # type: ignore[arg-type]
        for rank in range(2)
    ]
    interleaved = [batch for pair in zip(*rest, strict=True) for batch in pair]
    assert len(whole) == 24 and len(interleaved) == 16
    for one, other in zip(whole[8:], interleaved, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in other)
    for batch in whole:
        starts = (batch["position_ids"].view(-1) == 0).nonzero().view(-1).tolist()
        bounds = batch[CU_SEQLENS].tolist()
        assert bounds[: len(starts)] == starts and set(bounds[len(starts) :]) == {2 * SEQ} and len(bounds) == room + 1
    with pytest.raises(UserError, match=r"has \d+ conversations, .* room for 2; give --cuda-graph-impl none"):
        PositionBounds(2).of(torch.stack([dataset[0]["position_ids"], dataset[1]["position_ids"]]))


def test_packs_waste_little() -> None:
    assert pack_best_fit(np.array([3, 7, 2, 8]), 10) == [[3, 2], [1, 0]]
    assert pack_best_fit(np.zeros(0, dtype=np.int64), 10) == []
    lengths = np.random.default_rng(1).integers(1, 1001, size=5000)
    packs = pack_best_fit(lengths, 1000)
    assert sorted(item for one in packs for item in one) == list(range(5000))
    assert max(lengths[one].sum() for one in packs) <= 1000
    assert len(packs) <= 11 / 9 * np.ceil(lengths.sum() / 1000) + 1


def test_a_cache_that_this_host_does_not_see_is_named(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sft_files, "_first_does", lambda action: None)
    with pytest.raises(UserError, match=r"a.jsonl to .*, which this host does not see; give --data-cache-path"):
        open_conversations(write_lines(tmp_path / "a.jsonl", lines(1)), ConversationEncoding(tokenizer.name), None)


def test_a_file_without_lines_is_named(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(UserError, match=r"a.jsonl has no conversation; give one a line"):
        open_conversations(str(tmp_path / "a.jsonl"), ConversationEncoding(tokenizer.name), None)
