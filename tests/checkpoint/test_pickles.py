"""Pickles are read as data, through one door: nothing that a file names is called, imported or left in torch's list."""

from __future__ import annotations

import argparse
import ast
import collections
import io
import os
import pickle
import random
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import fp8_megatron
from fp8_megatron.checkpoint.files import CheckpointError
from fp8_megatron.checkpoint.megatron_loading import open_megatron_checkpoint
from fp8_megatron.checkpoint.pickles import Opaque, read_megatron_file, read_tensor
from fp8_megatron.checkpoint.torch_dist import Chunk, write_chunks, write_metadata
from fp8_megatron.reporting.run_log import EventKind


class _Attack:
    """A pickle of this makes a folder when it is read plainly."""

    def __init__(self, function: object, path: Path) -> None:
        self._call = function, (str(path),)

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return self._call


def test_reading_executes_nothing(tmp_path: Path) -> None:
    """What a file names beside tensors and arguments is dropped, whatever other code has allowed."""
    path, mark = tmp_path / "file.pt", tmp_path / "mark"
    attacks = {"other": _Attack(shutil.rmtree, mark), "nested": [_Attack(io.FileIO, path)]}
    torch.save({"args": argparse.Namespace(swiglu=True), "value": torch.ones(3), **attacks}, path)
    with torch.serialization.safe_globals([shutil.rmtree, io.FileIO, (print, "anything")]):
        before = set(torch.serialization.get_safe_globals())
        content = read_megatron_file(path)
        assert set(torch.serialization.get_safe_globals()) == before
    assert content["args"].swiglu and torch.equal(content["value"], torch.ones(3))
    assert isinstance(content["other"], Opaque) and isinstance(content["nested"][0], Opaque)
    torch.save(_Attack(os.mkdir, mark), path)
    with pytest.raises(CheckpointError, match=r"file.pt is damaged \(.*posix.mkdir.*copy it again$"):
        read_megatron_file(path)
    assert not mark.exists()
    torch.load(path, weights_only=False)
    assert mark.exists(), "the attack works where a file is read plainly"


def test_what_megatron_saves_beside_tensors_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    states = {"np": np.random.get_state(), "random": random.getstate(), "torch": torch.get_rng_state()}
    kinds = {"enum": EventKind.SKIP, "path": path, "set": {1}, "counts": collections.defaultdict(int, {1: 2})}
    torch.save({"rng": [states], "args": argparse.Namespace(backend=EventKind.SAVE, layers=2), **kinds}, path)
    content = read_megatron_file(path)
    assert isinstance(content["enum"], Opaque) and isinstance(content["args"].backend, Opaque)
    assert isinstance(content["path"], Opaque) and content["args"].layers == 2
    assert isinstance(content["rng"][0]["np"][1], Opaque), "megatron-core adds numpy's arrays to torch's list"
    assert content["set"] == {1} and content["counts"] == {1: 2}
    assert torch.equal(content["rng"][0]["torch"], torch.get_rng_state())


