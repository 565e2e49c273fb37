"""Time saving and loading a checkpoint in each format, against raw writes and reads of the same bytes.

torchrun --nproc-per-node 1 benchmarks/checkpoint_io.py --folder /scratch/io --output io.json -- \
    --config configs/gpt_345m.yaml --mock-data

Everything after -- are flags of pretrain_gpt.py. Reports, from the slowest rank, in GB of 10^9 bytes, for each of
--ckpt-state-dtype native and fp32:

- two saves at once;
- two saves in the background: the stall of each, and the steps beside the second one;
- a load with the files in the page cache, and one after they were dropped from it;
- beside each, raw writes (synced) and reads of as many files, as large, with as many threads. `of_the_disk` is
  the raw time over the time of the save or load: 1 is bound by the disk.

Stages are the first rank's, in seconds added up over its threads, so their sum may exceed the total. CPU seconds do not
depend on other work on the cores. They cover the calling thread, without torch's helper threads. A stage's time
excludes the stages that it calls. On a GPU `decode` and `distribute` are the time to launch.
"""

# ruff: noqa: E402  # cuDNN comes before the other imports
from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from fp8_megatron.device.cudnn import load_bundled

load_bundled()  # before megatron-core, which imports Transformer Engine

# Run as a script from a clone, installed or not.
sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.provenance import commit, device_name, versions
from fp8_megatron.checkpoint import loading, torch_dist
from fp8_megatron.checkpoint.concurrency import NUM_READERS
from fp8_megatron.checkpoint.encoding import Encoded
from fp8_megatron.checkpoint.files import iteration_folder
from fp8_megatron.checkpoint.loading import load_checkpoint
from fp8_megatron.checkpoint.manifest import RecordedFile
from fp8_megatron.checkpoint.run_state import Progress, Resumable, Snapshot
from fp8_megatron.checkpoint.saving import CheckpointWriter
from fp8_megatron.checkpoint.torch_dist import PlannedRead, TorchDistReader
from fp8_megatron.commands.program import exit_status
from fp8_megatron.config.io import own_and_run_flags, parse_config
from fp8_megatron.device import device as devices
from fp8_megatron.mcore.runtime import runtime, seed_everything
from fp8_megatron.mcore.topology import initialized
from fp8_megatron.mcore.transports import needs_launch_order
from fp8_megatron.optimizer.split_state import SplitSpaceState
from fp8_megatron.optimizer.state import SpaceState, StateTensor
from fp8_megatron.training.build import build_training_state
from fp8_megatron.training.run_data import open_run_data
from fp8_megatron.training.train_step import train_step

_BLOCK_BYTES = 1 << 26
_BUFFER_BYTES = 1 << 22

#: Stage → the calls that belong to it: owner and name.
_SAVE_STAGES: dict[str, list[tuple[Any, str]]] = {
    "copy_to_host": [(Snapshot, "of"), (Snapshot, "wait")],
    "decode": [(Encoded, "decode")],
    "serialise": [(torch, "save"), (Encoded, "write")],
    "checksum": [(zlib, "crc32")],
    "write": [(RecordedFile, "write")],
    "sync": [(os, "fsync")],
    "describe": [(torch_dist, "pickled")],
}
_LOAD_STAGES: dict[str, list[tuple[Any, str]]] = {
    "verify": [(loading, "problem_with")],
    "checksum": [(zlib, "crc32")],
    "read": [(TorchDistReader, "load")],
    "decode": [(Encoded, "decode")],
    "place": [(PlannedRead, "place")],
    "distribute": [(StateTensor, "store_"), (SplitSpaceState, "set_master"), (SpaceState, "derive_weights")],
}


@dataclass(frozen=True)
class _Bench:
    """What every measurement needs.

    Attributes:
        steps: trains.
    """

    folder: Path
    state: Resumable
    steps: Callable[[], None]
    num_steps: int

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self.state.topology.rank

    def timed(self, action: Callable[[], object]) -> float:
        """Seconds of the slowest rank."""
        device = self.state.device
        _synchronize(device)
        torch.distributed.barrier()
        started = time.perf_counter()
        action()
        _synchronize(device)
        return self.slowest(time.perf_counter() - started)

    def remove(self, folder: Path) -> None:
        """Remove a folder, so that no more than one checkpoint lies on the disk."""
        torch.distributed.barrier()
        if self.rank == 0:
            shutil.rmtree(folder)
        torch.distributed.barrier()

    def slowest(self, seconds: float) -> float:
        """The largest of all ranks' numbers."""
        value = torch.tensor(seconds, device=self.state.device)
        torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MAX)
        return value.item()


