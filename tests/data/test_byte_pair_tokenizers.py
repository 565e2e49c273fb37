"""Tokenizers of Megatron's names, each against the library that defines its ids."""

import base64
import json
from pathlib import Path
from typing import Literal

import pytest

from fp8_megatron.data.tokenizer_settings import TokenizerOptions, build_tokenizer, tokenizer_problems
from fp8_megatron.data.transformers_tokenizer import HuggingFaceTokenizer

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

VERSIONS: tuple[Literal["v1", "v2"], ...] = ("v1", "v2")
HARD = [
    "",
    " ",
    "   two  runs   ",
    "\n\n\tx\t\t\n  y\r\n",
    "naïve 漢字 😀 \x00 \x7f",
    "a" * 500 + " " + "0123456789" * 20,
    "  \u2028\u00a0 nbsp",
    "It's we'll I'VE they'd 'tis don't",
    "a<|endoftext|>b <|endoftext|>",
    "<s>a</s> <SPECIAL_9>",
    "HTTPServer parseXMLDoc camelCaseÀÉ ßtraße ǅungla",
    "1234567 3.14 ١٢٣ ½ Ⅷ",
    "e\u0301 \u200b\ufeff 👩🏽‍💻 🇩🇪",
    "a/b\r\n//c;\r\r\n  \n x",
    "\U0010ffff \ue000",
]


@pytest.fixture(scope="module")
def gpt2_files(tmp_path_factory: pytest.TempPathFactory, python_source: str) -> TokenizerOptions:
    """Files of a small vocabulary in GPT-2's format."""
    folder = tmp_path_factory.mktemp("gpt2")
    model = tokenizers.ByteLevelBPETokenizer()
    texts = [python_source, *HARD]
    model.train_from_iterator(texts, vocab_size=700, special_tokens=["<|endoftext|>"], show_progress=False)
    model.save_model(str(folder))
    return TokenizerOptions(vocab_file=str(folder / "vocab.json"), merge_file=str(folder / "merges.txt"))


@pytest.fixture(scope="module")
def tiktoken_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """512 ranks: the bytes, then pairs that are made of earlier ones."""
    pairs = [bytes([first, second]) for first in b"etaoinsrhld AT0\n" for second in b"etaoinsrhld AT0\n"]
    path = tmp_path_factory.mktemp("tiktoken") / "vocab.json"
    path.write_text(json.dumps(entries([bytes([value]) for value in range(256)] + pairs)))
    return str(path)


def entries(tokens: list[bytes]) -> list[dict[str, object]]:
    """A vocabulary in tiktoken's JSON form."""
    return [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode(errors="replace")}
        for rank, token in enumerate(tokens)
    ]


def test_gpt2_ids_are_those_of_transformers(gpt2_files, python_source):
    ours = build_tokenizer("GPT2BPETokenizer", None, options=gpt2_files)
    vocab = json.loads(Path(gpt2_files.vocab_file).read_text(encoding="utf-8"))
    lines = Path(gpt2_files.merge_file).read_text(encoding="utf-8").splitlines()
    merges = [tuple(line.split(" ")) for line in lines if not line.startswith("#version")]
    theirs = transformers.GPT2Tokenizer(vocab=vocab, merges=merges)
    texts = [python_source, *HARD]
    assert ours.encode_batch(texts) == theirs(texts, add_special_tokens=True)["input_ids"]
    assert (ours.vocab_size, ours.eod) == (len(theirs), theirs.eos_token_id)
    assert ours.encode("a<|endoftext|>b")[1] == ours.eod, "as in Megatron, it is one token in a text too"
    for text in texts:
        assert ours.decode(ours.encode(text)) == text
    check_parts(ours, texts)


def check_parts(tokenizer, texts):
    """A text in parts has the ids of the whole."""
    parts = [tokenizer.parts(text, 3) for text in texts]
    assert max(map(len, parts)) > 100
    for text, own in zip(texts, parts, strict=True):
        assert [token for part in own for token in tokenizer.encode(part)] == tokenizer.encode(text)


