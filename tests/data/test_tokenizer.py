import argparse
import inspect
import io
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from fp8_megatron.config.schema import DataConfig
from fp8_megatron.data.hugging_face_tokenizer import export_tokenizer, import_tokenizer
from fp8_megatron.data.sft_conversations import conversations_of
from fp8_megatron.data.sft_encoding import ConversationEncoding
from fp8_megatron.data.tokenizer import NullTokenizer, SentencePieceTokenizer, padded_vocab_size
from fp8_megatron.data.tokenizer_settings import TokenizerOptions, build_tokenizer
from fp8_megatron.data.transformers_tokenizer import HuggingFaceTokenizer
from fp8_megatron.errors import UserError
from tests.harness.chat_tokenizer import CHATML, MARKED_CHATML, save_chat_tokenizer, talk

AWKWARD = [
    "",
    " ",
    "   two  runs   ",
    "\n\n\tx\t\t\n  y\r\n",
    "naïve 漢字 😀 \x00 \x7f",
    "</s><unk><0x41>",
    "a" * 500 + " " + "0123456789" * 20,
    "  \u2028\u00a0 nbsp",
]


def train_with_defaults(**options: object) -> bytes:
    """A SentencePiece model of Python source; without `options` with the usual normalisation and dummy prefix."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(inspect.getsource(argparse).splitlines()[:500]),
        model_writer=model,
        **{"vocab_size": 600, "model_type": "bpe", "byte_fallback": True, "minloglevel": 2, **options},
    )
    return model.getvalue()


def test_sentencepiece_gives_text_back_exactly(tokenizer_model, python_source):
    tokenizer = build_tokenizer("SentencePieceTokenizer", tokenizer_model)
    for text in [python_source, *AWKWARD]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= token < tokenizer.vocab_size and token != tokenizer.eod for token in ids)
    assert len(tokenizer.encode(python_source)) < 0.6 * len(python_source)


def encoded_flat(tokenizer, texts):
    ids, lengths = tokenizer.encode_flat(texts)
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]


@pytest.mark.parametrize("dummy_prefix", [None, False, True])
@pytest.mark.parametrize("size", [1, 7, 512])
def test_texts_in_parts_are_what_sentencepiece_gives(tmp_path, tokenizer_model, python_source, size, dummy_prefix):
    path = Path(tokenizer_model)
    if dummy_prefix is not None:  # else the model of tools/train_tokenizer.py
        path = tmp_path / "other.model"
        options = {"normalization_rule_name": "identity", "remove_extra_whitespaces": dummy_prefix}
        path.write_bytes(train_with_defaults(**options, add_dummy_prefix=dummy_prefix))
    tokenizer = SentencePieceTokenizer(str(path))
    tokenizer._PART_CHARACTERS = size
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    texts = [python_source, *AWKWARD, "a\u2581\u2581 \u2581b \u2581", python_source[::-1]]
    assert sum(len(tokenizer.parts(text, size)) > 2 for text in texts) > 1
    assert encoded_flat(tokenizer, texts) == processor.encode(texts)


AS_IT_IS = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "add_dummy_prefix": False}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {**AS_IT_IS, "split_by_whitespace": False},
        {**AS_IT_IS, "model_type": "unigram"},
        {**AS_IT_IS, "byte_fallback": False},
    ],
)
def test_other_sentencepiece_models_are_encoded_whole(tmp_path, python_source, options):
    path = tmp_path / "other.model"
    path.write_bytes(train_with_defaults(**options))
    tokenizer = SentencePieceTokenizer(str(path))
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    texts = ["if option_string in  self.actions:\n    return None", " the  argument is not a string ", python_source]
    texts += ["one line\n\tand 漢\n字"]  # without bytes, unknown characters beside each other are one id
    assert all(tokenizer.parts(text, 1) == [text] for text in texts)
    assert encoded_flat(tokenizer, texts) == processor.encode(texts)


def test_tokenizer_survives_a_move_to_a_loader_process(tokenizer_model):
    tokenizer = build_tokenizer("SentencePieceTokenizer", tokenizer_model)
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.encode("def f(x):\n    return x") == tokenizer.encode("def f(x):\n    return x")


def test_bad_models_are_named_with_a_fix(tmp_path):
    with pytest.raises(ValueError, match=r"absent\.model does not exist: give the \.model file"):
        build_tokenizer("SentencePieceTokenizer", str(tmp_path / "absent.model"))
    with pytest.raises(ValueError, match="is a folder"):
        build_tokenizer("SentencePieceTokenizer", str(tmp_path))
    junk = tmp_path / "junk.model"
    junk.write_bytes(b"not a model at all")
    with pytest.raises(ValueError, match=r"junk\.model \(18 bytes\) is not a SentencePiece model"):
        build_tokenizer("SentencePieceTokenizer", str(junk))
    without_eos = tmp_path / "without_eos.model"
    without_eos.write_bytes(train_with_defaults(eos_id=-1))
    with pytest.raises(ValueError, match=r"no end-of-sequence token \(eos_id = -1\).*--eos_id=1"):
        build_tokenizer("SentencePieceTokenizer", str(without_eos))


def test_bad_settings_are_named_with_a_fix(tokenizer_model):
    with pytest.raises(ValueError, match="SentencePieceTokenizer needs --tokenizer-model"):
        build_tokenizer("SentencePieceTokenizer", None)
    with pytest.raises(
        ValueError, match="--tokenizer-type GPT2 is unknown: choose GPT2BPETokenizer, SentencePieceTokenizer"
    ):
        build_tokenizer("GPT2", tokenizer_model)
    with pytest.raises(ValueError, match=r"--vocab-size 599 is smaller than the vocabulary of .*\(600\)"):
        build_tokenizer("SentencePieceTokenizer", tokenizer_model, 599)
    assert build_tokenizer("SentencePieceTokenizer", tokenizer_model, 700).vocab_size == 600


def test_null_tokenizer_takes_ids_and_ends_documents_with_the_last():
    tokenizer = build_tokenizer("NullTokenizer", None, 1000)
    assert (tokenizer.vocab_size, tokenizer.eod) == (1000, 999)
    assert tokenizer.decode(tokenizer.encode("5 0 998")) == "5 0 998"
    with pytest.raises(ValueError, match="token id 1000 is outside --vocab-size 1000"):
        tokenizer.encode("1 1000")
    with pytest.raises(ValueError, match="reads token ids separated by spaces, found 'some text'"):
        tokenizer.encode("some text")
    for text in ("1_0", "\uff11", "1.0", "1" * 5000):
        with pytest.raises(ValueError, match="reads token ids separated by spaces"):
            tokenizer.encode(text)
    with pytest.raises(ValueError, match="set --vocab-size"):
        build_tokenizer("NullTokenizer", None)
    with pytest.raises(
        ValueError, match=r"tokenizer_special_tokens\(<x>\) has no effect under tokenizer_type\(NullTok"
    ):
        build_tokenizer("NullTokenizer", None, 1000, TokenizerOptions(tokenizer_special_tokens=("<x>",)))
    with pytest.raises(ValueError, match="at least 2"):
        NullTokenizer(1)


def test_hugging_face_without_transformers_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ValueError, match="pip install transformers"):
        build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    with pytest.raises(ValueError, match="absent does not exist"):
        build_tokenizer("HuggingFaceTokenizer", str(tmp_path / "absent"))


def test_hugging_face_folder(tmp_path, python_source):
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("transformers")
    model = tokenizers.ByteLevelBPETokenizer()
    model.train_from_iterator([python_source], vocab_size=400, special_tokens=["<eod>"], show_progress=False)
    model.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eod>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    assert (tokenizer.vocab_size, tokenizer.eod) == (400, 0)
    assert tokenizer.decode(tokenizer.encode(python_source)) == python_source
    assert tokenizer.encode_batch([]) == []
    with pytest.raises(ValueError, match="cannot encode the text"):
        tokenizer.encode("\ud800")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        build_tokenizer("HuggingFaceTokenizer", str(tmp_path))


def test_special_tokens_of_a_run_are_exported_with_its_hugging_face_folder(tmp_path):
    pytest.importorskip("transformers")
    folder, words = save_chat_tokenizer(tmp_path / "own"), ("<tool>", "<|im_end|>")
    (tmp_path / "out").mkdir()
    data = DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=folder, tokenizer_special_tokens=words)
    exported = export_tokenizer(data, tmp_path / "out")
    run = build_tokenizer("HuggingFaceTokenizer", folder, options=TokenizerOptions.of(data))
    theirs = build_tokenizer("HuggingFaceTokenizer", str(tmp_path / "out"))
    assert exported.token_ids["eos_token_id"] == theirs.eod == run.eod
    assert theirs.encode("a<tool>b<|im_end|>") == run.encode("a<tool>b<|im_end|>") and len(run.encode("<tool>")) == 1
    assert theirs.backend.chat_template == run.backend.chat_template


def save_nameless_tokenizer(folder, settings):
    """A byte-level BPE whose settings do not name its class, as those of GPT-2 on the hub."""
    tokenizers = pytest.importorskip("tokenizers")
    folder.mkdir()
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {word: index for index, word in enumerate([*letters, "an", "<|endoftext|>"])}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("a", "n")]))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    model.add_special_tokens(["<|endoftext|>"])
    model.model.save(str(folder))
    model.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


def test_a_tokenizer_whose_class_its_model_names_is_imported_as_that(tmp_path):
    """transformers finds it by the model's config.json, which stays behind."""
    transformers = pytest.importorskip("transformers")
    folder = save_nameless_tokenizer(tmp_path / "gpt2", {"model_max_length": 64})
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    imported = import_tokenizer(tmp_path / "gpt2", tmp_path / "ours" / "tokenizer")
    ours = build_tokenizer(imported.tokenizer_type, imported.tokenizer_model)
    assert ours.eod == theirs.eos_token_id == 257
    assert ours.encode(" banana\n") == theirs(" banana\n")["input_ids"]
    assert ours.backend.model_max_length == theirs.model_max_length


