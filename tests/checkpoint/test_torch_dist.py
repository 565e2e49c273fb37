"""The format: megatron-core's readers open it, any rectangle comes back, and nothing in it is executed."""

from __future__ import annotations

import os
import pickle
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import load as load_with_torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorProperties, TensorStorageMetadata

from fp8_megatron.checkpoint import torch_dist
from fp8_megatron.checkpoint.files import CheckpointError
from fp8_megatron.checkpoint.manifest import ChecksummedFile, problem_with
from fp8_megatron.checkpoint.metadata_file import METADATA, read_metadata
from fp8_megatron.checkpoint.pickles import PickledObject
from fp8_megatron.checkpoint.torch_dist import Chunk, TorchDistReader, Wanted, write_chunks, write_metadata
from fp8_megatron.config.schema import CheckpointConfig, Config, ModelConfig, ParallelConfig, PrecisionConfig
from fp8_megatron.mcore.initialization import named_parameters_of_model
from fp8_megatron.mcore.transformer_config import transformer_config
from tests.harness.ranks import RankPool
from tests.harness.tiny_checkpoint import run_tiny_on_a_rank, tiny_resumable
from tests.harness.tiny_gpt import GPT3_STYLE, LLAMA_STYLE, VOCAB_SIZE, tiny_config

TP2 = ParallelConfig(tensor_model_parallel_size=2, ddp_bucket_size=1 << 15)


def fp32_config(model: ModelConfig) -> Config:
    """A run whose checkpoints megatron-core can read."""
    return replace(tiny_config(model, parallel=TP2), checkpoint=CheckpointConfig(ckpt_state_dtype="fp32"))