def test_gpt2_takes_further_special_tokens_and_is_exported_whole(gpt2_files, tmp_path):
    options = TokenizerOptions(
        gpt2_files.vocab_file, gpt2_files.merge_file, tokenizer_special_tokens=("<end of turn>",)
    )
    ours = build_tokenizer("GPT2BPETokenizer", None, options=options)
    plain = build_tokenizer("GPT2BPETokenizer", None, options=gpt2_files)
    assert ours.vocab_size == plain.vocab_size + 1
    assert ours.encode("x<end of turn>y") == [*plain.encode("x"), plain.vocab_size, *plain.encode("y")]
    assert plain.parts("to turn", 1) == ["to", " turn"] and ours.parts("to turn", 1) == ["to turn"]
    ours.save(tmp_path)
    saved = HuggingFaceTokenizer(str(tmp_path))
    assert saved.encode_batch(HARD) == ours.encode_batch(HARD) and saved.eod == ours.eod
    alone = (tmp_path / "tokenizer.json").rename(tmp_path / "alone.json")  # as StarCoder's TokenizerFromFile has it
    of_file = build_tokenizer("HuggingFaceTokenizer", str(alone))
    assert of_file.encode_batch(HARD) == ours.encode_batch(HARD) and of_file.eod == ours.eod


@pytest.mark.parametrize("pattern", VERSIONS)
def test_tiktoken_ids_are_those_of_megatron_core(tiktoken_file, python_source, pattern):
    pytest.importorskip("tiktoken")
    from megatron.core.tokenizers.text.libraries.tiktoken_tokenizer import TikTokenTokenizer

    settings = {"vocab_size": 500, "num_special_tokens": 20, "pattern": pattern}
    theirs = TikTokenTokenizer(tiktoken_file, **settings)
    options = TokenizerOptions(tiktoken_pattern=pattern, tiktoken_num_special_tokens=20)
    ours = build_tokenizer("TikTokenizer", tiktoken_file, 500, options)
    for text in [python_source, *HARD]:
        assert ours.encode(text) == theirs.text_to_ids(text)
        assert ours.decode(ours.encode(text)) == text
    check_parts(ours, [python_source, *HARD])
    assert (ours.vocab_size, ours.eod) == (theirs.vocab_size, theirs.eod) == (500, 2)
    assert ours.encode("a</s>b") == [20 + ord("a"), ours.eod, 20 + ord("b")]


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"])
def test_the_three_names_of_sentencepiece_are_megatron_cores(kind, tokenizer_model, python_source):
    from megatron.core.tokenizers.text.libraries.sentencepiece_tokenizer import SentencePieceTokenizer

    ours, theirs = build_tokenizer(kind, tokenizer_model), SentencePieceTokenizer(tokenizer_model)
    for text in [python_source, *HARD]:
        assert ours.encode(text) == theirs.text_to_ids(text)
    assert (ours.vocab_size, ours.eod) == (theirs.vocab_size, theirs.eos_id)


def test_a_hugging_face_tokenizer_adds_what_it_is_set_up_to_add(tmp_path, python_source):
    from tokenizers import processors

    model = tokenizers.ByteLevelBPETokenizer()
    special = ["<bos>", "<eos>"]
    model.train_from_iterator([python_source], vocab_size=400, special_tokens=special, show_progress=False)
    model.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    model.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    whole = build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    assert whole.encode_batch(HARD) == [theirs(text).input_ids for text in HARD]
    assert whole.encode("a")[0] == 0, "a document starts with BOS, as Megatron's tool writes it"
    bare = TokenizerOptions(tokenizer_hf_no_include_special_tokens=True)
    ids = build_tokenizer("HuggingFaceTokenizer", str(tmp_path), options=bare).encode_batch(HARD)
    assert ids == [theirs.convert_tokens_to_ids(theirs.tokenize(text)) for text in HARD]


