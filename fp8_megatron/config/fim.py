"""The settings of fill-in-the-middle data, a part of the section ``data`` (`schema` says how fields become flags)."""

from __future__ import annotations

from dataclasses import dataclass

from .fields import Share


@dataclass(frozen=True)
class FimConfig:
    """Documents that are cut into prefix, middle and suffix, and trained with the middle last (arXiv 2207.14255)."""

    fim_data: bool = False
    """Cut documents in three, and put the middle last. --tokenizer-type must read text, and know the tokens below."""
    fim_rate: Share = 0.5
    """Share of the documents that are cut."""
    fim_spm_rate: Share = 0.5
    """Share of the cut ones that begin with the suffix (SPM). The others begin with the prefix (PSM)."""
    fim_split_sample: str | None = None
    """Token that divides a document into fragments, such as the files of a repository, which are cut one by one."""
    fim_fragment_rate: Share | None = None
    """With --fim-split-sample: share of the fragments of a document that are cut."""
    fim_no_prefix: str | None = None
    """Text that begins what is never cut."""
    fim_prefix_token: str = "<fim_prefix>"
    """Token before the prefix."""
    fim_middle_token: str = "<fim_middle>"
    """Token before the middle."""
    fim_suffix_token: str = "<fim_suffix>"
    """Token before the suffix."""
    fim_pad_token: str = "<fim_pad>"
    """Token that fills a sample which became shorter."""
    fim_eod_token: str = "<|endoftext|>"
    """Token between documents."""
