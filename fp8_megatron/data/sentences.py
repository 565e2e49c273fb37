"""Documents cut into sentences with NLTK's Punkt (Kiss and Strunk, 2006, doi 10.1162/coli.2006.32.4.485)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from ..errors import UserError

#: Characters that are cut at once, as in Megatron's tool: a sentence ends there at the latest.
_MOST_CHARACTERS = 1_000_000


class SentenceSplitter:
    """Cuts texts of one language.

    Args:
        language: of Punkt's models, such as english.
        keep_newlines: each sentence keeps the white space behind it. Otherwise the white space between is left out.

    Raises:
        UserError: NLTK or its model of the language is not installed.
    """

    def __init__(self, language: str, *, keep_newlines: bool):
        try:
            from nltk.tokenize.punkt import PunktTokenizer
        except ImportError as error:
            raise UserError("--split-sentences needs NLTK: pip install nltk") from error
        try:
            self._punkt: Any = PunktTokenizer(language)
        except (LookupError, ValueError) as error:
            raise UserError(
                f"--split-sentences: NLTK has no model of --lang {language} here: python -m nltk.downloader punkt_tab "
                f"where there is a network, and NLTK_DATA for another folder"
            ) from error
        self._keeps_newlines = keep_newlines

    def split(self, text: str) -> list[str]:
        """The sentences of a text, in order."""
        parts = (text[start : start + _MOST_CHARACTERS] for start in range(0, len(text), _MOST_CHARACTERS))
        return [sentence for part in parts for sentence in self._sentences(part)]

    def _sentences(self, text: str) -> list[str]:
        spans = list(self._punkt.span_tokenize(text))
        if self._keeps_newlines and spans:
            starts = [start for start, _ in spans]
            spans = list(pairwise([*starts, len(text.rstrip())]))
        return [text[start:end] for start, end in spans]