def test_a_name_of_the_hub_is_read_from_the_cache_or_refused_at_once(tmp_path, monkeypatch, python_source):
    from huggingface_hub import constants

    assert tokenizer_problems("HuggingFaceTokenizer", "someone/some-model", TokenizerOptions()) == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"some-model is no folder here and not in the cache .* HF_HUB_OFFLINE is set"):
        build_tokenizer("HuggingFaceTokenizer", "someone/some-model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("fp8_megatron.data.transformers_tokenizer.getproxies", dict)
    with pytest.raises(ValueError, match=r"http://127.0.0.1:9 cannot be reached \(Connection refused\): give a local"):
        build_tokenizer("HuggingFaceTokenizer", "someone/some-model")
    snapshot = tmp_path / "models--someone--some-model" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    model = tokenizers.ByteLevelBPETokenizer()
    model.train_from_iterator([python_source], vocab_size=300, special_tokens=["<eos>"], show_progress=False)
    model.save(str(snapshot / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (snapshot / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "models--someone--some-model" / "refs").mkdir()
    (tmp_path / "models--someone--some-model" / "refs" / "main").write_text("0123")
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    cached = build_tokenizer("HuggingFaceTokenizer", "someone/some-model")
    assert cached.decode(cached.encode("def f(x):")) == "def f(x):"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}", "it holds a dict, not a list"),
        (b"\xff", "can't decode byte"),
        (
            json.dumps(entries([b"a"])).encode(),
            "has 1 tokens, 80 are needed for --vocab-size: lower --vocab-size by 79",
        ),
        (json.dumps(entries([b"a"] * 80)).encode(), "entry 0 is b'a': the first 256 are the bytes in order"),
        (json.dumps([3] * 80).encode(), "entry 0 is not an object with rank 0"),
        (json.dumps([{"rank": 0, "token_bytes": "?"}] * 80).encode(), "is not a vocabulary of tiktoken"),
    ],
)
def test_a_damaged_tiktoken_vocabulary_is_one_line(tmp_path, content, message):
    pytest.importorskip("tiktoken")
    path = tmp_path / "vocab.json"
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        build_tokenizer("TikTokenizer", str(path), 100, TokenizerOptions(tiktoken_num_special_tokens=20))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_bad_settings_of_each_kind_are_named(gpt2_files, tiktoken_file, tokenizer_model, tmp_path):
    def problem(kind: str, model: str | None, **options: object) -> str:
        with pytest.raises(ValueError) as error:
            build_tokenizer(kind, model, None, TokenizerOptions(**options))
        return str(error.value)

    assert "needs --vocab-file: its gpt2-vocab.json\nGPT2BPETokenizer needs --merge-file" in problem(
        "GPT2BPETokenizer", None
    )
    absent = problem("GPT2BPETokenizer", None, vocab_file="absent", merge_file=gpt2_files.merge_file)
    assert absent == "--vocab-file absent is not a file: give the gpt2-vocab.json of the tokenizer"
    swapped = {"vocab_file": gpt2_files.merge_file, "merge_file": gpt2_files.vocab_file}
    assert "are no byte-level BPE" in problem("GPT2BPETokenizer", None, **swapped)
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    without_end = {"vocab_file": str(tmp_path / "vocab.json"), "merge_file": str(tmp_path / "merges.txt")}
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    assert "has no <|endoftext|>" in problem("GPT2BPETokenizer", None, **without_end)
    few = problem("TikTokenizer", tiktoken_file, tokenizer_special_tokens=("<s>",))
    assert "--tokenizer-special-tokens <s> has no <unk>" in few
    assert "at least the 7 named" in problem("TikTokenizer", tiktoken_file, tiktoken_num_special_tokens=3)
    ignored = problem("SentencePieceTokenizer", tokenizer_model, tokenizer_special_tokens=("<x>",))
    assert ignored.startswith(
        "tokenizer_special_tokens(<x>) has no effect under tokenizer_type(SentencePieceTokenizer)"
    )


def test_a_null_tokenizer_may_end_documents_with_another_id():
    options = TokenizerOptions(null_tokenizer_eod_id=0)
    assert build_tokenizer("NullTokenizer", None, 100, options).eod == 0
    with pytest.raises(ValueError, match="--null-tokenizer-eod-id 100 is outside --vocab-size 100"):
        build_tokenizer("NullTokenizer", None, 100, TokenizerOptions(null_tokenizer_eod_id=100))