def main() -> None:
    """Measure and print one JSON object on the first rank."""
    options, flags = _parse()
    config = parse_config(flags)
    in_order = needs_launch_order(config.parallel, has_fp8_layers=config.precision.is_fp8)
    devices.prepare_cuda_environment(needs_launch_order=in_order)
    device = devices.select_device()
    with ExitStack() as stack:
        stack.enter_context(runtime(device))
        topology = stack.enter_context(initialized(config.parallel, config.model.num_layers, device))
        seed_everything(1, device, tensor_parallel_rank=topology.tp.rank(), pipeline_rank=topology.pp.rank())
        data = open_run_data(config, topology)
        state = build_training_state(config, data.padded_vocab_size, topology, device)
        resumable = state.resumable(data.unpadded_vocab_size)
        loader = data.train_loader(0)

        def steps() -> None:
            for _ in range(options.steps):
                train_step(state, loader)

        steps()
        result: dict[str, Any] = {
            "commit": commit(),
            "device": device_name() if device.type == "cuda" else "cpu",
            "versions": versions(("torch", "megatron-core")),
            "cores": len(os.sched_getaffinity(0)),
            "ranks": topology.world_size,
        }
        for state_dtype in options.state_dtypes:
            checkpoint = replace(config.checkpoint, ckpt_state_dtype=state_dtype)
            changed = replace(resumable, config=replace(config, checkpoint=checkpoint))
            bench = _Bench(options.folder / state_dtype, changed, steps, options.steps)
            result[state_dtype] = _measure(bench)
            bench.remove(bench.folder)
        if topology.rank == 0:
            print(json.dumps(result))
            if options.output is not None:
                options.output.write_text(json.dumps(result, indent=1) + "\n")


def _measure(bench: _Bench) -> dict[str, Any]:
    """Every time of one format."""
    at_once = bench.folder / "at_once"
    writer = CheckpointWriter(at_once, bench.state.topology)
    first = bench.timed(lambda: writer.save(bench.state, Progress(1, 0, 0)))
    bench.remove(iteration_folder(at_once, 1))
    with _stages(_SAVE_STAGES) as save_stages:
        again = bench.timed(lambda: writer.save(bench.state, Progress(2, 0, 0)))
    writer.finish()
    saved = iteration_folder(at_once, 2)
    gb = sum(path.stat().st_size for path in saved.iterdir()) / 1e9
    own = sorted(saved.glob(f"__{bench.rank}_*"))
    sizes = [path.stat().st_size for path in own]
    share = sum(sizes) / 1e9
    with _stages(_LOAD_STAGES) as load_stages:
        warm = bench.timed(lambda: load_checkpoint(at_once, bench.state))
    _drop(saved)
    cold = bench.timed(lambda: load_checkpoint(at_once, bench.state))
    bench.remove(at_once)
    result = {"gb": gb, "files_per_rank": len(sizes)}
    result |= _raw(bench, sizes, gb, save=again, load=warm, load_cold=cold)
    result |= {
        "save_seconds": first,
        "save_again_seconds": again,
        "save_again_gb_per_s": gb / again,
        "save_again_stages": _table(save_stages, share),
        "load_seconds": warm,
        "load_gb_per_s": gb / warm,
        "load_cold_seconds": cold,
        "load_cold_gb_per_s": gb / cold,
        "load_stages": _table(load_stages, share),
    }
    return result | _beside_training(bench)


def _raw(bench: _Bench, sizes: list[int], gb: float, *, save: float, load: float, load_cold: float) -> dict[str, float]:
    """Raw writes and reads of as many bytes, in as many files and threads, and of one file in one thread."""
    folder = bench.folder / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{bench.rank}_{index}" for index in range(len(sizes))]
    write = bench.timed(lambda: _write_all(paths, sizes))
    read = bench.timed(lambda: _read_all(paths, NUM_READERS))
    _drop(folder)
    read_cold = bench.timed(lambda: _read_all(paths, NUM_READERS))
    for path in paths:
        path.unlink()
    write_of_one = bench.timed(lambda: _write_all(paths[:1], [sum(sizes)]))
    read_of_one = bench.timed(lambda: _read_all(paths[:1], 1))
    bench.remove(folder)
    return {
        "raw_write_gb_per_s": gb / write,
        "raw_write_of_one_file_gb_per_s": gb / write_of_one,
        "raw_read_gb_per_s": gb / read,
        "raw_read_cold_gb_per_s": gb / read_cold,
        "raw_read_of_one_thread_gb_per_s": gb / read_of_one,
        "save_again_of_the_disk": write / save,
        "load_of_the_disk": read / load,
        "load_cold_of_the_disk": read_cold / load_cold,
    }


