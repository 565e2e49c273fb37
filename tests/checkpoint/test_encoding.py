"""State in its storage dtypes: any rectangle decodes to its values, forged ones are refused, files are small, and
every layout reads what an FP32 checkpoint of the same state gives.
"""

from __future__ import annotations

import io
import json
import math
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from megatron.core import dist_checkpointing
from torch import Tensor

from fp8_megatron.checkpoint.description import read_description
from fp8_megatron.checkpoint.encoding import Encoded, decode, is_encoded
from fp8_megatron.checkpoint.files import META, CheckpointError
from fp8_megatron.checkpoint.manifest import write_file, write_manifest
from fp8_megatron.checkpoint.metadata_file import read_metadata
from fp8_megatron.checkpoint.placement import Placement
from fp8_megatron.checkpoint.run_state import Progress
from fp8_megatron.checkpoint.saved_run import Elements, SavedRun
from fp8_megatron.checkpoint.saving import CheckpointWriter
from fp8_megatron.checkpoint.torch_dist import Chunk, TorchDistReader, Wanted, write_chunks, write_metadata
from fp8_megatron.config.schema import Config, ParallelConfig, PrecisionConfig
from fp8_megatron.dtypes import STATE_BLOCK, StorageDtype
from fp8_megatron.kernels import ops
from fp8_megatron.optimizer.state import StateTensor
from fp8_megatron.sharding.region import Region
from fp8_megatron.sharding.transport import SendMemory
from tests.harness.ranks import RankPool
from tests.harness.tiny_checkpoint import TinyRun, run_tiny_on_a_rank, tiny_resumable, train_steps
from tests.harness.tiny_gpt import GPT3_STYLE, LLAMA_STYLE, tiny_config

_CPU = torch.device("cpu")
FORMS = [dtype.value for dtype in StorageDtype]
KEY = "decoder.layers.mlp.linear_fc1.weight"


def state(form: str, numel: int, seed: int = 0) -> tuple[Encoded, Tensor]:
    """A run of state in a storage dtype, and its FP32 values."""
    value = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    if form == "split":
        parts = ops.split_master(value, torch.tensor([2.0**-6]))
        encoded = Encoded.of_split_master(*parts, torch.tensor([2.0**-6]))
        return encoded, ops.join_master(*parts, torch.tensor([2.0**-6]))
    stored = StateTensor.zeros(numel, StorageDtype(form), SendMemory(_CPU))
    stored.store_(value.abs() if form == "uint8" else value)
    return Encoded.of_state(*stored), stored.load()


def bytes_of(encoded: Encoded) -> bytes:
    file = io.BytesIO()
    encoded.write(file)
    return file.getvalue()