class _Program(torch.nn.Module):
    """Its __setstate__ writes into a file when torch.jit loads it."""

    def __init__(self, target: str) -> None:
        super().__init__()
        self.training, self.target = False, target

    @torch.jit.export
    def __getstate__(self) -> str:
        return self.target

    @torch.jit.export
    def __setstate__(self, target: str) -> None:
        self.training = False
        self.target = target
        print(torch.from_file(target, True, 4, dtype=torch.uint8).fill_(65).sum())

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_torchscript_archive_is_refused_everywhere(tmp_path: Path) -> None:
    """As a file of both formats of Megatron-LM, and in the place of a tensor: nothing of it runs."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    program = tmp_path / "program.pt"
    torch.jit.save(torch.jit.script(_Program(str(victim))), str(program))
    folder = tmp_path / "iter_0000001"
    written, _ = write_chunks(folder_made(folder), 0, [Chunk("x", (2,), (0,), torch.ones(2))])
    write_metadata(folder, written, common={}, checkpoint_id="here")
    for name in ("common.pt", "mp_rank_00/model_optim_rng.pt"):
        shutil.copy(program, folder_made((folder / name).parent) / Path(name).name)
        with pytest.raises(CheckpointError, match=rf"file {folder / name} is a TorchScript archive, which is not read"):
            open_megatron_checkpoint(folder)
    with pytest.raises(ValueError, match="is a TorchScript archive"), program.open("rb") as file:
        read_tensor(file)
    assert victim.read_bytes() == b"precious"


def folder_made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_an_archive_that_torch_did_not_write_is_refused(tmp_path: Path) -> None:
    """A compressed one could fill the memory; two pickles could be read differently by two readers."""
    path = tmp_path / "file.pt"
    torch.save({"value": torch.ones(3)}, path)
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    (name,) = (name for name in entries if name.endswith("/data.pkl"))
    for compression, more in ((zipfile.ZIP_DEFLATED, {}), (zipfile.ZIP_STORED, {"other/data.pkl": entries[name]})):
        with zipfile.ZipFile(path, "w", compression) as archive:
            for entry, content in {**entries, **more}.items():
                archive.writestr(entry, content)
        with pytest.raises(CheckpointError, match=r"file.pt is damaged \(it is no archive that torch.save wrote\)"):
            read_megatron_file(path)
    torch.save({"value": torch.ones(3)}, path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"file.pt is damaged .*copy it again"):
        read_megatron_file(path)
    for content in (pickle.dumps({"a": 1}), b""):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="is damaged"):
            read_megatron_file(path)


@pytest.mark.parametrize("levels", [1, 65, 100_000], ids=["itself", "deep", "deeper"])
def test_nested_containers_are_refused(tmp_path: Path, levels: int) -> None:
    """A recursive reader would end with an internal error, or not at all. `torch.save` cannot write these."""
    path = tmp_path / "file.pt"
    torch.save([1], path)
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    loop, deep = b"\x80\x02]q\x00h\x00a.", b"\x80\x02" + b"]" * levels + b"a" * (levels - 1) + b"."
    with zipfile.ZipFile(path, "w") as archive:
        for entry, content in entries.items():
            is_pickle = entry.endswith("/data.pkl")
            archive.writestr(entry, (loop if levels == 1 else deep) if is_pickle else content)
    with pytest.raises(CheckpointError, match=r"is damaged .it nests deeper than 64 levels, or holds itself"):
        read_megatron_file(path)


#: What reads objects, and who may: `_compat_pickle` and `pickletools` read names alone.
LOADERS = {
    "torch.load": {"checkpoint/pickles.py"},
    "torch.jit.load": set(),
    "torch.hub.load": set(),
    "pickle.load": set(),
    "pickle.loads": {"watch/flight_recorder.py"},  # bytes that torch has made in this process
    "pickle.Unpickler": {"checkpoint/pickles.py"},
    "yaml.load": {"config/setting_files.py"},  # with a loader derived from SafeLoader
    "yaml.unsafe_load": set(),
    "yaml.full_load": set(),
    "eval": set(),
    "exec": {"kernels/registration.py"},  # what is written there of operators' own signatures
    "marshal.loads": set(),
    "shelve.open": set(),
    "os.system": set(),
}


def test_nothing_else_of_the_package_reads_objects() -> None:
    """Neither by these names, nor by numpy with pickles, nor by code that comes with a model."""
    root = Path(fp8_megatron.__file__).parent
    found: dict[str, set[str]] = {name: set() for name in LOADERS}
    for path in root.rglob("*.py"):
        where = str(path.relative_to(root))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call | ast.ClassDef):
                for used in [node.func] if isinstance(node, ast.Call) else node.bases:
                    if ast.unparse(used) in found:
                        found[ast.unparse(used)].add(where)
            if isinstance(node, ast.keyword):
                value = ast.unparse(node.value)
                assert (node.arg, value) not in (("allow_pickle", "True"), ("weights_only", "False")), where
                assert node.arg != "trust_remote_code" or value == "False", where
            if isinstance(node, ast.ImportFrom) and node.module in ("pickle", "torch", "yaml", "marshal", "dill"):
                assert not {"load", "loads", "Unpickler", "unsafe_load"} & {name.name for name in node.names}, where
    assert found == LOADERS
