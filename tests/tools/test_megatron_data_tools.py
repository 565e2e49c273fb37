"""Options of Megatron's data tools: the files are those that megatron-core's builder writes for the same documents."""

import json
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from fp8_megatron.commands import merge_datasets, preprocess_data
from fp8_megatron.data.tokenizer import Tokenizer
from fp8_megatron.data.tokenizer_settings import TokenizerOptions, build_tokenizer

DOCUMENTS: list[str | list[str]] = [
    "First document. It has two sentences.",
    "",
    ["already", "", "cut  into", "sentences"],
    "naïve 漢字 😀\n\n",
    [],
    "A last\n\none. Dr. Smith agrees!  Yes?\nNo.",
    " ",
]
Splitter = Callable[[str], Sequence[str]]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join(json.dumps({"text": text, "more": "m"}) for text in DOCUMENTS) + "\n", encoding="utf-8")
    return path


def preprocess(lines: Path, output: Path, model: str, *flags: str) -> None:
    words = ["--input", str(lines), "--output-prefix", str(output), "--tokenizer-model", model, "--workers", "1"]
    assert preprocess_data.main([*words, "--append-eod", *flags]) == 0


def write_as_megatron(
    prefix: Path, tokenizer: Tokenizer, documents: Sequence[str | list[str]], split: Splitter = lambda text: [text]
) -> None:
    """Each document as Megatron's tool encodes it with --append-eod."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(tokenizer.vocab_size))
    for document in documents:
        texts = [document] if isinstance(document, str) else document
        encoded = [tokenizer.encode(sentence) for text in texts for sentence in split(text)]
        encoded = [ids for ids in encoded if ids]
        if encoded:
            encoded[-1] = [*encoded[-1], tokenizer.eod]
        builder.add_document(
            np.array(list(chain.from_iterable(encoded)), dtype=np.int64), [len(ids) for ids in encoded]
        )
    builder.finalize(f"{prefix}.idx")


def assert_same_files(one: Path, two: Path) -> None:
    for extension in (".bin", ".idx"):
        assert Path(f"{one}{extension}").read_bytes() == Path(f"{two}{extension}").read_bytes(), extension


def test_empty_documents_and_lists_of_sentences_are_written_as_megatron_writes_them(lines, tmp_path, tokenizer_model):
    preprocess(lines, tmp_path / "ours", tokenizer_model, "--dataset-impl", "mmap", "--json-keys", "text", "more")
    tokenizer = build_tokenizer("SentencePieceTokenizer", tokenizer_model)
    write_as_megatron(tmp_path / "theirs", tokenizer, DOCUMENTS)
    assert_same_files(tmp_path / "ours_text_document", tmp_path / "theirs")
    write_as_megatron(tmp_path / "more", tokenizer, ["m"] * len(DOCUMENTS))
    assert_same_files(tmp_path / "ours_more_document", tmp_path / "more")


@pytest.mark.parametrize("partitions", [2, 3, 10])
def test_partitions_give_megatrons_order(lines, tmp_path, tokenizer_model, partitions, monkeypatch):
    """Megatron deals lines out to its partitions one by one, and joins the partitions with `add_index`."""
    from fp8_megatron.data import documents

    original = documents.read_batches
    monkeypatch.setattr(
        preprocess_data, "read_batches", lambda *args, **kw: original(*args, **kw | {"batch_bytes": 100})
    )
    preprocess(lines, tmp_path / "ours", tokenizer_model, "--partitions", str(partitions))
    tokenizer = build_tokenizer("SentencePieceTokenizer", tokenizer_model)
    whole = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=DType.optimal_dtype(tokenizer.vocab_size))
    for index in range(partitions):
        write_as_megatron(tmp_path / f"part_{index}", tokenizer, DOCUMENTS[index::partitions])
        if DOCUMENTS[index::partitions]:  # megatron-core cannot map the empty file of a partition without documents
            whole.add_index(str(tmp_path / f"part_{index}"))
    whole.finalize(str(tmp_path / "theirs.idx"))
    assert_same_files(tmp_path / "ours_text_document", tmp_path / "theirs")
    assert sorted(path.name for path in tmp_path.glob("ours*")) == ["ours_text_document.bin", "ours_text_document.idx"]
    kept = ("--partitions", str(partitions), "--keep-sequential-samples")
    preprocess(lines, tmp_path / "kept", tokenizer_model, *kept)
    write_as_megatron(tmp_path / "in_order", tokenizer, DOCUMENTS)
    assert_same_files(tmp_path / "kept_text_document", tmp_path / "in_order")


@pytest.fixture
def punkt(tmp_path, monkeypatch):
    """A model of English made of a few sentences, where NLTK looks for one."""
    pytest.importorskip("nltk")
    import nltk
    from nltk.tokenize import punkt as library

    folder = tmp_path / "nltk" / "tokenizers" / "punkt_tab" / "english"
    folder.mkdir(parents=True)
    trainer = library.PunktTrainer()
    trainer.train("Dr. Smith came. Dr. Jones left. Mr. Brown saw Dr. Lee. He spoke to Mr. Black. " * 20)
    params = trainer.get_params()
    params.abbrev_types |= {"dr", "mr"}
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "nltk")])
    library.save_punkt_params(params, dir=str(folder))
    return library.PunktTokenizer("english")


def test_sentences_become_sequences(lines, tmp_path, tokenizer_model, punkt):
    preprocess(lines, tmp_path / "ours", tokenizer_model, "--split-sentences")
    tokenizer = build_tokenizer("SentencePieceTokenizer", tokenizer_model)
    assert punkt.tokenize(DOCUMENTS[5]) == ["A last\n\none.", "Dr. Smith agrees!", "Yes?", "No."]
    write_as_megatron(tmp_path / "theirs", tokenizer, DOCUMENTS, punkt.tokenize)
    assert_same_files(tmp_path / "ours_text_sentence", tmp_path / "theirs")
    preprocess(lines, tmp_path / "newlines", tokenizer_model, "--split-sentences", "--keep-newlines")
    with_spaces = {DOCUMENTS[0]: ["First document. ", "It has two sentences."]}
    with_spaces[DOCUMENTS[5]] = ["A last\n\none. ", "Dr. Smith agrees!  ", "Yes?\n", "No."]
    with_spaces |= {text: [text.rstrip()] for text in ("naïve 漢字 😀\n\n",)}
    write_as_megatron(tmp_path / "kept", tokenizer, DOCUMENTS, lambda text: with_spaces.get(text, punkt.tokenize(text)))
    assert_same_files(tmp_path / "newlines_text_sentence", tmp_path / "kept")


def test_a_missing_language_and_lone_flags_are_one_line(lines, tmp_path, tokenizer_model, punkt, capsys):
    words = ["--input", str(lines), "--output-prefix", str(tmp_path / "x"), "--tokenizer-model", tokenizer_model]
    assert preprocess_data.main([*words, "--split-sentences", "--lang", "finnish"]) == 2
    assert "NLTK has no model of --lang finnish here: python -m nltk.downloader punkt_tab" in capsys.readouterr().err
    assert preprocess_data.main([*words, "--keep-newlines"]) == 2
    assert "--keep-newlines is about --split-sentences, which is not given" in capsys.readouterr().err
    assert preprocess_data.main([*words, "--lang", "german"]) == 2
    assert "--lang german is about --split-sentences, which is not given" in capsys.readouterr().err


def test_gpt2_files_are_enough_to_name_the_tokenizer(lines, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.ByteLevelBPETokenizer()
    model.train_from_iterator(["some text"], vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    model.save_model(str(tmp_path))
    files = {"vocab_file": str(tmp_path / "vocab.json"), "merge_file": str(tmp_path / "merges.txt")}
    words = ["--input", str(lines), "--output-prefix", str(tmp_path / "ours"), "--workers", "1", "--append-eod"]
    flags = [word for name, file in files.items() for word in ("--" + name.replace("_", "-"), file)]
    assert preprocess_data.main([*words, *flags]) == 0
    tokenizer = build_tokenizer("GPT2BPETokenizer", None, options=TokenizerOptions(**files))
    write_as_megatron(tmp_path / "theirs", tokenizer, DOCUMENTS)
    assert_same_files(tmp_path / "ours_text_document", tmp_path / "theirs")


def test_merging_gives_what_megatron_core_merges(tmp_path, tokenizer_model, capsys):
    tokenizer = build_tokenizer("SentencePieceTokenizer", tokenizer_model)
    parts = tmp_path / "parts"
    parts.mkdir()
    for name, documents in (("b", DOCUMENTS[:3]), ("a_1", DOCUMENTS[3:]), ("a", DOCUMENTS[2:3])):
        write_as_megatron(parts / name, tokenizer, documents)
    (parts / "notes.txt").write_text("not data")
    whole = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for name in ("a", "a_1", "b"):
        whole.add_index(str(parts / name))
    whole.finalize(str(tmp_path / "theirs.idx"))
    words = ["--input", str(parts), "--output-prefix"]
    assert merge_datasets.main([*words, str(parts / "all")]) == 0
    assert "8 documents" in capsys.readouterr().out
    assert_same_files(parts / "all", tmp_path / "theirs")
    assert merge_datasets.main([*words, str(parts / "all")]) == 2
    assert "all.bin exists: give another --output-prefix, or --overwrite" in capsys.readouterr().err
    assert merge_datasets.main([*words, str(parts / "all"), "--overwrite"]) == 0
    assert_same_files(parts / "all", tmp_path / "theirs")


def test_what_cannot_be_merged_is_one_line(tmp_path, tokenizer_model, capsys):
    tokenizer = build_tokenizer("SentencePieceTokenizer", tokenizer_model)
    words = ["--input", str(tmp_path), "--output-prefix", str(tmp_path / "out" / "all")]

    def problem() -> str:
        assert merge_datasets.main(words) == 2 and not (tmp_path / "out").exists()
        return capsys.readouterr().err

    assert "has no .bin/.idx pairs to join" in problem()
    write_as_megatron(tmp_path / "a", tokenizer, ["text"])
    write_as_megatron(tmp_path / "b", build_tokenizer("NullTokenizer", None, 100_000), ["1 2"])
    assert "tokens of int32" in problem()
    builder = IndexedDatasetBuilder(str(tmp_path / "b.bin"), dtype=np.uint16, multimodal=True)
    builder.add_document(torch.tensor([1, 2, 3]), [1, 2], [0, 1])
    builder.finalize(str(tmp_path / "b.idx"))
    assert "b.idx is that of a multimodal dataset, whose modes would be lost" in problem()
    (tmp_path / "b.idx").unlink()
    assert "b has no .idx: copy it too, or move its .bin away" in problem()
    (tmp_path / "b.bin").unlink()
    (tmp_path / "a.bin").write_bytes(b"12")
    assert "a.bin has 2 bytes" in problem()
    words[1] = str(tmp_path / "absent")
    assert "is no folder" in problem()