@pytest.mark.parametrize("place", ["added_tokens.json", "tokenizer_config.json"])
def test_tokens_beside_a_sentencepiece_model_are_imported(tmp_path, place):
    """The model alone would cut them."""
    pytest.importorskip("transformers")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "tokenizer.model").write_bytes(train_with_defaults())
    settings = {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}
    decoder = {str(index): {"content": text, "special": True} for index, text in enumerate(("<unk>", "<s>", "</s>"))}
    known = {**settings, "added_tokens_decoder": decoder}
    (tmp_path / "own" / "tokenizer_config.json").write_text(json.dumps(known))
    assert import_tokenizer(tmp_path / "own", tmp_path / "without").tokenizer_type == "SentencePieceTokenizer"
    if place == "added_tokens.json":
        known = settings
        (tmp_path / "own" / place).write_text(json.dumps({"<|im_start|>": 600}))
    else:
        decoder["600"] = {"content": "<|im_start|>", "special": True}
    (tmp_path / "own" / "tokenizer_config.json").write_text(json.dumps(known))
    imported = import_tokenizer(tmp_path / "own", tmp_path / "ours")
    assert f"tokenizer.model in {tmp_path / 'ours'}" in imported.message
    ours = build_tokenizer(imported.tokenizer_type, imported.tokenizer_model)
    assert 600 in ours.encode("<|im_start|>user") and ours.vocab_size == 601


