"""Safetensors files written tensor by tensor, read by the package itself."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fp8_megatron.checkpoint.files import CheckpointError
from fp8_megatron.conversion.safetensors_files import INDEX_FILE, SafetensorsFolder, SafetensorsWriter, TensorSpec
from fp8_megatron.dtypes import E4M3


def test_written_files_are_safetensors(tmp_path: Path) -> None:
    """Mixed widths in any order of writing; read by the safetensors package."""
    tensors = {
        "a": torch.randn(3, 5).to(E4M3),
        "b": torch.randn(7),
        "c": torch.randn(2, 3).bfloat16(),
        "d": torch.randn(1).half(),
        "e": torch.randn(4, 4).t(),
    }
    specs = [TensorSpec(name, value.dtype, tuple(value.shape)) for name, value in tensors.items()]
    with SafetensorsWriter(tmp_path, specs, max_shard_bytes=10**6) as writer:
        for name in "ceadb":
            writer.write(name, tensors[name])
    read = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(read[name].float(), value.float()) for name, value in tensors.items())
    assert SafetensorsFolder(tmp_path).spec("a") == specs[0]
    header = struct.unpack("<Q", (tmp_path / "model.safetensors").read_bytes()[:8])[0]
    assert header % 8 == 0
    incomplete = SafetensorsWriter(tmp_path / "incomplete", specs, max_shard_bytes=20)
    with pytest.raises(CheckpointError, match="'b' was never written"), incomplete as writer:
        for name in "acde":
            writer.write(name, tensors[name])
    assert not (tmp_path / "incomplete" / INDEX_FILE).exists(), "no index of an incomplete folder"


def test_a_file_of_all_weights_comes_before_an_index(tmp_path: Path) -> None:
    """As in transformers. The shards are of an earlier save."""
    spec, other = (TensorSpec(name, torch.float32, (4,)) for name in "ab")
    for value, largest in ((1.0, 16), (2.0, 1000)):
        with SafetensorsWriter(tmp_path, [spec, other], max_shard_bytes=largest) as writer:
            for name in "ab":
                writer.write(name, torch.full((4,), value))
    assert (tmp_path / INDEX_FILE).exists()
    assert SafetensorsFolder(tmp_path).read("b").tolist() == [2.0] * 4
