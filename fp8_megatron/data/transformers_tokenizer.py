"""Tokenizers of transformers: from a local folder, or by a name on the Hugging Face hub."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from ..errors import UserError
from .time_limits import seconds_for, watched
from .tokenizer import Tokenizer, check_tokenizer_path

_CONNECT_SECONDS = 10.0
#: Seconds to load a tokenizer. Its files may come from a slow server, or from the hub.
_LOADING_SECONDS = 300.0

_SETTINGS = "tokenizer_config.json"
#: The end of a document in files that say none, as StarCoder's and GPT-2's.
_END = "<|endoftext|>"

#: Files of a Hugging Face tokenizer that are JSON objects.
JSON_FILES = (
    "tokenizer.json",
    _SETTINGS,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "generation_config.json",
)


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer of transformers: a local folder, or a name on the Hugging Face hub.

    A name is read from the local cache, and fetched if it is not there. No code of the folder runs.

    Args:
        model: the folder or the name; or a tokenizer.json alone, whose documents end with ``<|endoftext|>``.
        special_tokens: further tokens that are never cut. Those that the vocabulary lacks go behind its last id.
        include_special_tokens: put the tokens around a text that the tokenizer is set up to put there, for instance a
            Llama's BOS.
    """

    def __init__(self, model: str, *, special_tokens: Sequence[str] = (), include_special_tokens: bool = True):
        check_tokenizer_path("HuggingFaceTokenizer", model)
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise UserError("HuggingFaceTokenizer needs transformers: pip install transformers") from error
        folder: str | None = model if Path(model).is_dir() else None if Path(model).is_file() else _cached_folder(model)
        if folder is not None:
            check_json_files(Path(folder))
        if Path(model).is_file():
            what, fix = "file", "give the tokenizer.json of the tokenizers library, or a folder that has it"
        elif folder == model:
            what, fix = "folder", "it needs the tokenizer.json and tokenizer_config.json that save_pretrained() writes"
        else:
            what, fix = "name", "give a local folder that save_pretrained() wrote, or log in with hf auth login"
        self.name = model
        try:
            with self._limited(_LOADING_SECONDS):
                self._tokenizer = (
                    _of_file(model)
                    if Path(model).is_file()
                    else AutoTokenizer.from_pretrained(
                        folder or model, local_files_only=folder is not None, trust_remote_code=False
                    )
                )
                if special_tokens:
                    self._tokenizer.add_tokens(list(special_tokens), special_tokens=True)
                eod, ids = self._tokenizer.eos_token_id, self._tokenizer.get_vocab().values()
                num_tokens = max(len(self._tokenizer), max(ids, default=0) + 1)  # ids may leave some out
                self._tokenizer("a", add_special_tokens=False)
            known = None if folder is None else _tokens_of(Path(folder))
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # a damaged file raises almost anything; a panic of Rust is no Exception
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise UserError(
                f"tokenizer {what} {model} cannot be loaded by transformers ({reason}): {fix}"
                + ("; copy them again" if what == "folder" else "")
            ) from error
        if eod is None:
            cure = f"give a folder with it and a {_SETTINGS}" if what == "file" else f"set eos_token in its {_SETTINGS}"
            raise UserError(f"tokenizer {what} {model} has no end-of-sequence token, which ends each document: {cure}")
        end = str(self._tokenizer.eos_token)
        if known is not None and end not in known and end not in special_tokens:
            raise UserError(
                f"tokenizer {what} {model} has eos_token {end!r}, which its vocabulary lacks: transformers would give "
                f"it id {eod}, which no model of this tokenizer knows; set eos_token in its tokenizer_config.json to a "
                f"token that it has, or add it with --tokenizer-special-tokens"
            )
        self._adds_special_tokens = include_special_tokens
        super().__init__(num_tokens, eod, model)

    def too_slow(self, seconds: float) -> str:
        """What to print where it has taken so long, and its process ends."""
        return (
            f"the tokenizer {self.name} has not ended within {seconds:.0f} s: its normaliser or another part may never "
            f"end; give another tokenizer, or a shorter text"
        )

    @contextmanager
    def _limited(self, seconds: float) -> Iterator[None]:
        """End this process if the block takes longer: the tokenizer's native code can hold Python's lock for ever."""
        with watched() as give:
            give(seconds, self.too_slow(seconds))
            yield

    @property
    def backend(self) -> Any:
        """The tokenizer of transformers."""
        return self._tokenizer

    @property
    def class_name(self) -> str:
        """The class of transformers, by a name that its earlier versions know too."""
        name = type(self._tokenizer).__name__
        return "PreTrainedTokenizerFast" if name == "TokenizersBackend" else name

    @property
    def special_ids(self) -> dict[str, int]:
        """``eos_token_id``, and ``bos_token_id`` and ``pad_token_id`` if there are these tokens."""
        ids = {name: getattr(self._tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        return {name: value for name, value in ids.items() if value is not None}

    @property
    def tokens_left_out(self) -> tuple[str, ...]:
        """The tokens that it is set up to put around a text, if it does not (`include_special_tokens`)."""
        if self._adds_special_tokens:
            return ()
        ids = self._tokenizer("", add_special_tokens=True, verbose=False)["input_ids"]
        return tuple(map(str, self._tokenizer.convert_ids_to_tokens(ids)))

    def encode_beginning(self, text: str) -> list[int]:
        ids = self.encode(text)
        return ids[: len(ids) - self._num_behind()]

    def encode_part(self, text: str) -> list[int]:
        with self._limited(seconds_for(len(text))):
            return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _num_behind(self) -> int:
        """How many tokens are put behind a text."""
        plain, around = self._tokenizer("a", add_special_tokens=False)["input_ids"], self.encode("a")
        places = range(len(around) - len(plain), -1, -1) if plain else ()
        last = next((place for place in places if around[place : place + len(plain)] == plain), None)
        return 0 if last is None else len(around) - last - len(plain)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        try:
            with self._limited(seconds_for(sum(map(len, texts)))):
                encoded = self._tokenizer(list(texts), add_special_tokens=self._adds_special_tokens, verbose=False)
            return encoded["input_ids"]
        except (TypeError, KeyError, OverflowError) as error:
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"the Hugging Face tokenizer cannot encode the text ({reason})") from error

    def decode(self, ids: Sequence[int]) -> str:
        with self._limited(seconds_for(len(ids))):
            return str(self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def save(self, folder: Path) -> None:
        """Write the files that transformers loads."""
        self._tokenizer.save_pretrained(str(folder))


def _of_file(path: str) -> Any:
    """The tokenizer of a tokenizer.json without settings beside it."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=path)
    if _END in tokenizer.get_vocab():
        tokenizer.eos_token = _END
    return tokenizer


def _cached_folder(name: str) -> str | None:
    """Where the local cache holds a tokenizer of the hub; None if it can be fetched.

    Raises:
        UserError: it is not, and the hub cannot be reached. transformers would try for most of a minute.
    """
    import huggingface_hub
    from huggingface_hub import constants

    names = ("tokenizer_config.json", "tokenizer.json", "vocab.json", "tokenizer.model")
    for file in names:
        found = huggingface_hub.try_to_load_from_cache(name, file)
        if isinstance(found, str):
            return str(Path(found).parent)
    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _unreachable(constants.ENDPOINT)
    if reason is not None:
        raise UserError(
            f"tokenizer {name} is no folder here and not in the cache of the Hugging Face hub, and {reason}: give a "
            f"local folder, or fetch it where there is a network: hf download {name} --include '*token*' '*vocab*'"
        )
    return None


def _unreachable(endpoint: str) -> str | None:
    """Why no connection to a web address opens; None if one does, or if proxies are set that know the way."""
    if getproxies():
        return None
    address = urlsplit(endpoint)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        with socket.create_connection((address.hostname or "", port), timeout=_CONNECT_SECONDS):
            return None
    except OSError as error:
        return f"{endpoint} cannot be reached ({error.strerror or error})"


def _tokens_of(folder: Path) -> set[str] | None:
    """The tokens that the JSON files of a tokenizer name; None if its vocabulary is in another kind of file."""
    files = {name: folder / name for name in ("tokenizer.json", "vocab.json", "added_tokens.json", _SETTINGS)}
    content = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in files.items() if path.is_file()}
    if not content.keys() & {"tokenizer.json", "vocab.json"}:
        return None
    whole, settings = content.get("tokenizer.json", {}), content.get(_SETTINGS, {})
    vocabulary = (whole.get("model") or {}).get("vocab") or ()  # pairs of a token and its score for Unigram
    tokens = {token if isinstance(token, str) else token[0] for token in vocabulary}
    added = [*(whole.get("added_tokens") or ()), *(settings.get("added_tokens_decoder") or {}).values()]
    tokens.update(token["content"] if isinstance(token, dict) else str(token) for token in added)
    return tokens.union(content.get("vocab.json", ()), content.get("added_tokens.json", ()))


def check_json_files(folder: Path) -> None:
    """Check that the JSON files of a Hugging Face tokenizer are JSON objects.

    Raises:
        UserError: names the file and the fault.
    """
    for name in JSON_FILES:
        path = folder / name
        if not path.is_file():
            continue
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            reason = "it nests too deeply" if isinstance(error, RecursionError) else error
            raise UserError(f"tokenizer file {path} is not JSON ({reason}): copy it again") from error
        if not isinstance(content, dict):
            raise UserError(f"tokenizer file {path} holds a {type(content).__name__}, not an object: copy it again")