def _beside_training(bench: _Bench) -> dict[str, float]:
    """Two saves in the background; the first may still pin memory where `prepare` was not called."""
    root = bench.folder / "in_background"
    writer = CheckpointWriter(root, bench.state.topology, in_background=True)
    prepare = bench.timed(lambda: writer.prepare(bench.state))
    plain_steps = bench.timed(bench.steps)
    stalls = []
    for iteration in (1, 2):
        _synchronize(bench.state.device)
        torch.distributed.barrier()
        stalls.append(bench.slowest(writer.save(bench.state, Progress(iteration, 0, 0))))
        # The host's stall is launches alone: what the copies cost shows in the steps beside them.
        beside = bench.timed(bench.steps)
        started = time.perf_counter()
        writer.finish()
        left = bench.slowest(time.perf_counter() - started)
        bench.remove(iteration_folder(root, iteration))
    return {
        "async_prepare_seconds": prepare,
        "async_first_stall_seconds": stalls[0],
        "async_stall_seconds": stalls[1],
        "async_seconds_after_the_steps": left,
        "step_seconds": plain_steps / bench.num_steps,
        "step_seconds_beside_a_save": beside / bench.num_steps,
        "stall_with_slower_steps_in_steps": (stalls[1] + beside - plain_steps) / (plain_steps / bench.num_steps),
    }


def _parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description="Time saving and loading beside raw writes and reads.")
    parser.add_argument("--folder", type=Path, required=True, help="scratch folder; what is measured in it is removed")
    parser.add_argument("--output", type=Path, help="file to write the JSON object to as well")
    parser.add_argument("--steps", type=int, default=5, help="training steps beside a save, and without one")
    parser.add_argument("--state-dtypes", nargs="+", choices=("native", "fp32"), default=["native", "fp32"])
    own, flags = own_and_run_flags(sys.argv[1:])
    return parser.parse_args(own), flags or ["--mock-data", "--vocab-size", "512"]


@contextmanager
def _stages(stages: dict[str, list[tuple[Any, str]]]) -> Iterator[dict[str, complex]]:
    """Seconds (real part) and CPU seconds (imaginary part) by stage inside the block, added up over threads.

    The time of an inner stage counts for that stage alone.
    """
    spent: dict[str, complex] = defaultdict(complex)
    lock, inner = threading.Lock(), threading.local()

    def now() -> complex:
        return complex(time.perf_counter(), time.thread_time())

    def watched(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            outer, inner.spent = getattr(inner, "spent", 0j), 0j
            started = now()
            try:
                return function(*args, **kwargs)
            finally:
                elapsed = now() - started
                with lock:
                    spent[stage] += elapsed - inner.spent
                inner.spent = outer + elapsed

        return call

    with ExitStack() as patches:
        for stage, calls in stages.items():
            for owner, name in calls:
                patches.enter_context(mock.patch.object(owner, name, watched(stage, getattr(owner, name))))
        yield spent


def _table(stages: dict[str, complex], gb: float) -> dict[str, dict[str, float]]:
    return {
        stage: {
            "thread_seconds": spent.real,
            "cpu_seconds": spent.imag,
            "gb_per_s_of_a_thread": gb / spent.real,
            "gb_per_cpu_second": gb / spent.imag,
        }
        for stage, spent in stages.items()
    }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _drop(folder: Path) -> None:
    """Drop a folder's files, which are on disk, from the page cache."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _write_all(paths: list[Path], sizes: list[int]) -> None:
    """Write and sync files, each from a thread."""
    with ThreadPoolExecutor(len(paths)) as threads:
        list(threads.map(_write, paths, sizes))


def _write(path: Path, num_bytes: int) -> None:
    block = memoryview(os.urandom(min(num_bytes, _BLOCK_BYTES)))
    with path.open("wb", buffering=0) as file:
        for start in range(0, num_bytes, len(block)):
            file.write(block[: num_bytes - start])
        os.fsync(file.fileno())


def _read_all(paths: list[Path], num_threads: int) -> None:
    """Read files block by block from threads that share the blocks."""
    blocks = [(path, start) for path in paths for start in range(0, path.stat().st_size, _BLOCK_BYTES)]
    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(_read, [blocks[index::num_threads] for index in range(num_threads)]))


def _read(blocks: list[tuple[Path, int]]) -> None:
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    for path, start in blocks:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while (left := start + _BLOCK_BYTES - file.tell()) and file.readinto(buffer[:left]):
                pass


if __name__ == "__main__":
    sys.exit(exit_status(main))
