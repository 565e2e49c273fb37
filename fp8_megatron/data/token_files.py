"""Token files as a user names them: prefixes, blends of prefixes, and whether the files exist. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..config.schema import Config, DataConfig
from ..config.words import decimal
from ..errors import UserError
from .sft_conversations import check_conversation_file, template_text
from .tokenizer_settings import TokenizerOptions, tokenizer_problems

#: What to do with a damaged file, for errors.
PREPROCESS_AGAIN = "run tools/preprocess_data.py again"


@dataclass(frozen=True)
class Blend:
    """Token files and their shares of the samples. Without weights, each is read once."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None

    @classmethod
    def parse(cls, flag: str, words: Sequence[str]) -> Blend:
        """Parse ``prefix prefix …`` or ``weight prefix weight prefix …``; errors name `flag`."""
        given = " ".join(words)
        numbers = [number_in(word) for word in words]
        if all(one is None for one in numbers):
            return cls(tuple(words), None)
        weights = tuple(weight for weight in numbers[::2] if weight is not None)
        prefixes = tuple(words[1::2])
        if not len(weights) == len(prefixes) == len(words) / 2 or any(one is not None for one in numbers[1::2]):
            raise UserError(
                f"{flag} {given}: weights and prefixes do not alternate; give 'weight prefix weight prefix …' or "
                f"prefixes alone"
            )
        if not all(weight > 0 for weight in weights):  # also refuses NaN
            raise UserError(f"{flag} {given}: weights have to be above 0; leave out a dataset that is not to be used")
        if not math.isfinite(sum(weights)):
            raise UserError(f"{flag} {given}: the sum of the weights is {sum(weights)}; give finite numbers")
        return cls(prefixes, weights)


def number_in(word: str) -> float | None:
    """The number that `word` writes; None if it is another word."""
    try:
        return decimal(word)
    except ValueError:
        return None


def token_file_pair(prefix: str) -> tuple[Path, Path]:
    """(``prefix.bin``, ``prefix.idx``). Their content is not read.

    Raises:
        UserError: one of them is missing or empty.
    """
    for extension in (".bin", ".idx"):
        if prefix.endswith(extension):
            raise UserError(
                f"data path {prefix} ends with {extension}, but the prefix of the .bin/.idx pair is wanted: "
                f"drop the extension: {prefix.removesuffix(extension)}"
            )
    bin_path, idx_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    missing = [path.name for path in (bin_path, idx_path) if not path.is_file()]
    if missing:
        near = sorted(str(path.with_suffix("")) for path in bin_path.parent.glob(f"{bin_path.stem}*.idx"))
        near = [path for path in near if path != prefix]
        if near:
            fix = f"did you mean {' or '.join(near[:3])}?"
        elif Path(prefix).is_file():
            fix = "turn text into tokens with tools/preprocess_data.py, and give its output prefix"
        else:
            fix = "check the path, or make the pair with tools/preprocess_data.py"
        raise UserError(f"no dataset at {prefix}: {' and '.join(missing)} not found in {bin_path.parent}; {fix}")
    for path in (bin_path, idx_path):
        if path.stat().st_size == 0:
            raise UserError(
                f"{path} is empty (0 bytes): preprocessing was interrupted or found no text; {PREPROCESS_AGAIN}"
            )
    return bin_path, idx_path


def check_input_files(config: Config) -> None:
    """Check that the tokenizer's model and the token files that a run reads exist.

    Raises:
        UserError: one problem per line.
    """
    problems = []
    for check in _checks(config):
        try:
            check()
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))


def _checks(config: Config) -> Iterator[Callable[[], object]]:
    data, training = config.data, config.training
    if data.tokenizer_model is not None or data.vocab_file is not None:
        yield partial(_check_tokenizer, data)
    if data.mock_data:
        return
    read = {"--data-path": data.data_path, "--train-data-path": data.train_data_path}
    if training.reads_validation_data:
        read |= {"--valid-data-path": data.valid_data_path, "--test-data-path": data.test_data_path}
    for flag, words in read.items():
        for prefix in Blend.parse(flag, words).prefixes:
            yield partial(check_conversation_file if data.sft else token_file_pair, prefix)
    if data.sft:
        yield partial(template_text, data.sft_tokenizer_prompt_format, data.sft_chat_template)


def _check_tokenizer(data: DataConfig) -> None:
    problems = tokenizer_problems(data.tokenizer_kind, data.tokenizer_model, TokenizerOptions.of(data))
    if problems:
        raise UserError("\n".join(problems))
