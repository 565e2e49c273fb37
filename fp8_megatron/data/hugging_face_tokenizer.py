"""Export of a run's tokenizer to files that Hugging Face's tools load, and import of theirs.

A SentencePiece model becomes a ``tokenizer.json`` only if both give the same ids. The converted tokenizer is tried on
awkward texts and on the model's own pieces, and is not written if any result differs.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ..config.schema import DataConfig
from ..errors import UserError
from .byte_pair_tokenizers import GPT2BPETokenizer
from .sft_conversations import template_text
from .tokenizer import SentencePieceTokenizer, Tokenizer
from .tokenizer_settings import TokenizerOptions, build_tokenizer, tokenizer_problems
from .transformers_tokenizer import HuggingFaceTokenizer, check_json_files

_SPACE = "\u2581"
_GENERATION = "generation_config.json"
_TEMPLATE = "chat_template.jinja"
#: Templates that a caller names, and the one that transformers takes where tools are given.
_FURTHER_TEMPLATES = "additional_chat_templates"
_SETTINGS = "tokenizer_config.json"
_FILES = (
    "tokenizer.json",
    _SETTINGS,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    _TEMPLATE,
    _GENERATION,
)
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_TEXTS = (
    "Hello, world! It's 2024-01-31; 3.14159 times 100000.",
    "  leading and   inner    spaces\tand\ttabs \n\n\nnew lines  \n",
    "def f(x):\n\treturn {'a': [1, 2, x ** 3]}  # comment",
    "naïve café, Straße, Ελληνικά, русский, 漢字かな, العربية, עברית, 😀🏽 \u00a0 \ufeff \u200b e\u0301",
    "a" * 50 + " " * 50 + "!" * 50,
    "",
    " ",
    "\n",
)


@dataclass(frozen=True)
class ExportedTokenizer:
    """Result of an export.

    Attributes:
        message: what was exported, for the user.
        token_ids: ``eos_token_id`` and the like, for config.json.
    """

    message: str
    token_ids: Mapping[str, Any] = field(default_factory=dict)


def export_tokenizer(data: DataConfig, folder: Path) -> ExportedTokenizer:
    """Write a run's tokenizer beside an exported model, as far as Hugging Face's format can express it.

    A run with --sft leaves the chat template that it was trained with, whatever template its tokenizer has.

    Raises:
        UserError: the tokenizer's files cannot be read.
    """
    exported = _export_files(data, folder)
    template = _export_template(data, folder) if data.sft else None
    return exported if template is None else replace(exported, message=f"{exported.message}; {template}")


def _export_template(data: DataConfig, folder: Path) -> str | None:
    """Write the chat template of --sft over that of the tokenizer's files; returns a message for the user.

    None: it is that of the tokenizer's files. Where the template's file is gone, no template is left: the tokenizer's
    own is another one.
    """
    file = data.sft_chat_template
    try:
        text = template_text(data.sft_tokenizer_prompt_format, file)
    except UserError:
        _set_template(folder, None)
        return f"no chat template: {file}, which the run used, is not here; put it there as {_TEMPLATE}"
    if text is None:
        return None
    _set_template(folder, text)
    return f"chat template: {file or data.sft_tokenizer_prompt_format}"


def _set_template(folder: Path, text: str | None) -> None:
    """Leave one chat template, or none, among a tokenizer's files. Some readers take the one in its settings.

    Raises:
        UserError: a file is damaged.
    """
    (folder / _TEMPLATE).unlink(missing_ok=True)
    shutil.rmtree(folder / _FURTHER_TEMPLATES, ignore_errors=True)
    if text is not None:
        (folder / _TEMPLATE).write_text(text, encoding="utf-8", newline="")
    check_json_files(folder)
    settings = _settings(folder)
    if settings.pop("chat_template", None) is not None:
        settings |= {} if text is None else {"chat_template": text}
        _write_settings(folder, settings)


def _export_files(data: DataConfig, folder: Path) -> ExportedTokenizer:
    """Write the files of a run's tokenizer."""
    kind, options = data.tokenizer_kind, TokenizerOptions.of(data)
    if kind == "NullTokenizer" or data.tokenizer_model is data.vocab_file is None:
        return ExportedTokenizer(
            "no tokenizer: the run has none (NullTokenizer or random tokens), its text is token ids"
        )
    model = Path(data.tokenizer_model or data.vocab_file or "")
    if kind == "TikTokenizer":
        return ExportedTokenizer(f"no tokenizer: Hugging Face has no equivalent of the TikTokenizer {model}")
    if tokenizer_problems(kind, data.tokenizer_model, options):
        return ExportedTokenizer(
            f"no tokenizer: {model}, which the run used, is not here; put its files beside config.json"
        )
    if kind == "GPT2BPETokenizer" or (kind == "HuggingFaceTokenizer" and not model.is_dir()):
        tokenizer = build_tokenizer(kind, data.tokenizer_model, options=options)
        assert isinstance(tokenizer, GPT2BPETokenizer | HuggingFaceTokenizer)
        tokenizer.save(folder)
        message = f"tokenizer: that of {model}{_left_out(tokenizer)}"
        return ExportedTokenizer(message, {"eos_token_id": tokenizer.eod})
    if kind == "HuggingFaceTokenizer":
        return _export_folder(model, folder, options)
    sentences = SentencePieceTokenizer(str(model))
    shutil.copyfile(model, folder / "tokenizer.model")
    ids = {"eos_token_id": sentences.eod}
    try:
        converted, settings = _convert(model)
        problem = _difference(converted, sentences, model)
    except _NotExpressibleError as error:
        problem = str(error)
    except ImportError:
        problem = "the tokenizers package is not installed (pip install tokenizers)"
    if problem is not None:
        return ExportedTokenizer(f"tokenizer: tokenizer.model alone, without tokenizer.json: {problem}", ids)
    converted.save(str(folder / "tokenizer.json"))
    _write_settings(folder, settings)
    return ExportedTokenizer(f"tokenizer: {model} and a tokenizer.json that gives the same ids", ids)