def write(folder: Path, tensors: dict[str, list[Chunk]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    written, _ = write_chunks(folder, 0, [chunk for chunks in tensors.values() for chunk in chunks])
    write_metadata(folder, written, common={}, checkpoint_id="here")


def cut(key: str, whole: Tensor, generator: torch.Generator) -> list[Chunk]:
    """A tensor in random rectangles."""
    boxes = [(tuple(0 for _ in whole.shape), tuple(whole.shape))]
    for _ in range(6):
        index = int(torch.randint(len(boxes), (), generator=generator))
        offset, sizes = boxes.pop(index)
        axis = int(torch.randint(whole.ndim, (), generator=generator))
        at = int(torch.randint(sizes[axis], (), generator=generator))
        for start, size in ((0, at), (at, sizes[axis] - at)):
            if size:
                place = tuple(o + start if a == axis else o for a, o in enumerate(offset))
                boxes.append((place, tuple(size if a == axis else s for a, s in enumerate(sizes))))
    return [
        Chunk(
            key, tuple(whole.shape), offset, whole[tuple(slice(o, o + s) for o, s in zip(offset, sizes, strict=True))]
        )
        for offset, sizes in boxes
    ]


@pytest.mark.parametrize("shape", [(17,), (6, 9), (4, 5, 3)])
def test_any_rectangle_comes_back(tmp_path: Path, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    for trial in range(5):
        whole = torch.randn(shape, generator=generator)
        folder = tmp_path / str(trial)
        write(folder, {"x": cut("x", whole, generator)})
        reader = TorchDistReader(folder)
        assert reader.shapes == {"x": shape}
        assert torch.equal(reader.read_whole("x"), whole)
        for _ in range(10):
            offset = tuple(int(torch.randint(n, (), generator=generator)) for n in shape)
            sizes = tuple(
                int(torch.randint(1, n - o + 1, (), generator=generator)) for n, o in zip(shape, offset, strict=True)
            )
            target = torch.zeros(torch.Size(sizes).numel())
            reader.read("x", [Wanted(offset, sizes, target)])
            box = whole[tuple(slice(o, o + s) for o, s in zip(offset, sizes, strict=True))]
            assert torch.equal(target.view(sizes), box)


def test_a_rank_writes_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once there is enough to write; torch's own reader finds everything in them."""
    monkeypatch.setattr(torch_dist, "_MIN_FILE_BYTES", 2000)
    monkeypatch.setattr(torch_dist, "_UNWRITTEN_BYTES", 5000)
    whole = torch.randn(40, 100, generator=torch.Generator().manual_seed(0))
    chunks = [Chunk("x", (40, 100), (row, 0), whole[row : row + 1]) for row in range(40)]
    written, records = write_chunks(tmp_path, 3, iter(chunks))
    write_metadata(tmp_path, written, common={}, checkpoint_id="here")
    assert [record.name for record in records] == [f"__3_{index}.distcp" for index in range(4)]
    assert [problem_with(tmp_path, record) for record in records] == [None] * 4
    assert max(record.size for record in records) < 1.2 * min(record.size for record in records)
    assert [item.offset for item in written] == [chunk.offset for chunk in chunks]
    assert torch.equal(TorchDistReader(tmp_path).read_whole("x"), whole)
    loaded = {"x": torch.zeros(40, 100)}
    load_with_torch(loaded, storage_reader=FileSystemReader(tmp_path), no_dist=True)
    assert torch.equal(loaded["x"], whole)


def test_one_of_several_files_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's error comes out, not torch's, and no thread stays."""
    monkeypatch.setattr(torch_dist, "_MIN_FILE_BYTES", 2000)
    write, num_threads = ChecksummedFile.write, threading.active_count()

    def full(file: ChecksummedFile, data: bytes | memoryview) -> int:
        if file.entry.name.endswith("_2.distcp") and file.size > 3000:
            monkeypatch.setattr(file, "_file", open("/dev/full", "wb", buffering=0))  # noqa: SIM115
        return write(file, data)

    chunks = (Chunk("x", (100, 100), (row, 0), torch.ones(1, 100)) for row in range(100))
    with mock.patch.object(ChecksummedFile, "write", full), pytest.raises(OSError, match="No space left on device"):
        write_chunks(tmp_path, 0, chunks)
    assert threading.active_count() == num_threads


def test_what_was_not_saved_is_missed(tmp_path: Path) -> None:
    write(tmp_path, {"x": [Chunk("x", (4, 4), (0, 0), torch.ones(3, 4))]})
    with pytest.raises(CheckpointError, match="4 elements of x were not saved"):
        TorchDistReader(tmp_path).read_whole("x")


def described(folder: Path) -> Metadata:
    """torch's own object of a description that this test wrote."""
    return pickle.loads((folder / METADATA).read_bytes())


class _Malicious:
    """Pickles as a call."""

    def __init__(self, function: object, *args: object) -> None:
        self._call = (function, args)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self._call


@pytest.mark.parametrize(
    ("function", "args", "named"),
    [
        (os.system, ("touch {}",), "system"),
        (os.mkdir, ("{}",), "mkdir"),
        (eval, ("__import__('os').mkdir('{}')",), "builtins.eval"),
        (getattr, (os, "mkdir"), "getattr"),
        (torch.load, ("{}",), "torch.serialization.load"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_malicious_description_is_not_executed(
    tmp_path: Path, function: object, args: tuple[object, ...], named: str
) -> None:
    """Alone, or inside of a real description."""
    proof = tmp_path / "proof"
    write(tmp_path / "iter", {"x": [Chunk("x", (2,), (0,), torch.ones(2))]})
    good = described(tmp_path / "iter")
    attack = _Malicious(function, *(arg.format(proof) if isinstance(arg, str) else arg for arg in args[:1]), *args[1:])
    if function is getattr:
        attack = _Malicious(getattr, torch.Size, "__new__")
    for content in (attack, Metadata({"x": attack}, storage_data=good.storage_data)):  # type: ignore[dict-item]
        (tmp_path / "iter" / METADATA).write_bytes(pickle.dumps(content))
        with pytest.raises(CheckpointError, match=rf"\.metadata is not loaded: it names .*{named}"):
            TorchDistReader(tmp_path / "iter")
    assert not proof.exists()


def test_tensors_are_loaded_as_data(tmp_path: Path) -> None:
    """A call in the place of a tensor."""
    write(tmp_path, {"x": [Chunk("x", (2,), (0,), torch.ones(2))]})
    reader = TorchDistReader(tmp_path)
    (place,) = described(tmp_path).storage_data.values()
    torch.save(_Malicious(os.mkdir, str(tmp_path / "proof")), tmp_path / "evil")
    content = (tmp_path / "evil").read_bytes()
    (tmp_path / place.relative_path).write_bytes(content)
    reader._chunks["x"][-1][0].__dict__["length"] = len(content)
    with pytest.raises(CheckpointError, match=r"is damaged"):
        reader.read_whole("x")
    assert not (tmp_path / "proof").exists()


def test_files_outside_of_the_folder_are_not_read(tmp_path: Path) -> None:
    write(tmp_path / "iter", {"x": [Chunk("x", (2,), (0,), torch.ones(2))]})
    metadata = described(tmp_path / "iter")
    (place,) = metadata.storage_data.values()
    shutil.copy(tmp_path / "iter" / place.relative_path, tmp_path / "outside")
    place.relative_path = "../outside"
    (tmp_path / "iter" / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"places x in '\.\./outside', which is no file of it"):
        TorchDistReader(tmp_path / "iter")


def test_older_torch_reads_what_newer_torch_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.14 added strides to TensorProperties; the one before it takes five fields and no more."""
    states: list[tuple] = []
    getstate, setstate = TensorProperties.__getstate__, TensorProperties.__setstate__

    def read(properties: TensorProperties, state: tuple) -> None:
        states.append(state)
        setstate(properties, state)

    monkeypatch.setattr(TensorProperties, "__getstate__", lambda properties: (*getstate(properties)[:5], None))
    monkeypatch.setattr(TensorProperties, "__setstate__", read)
    write(tmp_path, {"x": [Chunk("x", (2,), (0,), torch.ones(2))]})
    assert described(tmp_path).state_dict_metadata["x"].properties.dtype == torch.float32
    assert [len(state) for state in states] == [5]


def _chunk(entry: TensorStorageMetadata, **fields: object) -> None:
    vars(entry.chunks[0]).update(fields)


#: What a hostile description may say of a tensor [2, 3] and its place, and the error.
FORGED: dict[str, tuple[Callable[[TensorStorageMetadata, Any], object], str]] = {
    "negative": (lambda entry, _: setattr(entry, "size", [-1, 3]), r"size of x is \[-1, 3\], not whole numbers"),
    "real": (lambda entry, _: setattr(entry, "size", [2.0, 3]), r"size of x is \[2.0, 3\], not whole"),
    "truth": (lambda entry, _: setattr(entry, "size", [True, 3]), r"size of x is \[True, 3\], not whole"),
    "huge": (lambda entry, _: setattr(entry, "size", torch.Size([2**40, 2**40])), r"size of x is .*2\^48"),
    "words": (lambda entry, _: setattr(entry, "size", "23"), "size of x is '23', not whole"),
    "rank": (
        lambda entry, _: setattr(entry, "size", torch.Size([6])),
        r"x of size \(6,\) has a chunk of sizes \(2, 3\)",
    ),
    "no rank": (lambda entry, _: _chunk(entry, sizes=torch.Size([])), r"has a chunk of sizes \(\) at offsets \(0, 0\)"),
    "outside": (lambda entry, _: _chunk(entry, offsets=torch.Size([1, 0])), r"sizes \(2, 3\) at offsets \(1, 0\)"),
    "elsewhere": (lambda entry, _: setattr(entry, "size", torch.Size([1, 3])), r"x of size \(1, 3\) has a chunk"),
    "no chunk": (lambda entry, _: setattr(entry, "chunks", [None]), "x has a NoneType as a chunk"),
    "dtype": (lambda entry, _: setattr(entry.properties, "dtype", "float32"), "x has the dtype 'float32'"),
    "start": (lambda _, place: setattr(place, "offset", -5), "x takes bytes -5 to"),
    "length": (lambda _, place: setattr(place, "length", 10**12), r"x takes bytes 0 to \+ 1000000000000 of __0_0"),
    "short": (lambda _, place: setattr(place, "length", 5), r"a chunk of sizes \(2, 3\) in 5 bytes"),
    "file": (lambda _, place: setattr(place, "relative_path", 7), "places x in 7, which is no file of it"),
}


@pytest.mark.parametrize("forged", FORGED)
def test_a_forged_description_is_refused(tmp_path: Path, forged: str) -> None:
    """In one line that names the file and the value, before memory for a tensor is taken."""
    write(tmp_path, {"x": [Chunk("x", (2, 3), (0, 0), torch.ones(2, 3))]})
    metadata = described(tmp_path)
    change, problem = FORGED[forged]
    (place,) = metadata.storage_data.values()
    change(metadata.state_dict_metadata["x"], place)
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=rf"\.metadata is damaged: .*{problem}") as raised:
        TorchDistReader(tmp_path)
    assert "\n" not in str(raised.value)


def test_no_memory_is_taken_for_what_was_not_saved(tmp_path: Path) -> None:
    write(tmp_path, {"x": [Chunk("x", (2, 3), (0, 0), torch.ones(2, 3))]})
    metadata = described(tmp_path)
    metadata.state_dict_metadata["x"].size = torch.Size([2**40, 3])
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"elements of x were not saved"):
        TorchDistReader(tmp_path).read_whole("x")


@pytest.mark.parametrize("attribute", ["__init__", "__setstate__", "fields"])
def test_a_description_changes_no_class(tmp_path: Path, attribute: str) -> None:
    """A pickle can set attributes of what it names: here of a class instead of an object."""
    before = vars(PickledObject).copy()
    content = b"\x80\x02ctorch.distributed.checkpoint.metadata\nStorageMeta\n(N}U" + bytes([len(attribute)])
    content += attribute.encode() + b"K\x01stb."
    (tmp_path / METADATA).write_bytes(content)
    with pytest.raises(CheckpointError, match="is not loaded"):
        read_metadata(tmp_path)
    assert vars(PickledObject) == before and not hasattr(StorageMeta, "fields")


@pytest.mark.parametrize("content", [b"", b"\x80", pickle.dumps({"a": 1}), b"not a pickle at all"])
def test_a_damaged_description_is_refused(tmp_path: Path, content: bytes) -> None:
    write(tmp_path, {"x": [Chunk("x", (2,), (0,), torch.ones(2))]})
    (tmp_path / METADATA).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata is not loaded"):
        TorchDistReader(tmp_path)


def _load_with_megatron(model: ModelConfig, folder: Path) -> dict[str, Tensor]:
    """The weights that megatron-core's own model, with its own layers, loads with its own reader; one rank."""
    config = tiny_config(model, precision=PrecisionConfig(precision="bf16"))
    with tiny_resumable(config, 1) as (gpt, _):
        module = GPTModel(
            transformer_config(config, torch.device("cpu")),
            get_gpt_layer_local_spec(normalization=model.normalization),
            vocab_size=VOCAB_SIZE,
            max_sequence_length=model.seq_length,
            share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
            position_embedding_type=model.position_embedding_type,
            pg_collection=gpt.topology.groups,
        )
        for param in module.parameters():
            param.data = torch.full_like(param, torch.nan, dtype=torch.float32)
        loaded = dist_checkpointing.load({"model": module.sharded_state_dict()}, str(folder))
        module.load_state_dict(loaded["model"])
        assert loaded["iteration"] == 2
        return {name: param.detach().float() for name, param in named_parameters_of_model(module).items()}


@pytest.mark.parametrize("model", [GPT3_STYLE, LLAMA_STYLE], ids=["gpt3", "llama"])
def test_megatrons_readers_open_it(ranks: RankPool, tmp_path: Path, model: ModelConfig) -> None:
    saved = ranks.run(run_tiny_on_a_rank, fp32_config(model), 2, None, tmp_path, None, 4, num_ranks=4)[0]
    (loaded,) = ranks.run(_load_with_megatron, model, tmp_path / "iter_0000002", num_ranks=1)
    expected = {name.removeprefix("master/"): value for name, value in saved.end.items() if name.startswith("master/")}
    assert loaded.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(loaded[name], value), name