def test_a_tokenizer_that_transformers_cannot_load_is_said(tmp_path):
    pytest.importorskip("transformers")
    save_nameless_tokenizer(tmp_path / "own", {})
    (tmp_path / "own" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (tmp_path / "own" / "tokenizer.json").write_text("{}")
    assert "cannot be loaded by transformers" in import_tokenizer(tmp_path / "own", tmp_path / "ours").message


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_an_exported_tokenizer_is_the_runs_beside_any_model(tmp_path, kind):
    """Without a name transformers takes the class of the model that is exported, which cuts words otherwise."""
    transformers = pytest.importorskip("transformers")
    folder = save_nameless_tokenizer(tmp_path / "own", {"eos_token": "<|endoftext|>"})
    run = build_tokenizer("HuggingFaceTokenizer", folder)
    (tmp_path / "out").mkdir()
    exported = export_tokenizer(
        DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=folder), tmp_path / "out"
    )
    (tmp_path / "out" / "config.json").write_text(json.dumps({"model_type": kind}))
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "out"))
    text = " banana\n ane\u0301"  # Qwen's class composes the last two characters
    assert theirs(text)["input_ids"] == run.encode(text)
    assert exported.token_ids == {"eos_token_id": run.eod}


@pytest.mark.parametrize("leaves_out", [True, False])
def test_an_export_says_which_tokens_a_run_left_out(tmp_path, leaves_out):
    pytest.importorskip("transformers")
    folder = save_nameless_tokenizer(tmp_path / "own", {"eos_token": "<|endoftext|>"})
    path = tmp_path / "own" / "tokenizer.json"
    first = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [first, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [257], "tokens": ["<|endoftext|>"]}},
    }
    path.write_text(json.dumps({**json.loads(path.read_text()), "post_processor": template}))
    data = DataConfig(
        tokenizer_type="HuggingFaceTokenizer",
        tokenizer_model=folder,
        tokenizer_hf_no_include_special_tokens=leaves_out,
    )
    (tmp_path / "out").mkdir()
    message = export_tokenizer(data, tmp_path / "out").message
    assert ("it puts <|endoftext|> around a text, which the run left out" in message) == leaves_out