def tensor_of(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


@pytest.mark.parametrize("form", FORMS)
def test_a_rectangle_is_decoded_alone(form: str) -> None:
    """It begins and ends anywhere in a block, and is a safetensors document."""
    run, values = state(form, 4 * STATE_BLOCK)
    for start, shape in ((0, (1024,)), (256, (2, 256)), (3, (1, 200)), (250, (1, 3, 7)), (255, (2,)), (1023, (1,))):
        part = run.rectangle(start, shape)
        content = bytes_of(part)
        assert is_encoded(content)
        read = decode(tensor_of(content), shape)
        expected = values[start : start + torch.Size(shape).numel()].view(shape)
        assert torch.equal(part.decode(), expected) and torch.equal(read.decode(), expected), (start, shape)
        tensors = safetensors.torch.load(content)
        assert torch.equal(tensors["payload"].view(torch.uint8), part.payload.view(torch.uint8))
        assert len(content) < part.nbytes + 512


def test_an_archive_of_torch_is_no_encoding() -> None:
    for legacy in (False, True):
        file = io.BytesIO()
        torch.save(torch.ones(3), file, _use_new_zipfile_serialization=not legacy)
        assert not is_encoded(file.getvalue())
    assert not is_encoded(b"") and not is_encoded(b"\1\0\0")


def _about(change: Callable[[dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    """A change of a description."""

    def changed(content: bytes) -> bytes:
        size = int.from_bytes(content[:8], "little")
        found = json.loads(content[8 : 8 + size])
        change(found)
        text = json.dumps(found).encode()
        text += b" " * (-(8 + len(text)) % 64)
        return len(text).to_bytes(8, "little") + text + content[8 + size :]

    return changed


def _scale(value: float) -> Callable[[bytes], bytes]:
    def changed(content: bytes) -> bytes:
        start = 8 + int.from_bytes(content[:8], "little")
        return content[:start] + torch.tensor([value]).numpy().tobytes() + content[start + 4 :]

    return changed


def _nested(content: bytes) -> bytes:
    return (4000).to_bytes(8, "little") + b"[" * 4000 + content


FORGERIES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "form": (_about(lambda x: x["__metadata__"].update(form="fp8")), "payload as .*'F16'.* where fp8 has .*'F8_E4M3'"),
    "unknown form": (_about(lambda x: x["__metadata__"].update(form="fp4")), "description that cannot be read.*fp4"),
    "no form": (_about(lambda x: x.pop("__metadata__")), "description that cannot be read"),
    "dtype": (_about(lambda x: x["payload"].update(dtype="BF16")), "payload as .*BF16"),
    "shape": (_about(lambda x: x["payload"].update(shape=[999])), "payload as .*999"),
    "offsets": (_about(lambda x: x["payload"].update(data_offsets=[0, 1024])), "payload as"),
    "more": (_about(lambda x: x.update(other=x["payload"])), "other as .* where fp16 has None"),
    "first": (_about(lambda x: x["__metadata__"].update(first="256")), r"first\(256\) outside of a block"),
    "negative first": (_about(lambda x: x["__metadata__"].update(first="-1")), r"first\(-1\) outside of a block"),
    "odd first": (_about(lambda x: x["__metadata__"].update(first="1_7")), "__metadata__ as"),
    "list": (_about(lambda x: x.update(payload=[])), r"payload as \[\]"),
    "nested": (_nested, "description that cannot be read"),
    "zero scale": (_scale(0.0), "a scale that is negative, zero or infinite"),
    "negative scale": (_scale(-1.0), "a scale that is negative"),
    "infinite scale": (_scale(torch.inf), "a scale that is negative, zero or infinite"),
    "short": (lambda content: content[:-1], "a rectangle of 2255 bytes, and 2256 belong to fp16"),
    "long": (lambda content: content + b"\0", "a rectangle of .* bytes, and .* belong to fp16"),
    "header alone": (lambda content: content[:40] + bytes(2048), "description that cannot be read"),
    "torch's": (lambda content: b"PK\3\4" + content, "zip file|archive"),
}


@pytest.mark.parametrize("name", list(FORGERIES))
def test_a_forged_rectangle_is_one_clear_error(tmp_path: Path, name: str) -> None:
    forge, expected = FORGERIES[name]
    run, _ = state("fp16", 1024)
    chunk = Chunk("x", (32, 32), (0, 0), run.rectangle(0, (32, 32)))
    written, _ = write_chunks(tmp_path, 0, [chunk])
    path = tmp_path / written[0].file
    path.write_bytes(forge(path.read_bytes()))
    write_metadata(tmp_path, [replace(written[0], length=path.stat().st_size)], common=None, checkpoint_id="here")
    with pytest.raises(CheckpointError, match=f"__0_0.distcp is damaged: x at byte 0: .*({expected})") as error:
        TorchDistReader(tmp_path).read_whole("x")
    assert "\n" not in str(error.value)


def test_a_file_that_is_too_short_takes_no_memory(tmp_path: Path) -> None:
    run, _ = state("fp8", 1024)
    written, _ = write_chunks(tmp_path, 0, [Chunk("x", (1024,), (0,), run)])
    write_metadata(tmp_path, [replace(written[0], length=1 << 36)], common=None, checkpoint_id="here")
    with pytest.raises(CheckpointError, match=r"x takes bytes 0 to \+ 68719476736 of __0_0.distcp, which has "):
        TorchDistReader(tmp_path)
    os.truncate(tmp_path / written[0].file, 1 << 36)  # of holes, which take no disk
    reader = TorchDistReader(tmp_path)
    os.truncate(tmp_path / written[0].file, 1000)
    with pytest.raises(CheckpointError, match="fewer than 68719476736 bytes"):
        reader.read_whole("x")


@pytest.mark.parametrize("form", FORMS)
def test_any_rectangle_comes_back(tmp_path: Path, form: str) -> None:
    """Of rows that do not end with blocks, cut as a flat run is."""
    run, values = state(form, 1280)
    rows, columns = 12, 100
    cuts = [(0, 0, 7, 100), (7, 0, 1, 60), (7, 60, 1, 40), (8, 0, 4, 100)]
    chunks = [
        Chunk("x", (rows, columns), (row, column), run.rectangle(row * columns + column, (height, width)))
        for row, column, height, width in cuts
    ]
    written, _ = write_chunks(tmp_path, 0, chunks)
    write_metadata(tmp_path, written, common=None, checkpoint_id="here")
    reader, whole = TorchDistReader(tmp_path), values[: rows * columns].view(rows, columns)
    assert torch.equal(reader.read_whole("x"), whole)
    for row, column, height, width in ((6, 50, 3, 50), (7, 59, 1, 2), (0, 0, 12, 1)):
        target = torch.zeros(height * width)
        reader.read("x", [Wanted((row, column), (height, width), target)])
        assert torch.equal(target.view(height, width), whole[row : row + height, column : column + width])


FIVE_BYTES = PrecisionConfig(
    main_params_dtype=StorageDtype.SPLIT, exp_avg_dtype=StorageDtype.INT8, exp_avg_sq_dtype=StorageDtype.UINT8
)
#: Bytes of master and moments of a linear weight, and how many of them have an FP32 scale for 256 elements.
BYTES = {
    "bf16": (PrecisionConfig(precision="bf16"), 4 + 4 + 4, 0),
    "O1": (PrecisionConfig(opt_level="O1"), 2 + 4 + 4, 1),
    "O2": (PrecisionConfig(opt_level="O2"), 2 + 1 + 2, 3),
    "O3": (PrecisionConfig(), 2 + 1 + 2, 3),
    "5 bytes": (FIVE_BYTES, 2 + 1 + 1, 2),
}


@pytest.mark.parametrize("level", list(BYTES))
def test_bytes_of_a_parameter_on_disk(ranks: RankPool, tmp_path: Path, level: str) -> None:
    """Beside payload and scales, a rectangle has a header of less than 512 bytes."""
    precision, payload, num_scaled = BYTES[level]
    ranks.run(run_tiny_on_a_rank, tiny_config(precision=precision), 0, None, tmp_path, num_ranks=1)
    folder = tmp_path / "iter_0000000"
    tensors = read_metadata(folder)
    chunks = [chunk for key, tensor in tensors.items() if key.endswith(KEY) for chunk in tensor.chunks]
    num_chunks, num_bytes = len(chunks), sum(chunk.length for chunk in chunks)
    numel = math.prod(tensors[KEY].shape)
    expected = payload + num_scaled * 4 / STATE_BLOCK
    headers = num_bytes - expected * numel
    print(f"{level}: {expected:.3f} bytes a parameter, {num_bytes / numel:.3f} with headers of this small weight")
    assert 0 < headers <= num_chunks * 512
    total = sum(path.stat().st_size for path in folder.glob("*.distcp"))
    assert total == sum(chunk.length for tensor in tensors.values() for chunk in tensor.chunks)


def _train_and_save_twice(config: Config, root: Path) -> None:
    """The same state in both formats."""
    with tiny_resumable(config, 4) as (gpt, state):
        train_steps(gpt, config, 0, 2, 4)
        for state_dtype in ("native", "fp32"):
            changed = replace(config, checkpoint=replace(config.checkpoint, ckpt_state_dtype=state_dtype))
            writer = CheckpointWriter(root / state_dtype, gpt.topology)
            writer.save(replace(state, config=changed), Progress(2, 8))
            writer.finish()


BUCKETS = ParallelConfig(ddp_bucket_size=1 << 15)
TP2 = replace(BUCKETS, tensor_model_parallel_size=2, sequence_parallel=True)
PP2 = replace(BUCKETS, pipeline_model_parallel_size=2)
PRECISIONS = {
    "O3": PrecisionConfig(),
    "O1": PrecisionConfig(opt_level="O1"),
    "split": FIVE_BYTES,
    "bf16_master": PrecisionConfig(main_params_dtype=StorageDtype.BF16, exp_avg_sq_dtype=StorageDtype.FP8),
}


@pytest.mark.parametrize(
    "precision",
    [name if name in ("O3", "split") else pytest.param(name, marks=pytest.mark.slow) for name in PRECISIONS],
)
def test_both_formats_hold_the_same(ranks: RankPool, tmp_path: Path, precision: str) -> None:
    """Saved by two tensor-parallel × two data-parallel ranks, loaded whole and under other layouts and levels."""
    saved = tiny_config(LLAMA_STYLE, parallel=TP2, precision=PRECISIONS[precision])
    ranks.run(_train_and_save_twice, saved, tmp_path, num_ranks=4)
    native, fp32 = (SavedRun(tmp_path / name / "iter_0000002") for name in ("native", "fp32"))
    assert native.reader.shapes == fp32.reader.shapes
    assert {key.partition("decoder.")[0] for key in native.reader.shapes} >= {
        "",
        "optimizer.exp_avg.",
        "optimizer.exp_avg_sq.",
    }
    for key in native.reader.shapes:
        assert torch.equal(native.reader.read_whole(key), fp32.reader.read_whole(key)), key
    targets = [(2, replace(saved, parallel=PP2)), (1, replace(saved, parallel=BUCKETS, precision=PrecisionConfig()))]
    for num_ranks, config in targets:
        first, second = (
            ranks.run(run_tiny_on_a_rank, config, 2, tmp_path / name, None, None, 4, num_ranks=num_ranks)[0]
            for name in ("native", "fp32")
        )
        _assert_equal(first, second)


def _assert_equal(first: TinyRun, second: TinyRun) -> None:
    assert first.losses == second.losses
    for mine, other in ((first.start, second.start), (first.end, second.end), (first.weights, second.weights)):
        assert mine.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in mine.items())


def test_versions(ranks: RankPool, tmp_path: Path) -> None:
    """The native format has another version, so that versions that cannot read it refuse it by name; so does
    megatron-core."""
    ranks.run(_train_and_save_twice, tiny_config(replace(GPT3_STYLE, num_layers=1)), tmp_path, num_ranks=1)
    native, fp32 = (tmp_path / name / "iter_0000002" for name in ("native", "fp32"))
    descriptions = [read_description(folder) for folder in (fp32, native)]
    assert [(each["format_version"], each["state_dtype"]) for each in descriptions] == [(3, "fp32"), (4, "native")]
    assert not (native / "common.pt").exists()
    with pytest.raises(Exception, match="fp8_megatron_native"):
        dist_checkpointing.load({}, str(native))
    text = (native / META).read_text()
    (native / META).write_text(text.replace('"format_version": 4', '"format_version": 5'))
    with pytest.raises(CheckpointError, match="has format version 5; this version reads versions 3 and 4"):
        read_description(native)


def test_one_large_parameter_is_read_by_several_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rectangles of one parameter are under way at once; the parameters come in order."""
    run, values = state("fp16", 8 * STATE_BLOCK)
    chunks = [Chunk("x", (8, 256), (row, 0), run.rectangle(row * 256, (1, 256))) for row in range(8)]
    written, entries = write_chunks(tmp_path, 0, chunks)
    entries += write_metadata(tmp_path, written, common=None, checkpoint_id="here")
    names = ("iteration", "consumed_samples", "skipped_steps", "vocab_size", "padded_vocab_size")
    about = {"format_version": 4, "topology": {}, **dict.fromkeys(names, 1)}
    write_manifest(tmp_path, [*entries, write_file(tmp_path, META, json.dumps(about).encode())])
    together, load = threading.Barrier(4), TorchDistReader.load

    def load_together(*args: Any, **kwargs: Any) -> Tensor | Encoded:
        together.wait(timeout=30)
        return load(*args, **kwargs)

    monkeypatch.setattr(TorchDistReader, "load", load_together)
    placement = Placement("x", Region((8, 256)))
    # The whole, what lies behind the parameter alone, and a part.
    wanted = [Elements(placement, "master", *place) for place in ((0, 2048), (2048, 256), (1100, 800))]
    whole, behind, part = SavedRun(tmp_path).read(wanted)
    assert torch.equal(whole, values) and torch.equal(part, values[1100:1900])
    assert behind.shape == (256,) and not behind.any()