def _export_folder(model: Path, folder: Path, options: TokenizerOptions) -> ExportedTokenizer:
    """Copy the files of the folder `model`, as those of the tokenizer that a run had of it."""
    copied = _copy_files(model, folder)
    message = f"tokenizer: {', '.join(copied)} of {model}"
    special_tokens = options.tokenizer_special_tokens
    try:
        tokenizer = build_tokenizer("HuggingFaceTokenizer", str(model), options=options)
    except UserError as error:  # no transformers, or no end token
        if special_tokens:
            raise
        return ExportedTokenizer(f"{message}; {error}", _their_token_ids(model))
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    if special_tokens:
        tokenizer.save(folder)
    if not _names_class(folder):
        _name_class(folder, tokenizer)
    return ExportedTokenizer(message + _left_out(tokenizer), tokenizer.special_ids)


def _left_out(tokenizer: Tokenizer) -> str:
    """The end of a message: what the exported tokenizer puts around a text, and the run did not."""
    left_out = tokenizer.tokens_left_out if isinstance(tokenizer, HuggingFaceTokenizer) else ()
    if not left_out:
        return ""
    return f"; it puts {' '.join(left_out)} around a text, which the run left out: give it add_special_tokens=False"


def copy_tokenizer(
    source: Path, token_ids: Mapping[str, Any], folder: Path, *, model_changes_type: bool = False
) -> ExportedTokenizer:
    """Copy the tokenizer of a Hugging Face folder, and what says how to generate, beside its model exported anew.

    Args:
        token_ids: those of its config.json.
        model_changes_type: the model is exported as another `model_type`, which may have another class of tokenizer.

    Raises:
        UserError: a file is damaged.
    """
    check_json_files(source)
    copied = _copy_files(source, folder)
    message = f"copied from {source}: {', '.join(copied)}" if copied else f"no tokenizer: {source} has none"
    if copied == [_GENERATION]:
        message += "; it has no tokenizer"
    if model_changes_type and any((source / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        message += _keep_class(source, folder)
    return ExportedTokenizer(message, token_ids)


@dataclass(frozen=True)
class ImportedTokenizer:
    """A Hugging Face tokenizer as the tokenizer of a run.

    Attributes:
        message: what was imported, for the user.
        tokenizer_type, tokenizer_model: the run's settings; None if the folder has no tokenizer.
    """

    message: str
    tokenizer_type: Literal["SentencePieceTokenizer", "HuggingFaceTokenizer"] | None = None
    tokenizer_model: str | None = None

    def data_section(self, data: DataConfig) -> DataConfig:
        """`data` with this tokenizer, if there is one."""
        if self.tokenizer_type is None:
            return data
        return replace(data, tokenizer_type=self.tokenizer_type, tokenizer_model=self.tokenizer_model)


def import_tokenizer(folder: Path, target: Path, final: Path | None = None) -> ImportedTokenizer:
    """Copy the tokenizer of a Hugging Face folder into the folder `target`.

    Args:
        final: where `target` will be when the settings are used. Default: it stays.

    Raises:
        UserError: a file is damaged.
    """
    final = final or target
    if any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")) or _adds_to_model(folder):
        check_json_files(folder)
        target.mkdir(parents=True, exist_ok=True)
        message = f"tokenizer: {', '.join(_copy_files(folder, target))} in {final}"
        message += _keep_class(folder, target)
        return ImportedTokenizer(message, "HuggingFaceTokenizer", str(final))
    if (folder / "tokenizer.model").is_file():
        SentencePieceTokenizer(str(folder / "tokenizer.model"))
        target.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / "tokenizer.model", target / "tokenizer.model")
        model = final / "tokenizer.model"
        return ImportedTokenizer(f"tokenizer: {model}", "SentencePieceTokenizer", str(model))
    return ImportedTokenizer(f"no tokenizer: {folder} has none; give --tokenizer-type and --tokenizer-model to the run")


def _adds_to_model(folder: Path) -> bool:
    """Whether a folder names tokens that its SentencePiece model does not have, such as those of a chat template.

    Raises:
        UserError: a file is damaged.
    """
    if not (folder / "tokenizer.model").is_file():
        return False
    check_json_files(folder)
    path = folder / "added_tokens.json"
    numbers = _settings(folder).get("added_tokens_decoder")
    if not isinstance(numbers, dict):  # as transformers, which reads the older file only without these
        numbers = json.loads(path.read_text(encoding="utf-8")).values() if path.is_file() else ()
    size = SentencePieceTokenizer(str(folder / "tokenizer.model")).vocab_size
    return any(number.isdecimal() and int(number) >= size for number in map(str, numbers))


def _copy_files(folder: Path, target: Path) -> list[str]:
    found = [name for name in _FILES if (folder / name).is_file()]
    further = sorted((folder / _FURTHER_TEMPLATES).glob("*.jinja"))
    if further:
        (target / _FURTHER_TEMPLATES).mkdir()
        found += [f"{_FURTHER_TEMPLATES}/{path.name}" for path in further]
    for name in found:
        shutil.copyfile(folder / name, target / name)
    return found


def _names_class(folder: Path) -> bool:
    """Whether the settings of a tokenizer's files say which class of transformers reads them.

    Otherwise the model's config.json beside them does, and another one has another class.
    """
    return "tokenizer_class" in _settings(folder)


def _keep_class(source: Path, copy: Path) -> str:
    """Have a copy of a tokenizer's files name the class that the model's config.json beside `source` gives it.

    Returns:
        The end of a message: why the class is not known.
    """
    if _names_class(source):
        return ""
    try:
        _name_class(copy, HuggingFaceTokenizer(str(source)))
    except UserError as error:
        return f"; {error}"
    return ""


def _name_class(folder: Path, tokenizer: HuggingFaceTokenizer) -> None:
    """Have the settings of a tokenizer's files name its class, and the special tokens that the class brings."""
    settings = {**tokenizer.backend.special_tokens_map, **_settings(folder), "tokenizer_class": tokenizer.class_name}
    _write_settings(folder, settings)


def _write_settings(folder: Path, settings: dict[str, Any]) -> None:
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (folder / _SETTINGS).write_text(text, encoding="utf-8")


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / _SETTINGS
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _their_token_ids(folder: Path) -> dict[str, int]:
    """The ids of the special tokens that a folder names, read from its added tokens.

    Raises:
        UserError: a file is damaged.
    """
    paths = [folder / _SETTINGS, folder / "tokenizer.json"]
    if not all(path.is_file() for path in paths):
        return {}
    check_json_files(folder)
    settings, content = (json.loads(path.read_text(encoding="utf-8")) for path in paths)
    tokens = content.get("added_tokens") or []
    if not (isinstance(tokens, list) and all(isinstance(token, dict) for token in tokens)):
        raise UserError(f"tokenizer file {paths[1]}: added_tokens is no list of objects: copy it again")
    ids = {token.get("content"): token.get("id") for token in tokens if isinstance(token.get("content"), str)}
    found = {}
    for kind in ("bos", "eos", "pad"):
        token = settings.get(f"{kind}_token")
        text = token.get("content") if isinstance(token, dict) else token
        token_id = ids.get(text) if isinstance(text, str) else None
        if type(token_id) is int:
            found[f"{kind}_token_id"] = token_id
    return found


class _NotExpressibleError(ValueError):
    """A SentencePiece model has no equivalent tokenizer.json. The message says why."""


def _convert(path: Path) -> tuple[Any, dict[str, Any]]:
    """(tokenizers.Tokenizer, tokenizer_config.json) of a SentencePiece model."""
    from sentencepiece import sentencepiece_model_pb2
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    proto.ParseFromString(path.read_bytes())
    rules, trainer = proto.normalizer_spec, proto.trainer_spec
    if rules.name != "identity" or rules.remove_extra_whitespaces or trainer.treat_whitespace_as_suffix:
        raise _NotExpressibleError(
            f"its normalisation ({rules.name}, remove_extra_whitespaces={rules.remove_extra_whitespaces}) has no exact "
            f"equivalent there"
        )
    pieces = proto.pieces
    unknown = next(piece.piece for piece in pieces if piece.type == _UNKNOWN)
    if trainer.model_type != trainer.BPE:
        raise _NotExpressibleError("only BPE gives the same ids there (unigram splits close to each other differ)")
    vocabulary = {piece.piece: index for index, piece in enumerate(pieces)}
    model = models.BPE(
        vocabulary, list(_merges(pieces)), unk_token=unknown, fuse_unk=True, byte_fallback=trainer.byte_fallback
    )
    tokenizer = Tokenizer(model)
    prefix = [normalizers.Prepend(_SPACE)] if rules.add_dummy_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if rules.add_dummy_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    for piece in pieces:
        if piece.type in (_CONTROL, _UNKNOWN):
            tokenizer.add_special_tokens([AddedToken(piece.piece, special=True, normalized=False)])
        elif piece.type == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(piece.piece, normalized=False)])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": pieces[trainer.eos_id].piece,
        "unk_token": unknown,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**30,
    }
    if trainer.bos_id >= 0:
        settings["bos_token"] = pieces[trainer.bos_id].piece
    return tokenizer, settings