@pytest.mark.parametrize("own", ["no template", "a file", "in the settings"])
@pytest.mark.parametrize("asked", ["file", "identity"])
def test_the_chat_template_that_a_run_was_trained_with_is_exported(tmp_path, own, asked):
    """transformers writes a conversation as training did, whatever template the tokenizer came with."""
    pytest.importorskip("transformers")
    folder = save_chat_tokenizer(tmp_path / "own", CHATML if own == "a file" else None)
    if own == "in the settings":
        path = tmp_path / "own" / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": CHATML}))
    file = tmp_path / "trained.jinja"
    file.write_text("\n" + MARKED_CHATML.replace("<|im_end|>", "!<|im_end|>") + "\n\n")
    template = {"sft_chat_template": str(file)} if asked == "file" else {"sft_tokenizer_prompt_format": asked}
    theirs, out = exported_chat_tokenizer(tmp_path, folder, **template)
    trained = ConversationEncoding(
        folder, (), template.get("sft_tokenizer_prompt_format", "default"), template.get("sft_chat_template")
    )
    messages = talk("Hi?", "Yes.")
    (conversation,) = conversations_of(json.dumps(messages).encode(), "here")
    ids = theirs.apply_chat_template(messages["messages"], return_dict=True)["input_ids"]
    assert [*ids, theirs.eos_token_id] == trained.template().encode(conversation)[0].tolist()
    settings = json.loads((out / "tokenizer_config.json").read_text())
    assert settings.get("chat_template", theirs.chat_template) == theirs.chat_template, "older readers take this one"


def test_the_tokenizers_own_chat_template_is_exported_alone_if_it_is_that_of_training(tmp_path):
    """The tokenizer's own would not be that of a file which is gone."""
    pytest.importorskip("transformers")
    folder = save_chat_tokenizer(tmp_path / "own")
    theirs, _ = exported_chat_tokenizer(tmp_path / "default", folder)
    assert theirs.chat_template == CHATML
    theirs, _ = exported_chat_tokenizer(tmp_path / "gone", folder, sft_chat_template="gone.jinja")
    assert theirs.chat_template is None


