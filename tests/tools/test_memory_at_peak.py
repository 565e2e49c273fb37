"""The peak is found, and what was freed before it or allocated after it does not count."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8_megatron.errors import UserError
from tools.memory_at_peak import main, peak_table


def alloc(address: int, size: int, name: str) -> dict[str, Any]:
    frames = [
        {"filename": "/site/torch/x.py", "line": 1, "name": "empty"},
        {"filename": "/home/fp8_megatron/layers/linear.py", "line": 7, "name": name},
    ]
    return {"action": "alloc", "addr": address, "size": size, "frames": frames}


def free(address: int) -> dict[str, Any]:
    return {"action": "free_completed", "addr": address, "size": 0, "frames": []}


def test_what_is_alive_at_the_peak() -> None:
    history = [
        alloc(1, 1_000_000_000, "weights"),
        alloc(2, 3_000_000_000, "early"),
        free(2),
        alloc(3, 2_000_000_000, "activations"),
        alloc(2, 2_000_000_000, "activations"),  # the address once more
        {"action": "segment_alloc", "addr": 9, "size": 10**12, "frames": []},
        free(1),
        alloc(4, 500_000_000, "late"),
    ]
    lines = peak_table(history).splitlines()
    assert lines == [
        "    5.000 GB at the peak",
        "    4.000 GB in     2  linear.py:7 activations",
        "    1.000 GB in     1  linear.py:7 weights",
    ]


def test_without_a_gpu_nothing_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file would not be written."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words, problem in (([], "the first argument is the file"), (["memory.txt"], "torch finds no GPU here")):
        monkeypatch.setattr(sys, "argv", ["memory_at_peak.py", *(str(tmp_path / word) for word in words)])
        with pytest.raises(UserError, match=problem):
            main()
    assert not list(tmp_path.iterdir())