def _merges(pieces: Any) -> Iterator[tuple[str, str]]:
    """The merges of a BPE model: every pair of pieces that forms a piece, best pieces first."""
    normal = sorted((piece for piece in pieces if piece.type == _NORMAL), key=lambda piece: -piece.score)
    known = {piece.piece for piece in normal}
    for piece in normal:
        text = piece.piece
        for cut in range(1, len(text)):
            if text[:cut] in known and text[cut:] in known:
                yield text[:cut], text[cut:]


def _difference(converted: Any, tokenizer: SentencePieceTokenizer, path: Path) -> str | None:
    """The first text for which ids or decoded text differ; None if all agree."""
    draw = random.Random(0)
    drawn = [[draw.randrange(tokenizer.vocab_size) for _ in range(40)] for _ in range(200)]
    special = {token.content for token in converted.get_added_tokens_decoder().values() if token.special}
    texts = [*_TEXTS, *(tokenizer.decode(ids) for ids in drawn)]
    for text in texts:
        if any(token in text for token in special):
            continue
        ids = tokenizer.encode(text)
        if converted.encode(text, add_special_tokens=False).ids != ids:
            return f"its ids of {text[:40]!r} differ from those of {path}"
        if converted.decode(ids, skip_special_tokens=False) != tokenizer.decode(ids):
            return f"its text of the ids of {text[:40]!r} differs from that of {path}"
    return None