def exported_chat_tokenizer(tmp_path, folder, **settings):
    """(the exported tokenizer as transformers reads it, its folder) of a run with --sft."""
    out = tmp_path / "out"
    out.mkdir(parents=True)
    data = DataConfig(sft=True, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=folder, **settings)
    message = export_tokenizer(data, out).message
    assert ("no chat template: gone.jinja, which the run used, is not here" in message) == ("gone" in str(out))
    return build_tokenizer("HuggingFaceTokenizer", str(out)).backend, out


def test_a_vocabulary_reaches_to_its_largest_id(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    model = tokenizers.models.BPE({"a": 0, "b": 1, "<|endoftext|>": 2, "ab": 70_000}, [("a", "b")])
    model.save(str(tmp_path))
    files = TokenizerOptions(vocab_file=str(tmp_path / "vocab.json"), merge_file=str(tmp_path / "merges.txt"))
    backend = tokenizers.Tokenizer(model)
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>").save_pretrained(tmp_path)
    for tokenizer in (
        build_tokenizer("GPT2BPETokenizer", None, options=files),
        build_tokenizer("HuggingFaceTokenizer", str(tmp_path)),
    ):
        assert tokenizer.encode("bab") == [1, 70_000] and tokenizer.vocab_size == 70_001


@pytest.mark.parametrize("place", ["tokenizer.json", "added_tokens_decoder", "added_tokens.json", "a flag", "nowhere"])
def test_an_end_token_that_the_vocabulary_lacks_is_refused(tmp_path, place):
    """transformers would add it behind the last id, where a model of this tokenizer has no row."""
    folder = Path(save_chat_tokenizer(tmp_path))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["eos_token"] = "<|end|>"
    next_id = HuggingFaceTokenizer(str(folder)).vocab_size
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    token = {"content": "<|end|>", **flags}
    if place == "added_tokens_decoder":
        settings["added_tokens_decoder"] = {str(next_id): token}
    if place == "added_tokens.json":
        (folder / "added_tokens.json").write_text(json.dumps({"<|end|>": next_id}))
    if place == "tokenizer.json":
        content = json.loads((folder / "tokenizer.json").read_text())
        content["added_tokens"].append({"id": next_id, **token})
        (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    special = ("<|end|>",) if place == "a flag" else ()
    if place == "nowhere":
        with pytest.raises(UserError, match=rf"eos_token '<\|end\|>', which its vocabulary lacks: .* id {next_id},"):
            HuggingFaceTokenizer(str(folder), special_tokens=special)
    else:
        assert HuggingFaceTokenizer(str(folder), special_tokens=special).eod == next_id


@pytest.mark.parametrize(
    ("vocab_size", "make_divisible_by", "tp", "padded"),
    [(50257, 128, 1, 50304), (50257, 128, 8, 51200), (4096, 128, 2, 4096), (1, 1, 3, 3)],
)
def test_padded_vocab_size(vocab_size, make_divisible_by, tp, padded):
    assert padded_vocab_size(vocab_size, make_divisible_by, tp) == padded


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"garbage", "tokenizer.json is not JSON"),
        ("tokenizer.json", b"[" * 100_000, "tokenizer.json is not JSON .it nests too deeply"),
        ("tokenizer.json", b"[]", "tokenizer.json holds a list, not an object"),
        ("tokenizer.json", b"{}", "cannot be loaded by transformers"),
        ("tokenizer.json", b'{"model": {"type": "BPE", "vocab": 3, "merges": {}}}', "cannot be loaded by transformers"),
        ("tokenizer_config.json", b"\xff\x00", "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", b"3", "tokenizer_config.json holds a int, not an object"),
        ("special_tokens_map.json", b'""', "special_tokens_map.json holds a str, not an object"),
    ],
)
def test_garbage_in_a_hugging_face_folder_is_one_line(tmp_path, python_source, name, content, message):
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("transformers")
    model = tokenizers.ByteLevelBPETokenizer()
    model.train_from_iterator([python_source], vocab_size=300, special_tokens=["<eod>"], show_progress=False)
    model.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eod>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    assert "\n" not in str(error.value)
