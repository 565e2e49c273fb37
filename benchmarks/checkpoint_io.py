"""Time saving and loading a checkpoint against raw writes and reads of as many bytes, and break the time down.

torchrun --nproc-per-node 1 benchmarks/checkpoint_io.py --folder /scratch/io --output io.json -- \
    --config configs/gpt_345m.yaml --mock-data

Everything after -- are flags of pretrain_gpt.py. Reports, from the slowest rank, in GB of 10^9 bytes: two saves at once
(the first one also allocates pinned memory), the stall of a save in the background while training steps go on, and a
load (the page cache holds the files). For comparison it times raw writes (synced) and reads: of as many files of the
same size as a rank's, with as many threads, and of one file with one thread.

Stages are the first rank's, in seconds added up over its threads, so their sum may exceed the total. CPU seconds do not
depend on other work on the cores. They cover the calling thread, without torch's helper threads. A stage's time
excludes the stages that it calls. On a GPU `distribute` is the time to launch.
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
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from fp8_megatron.device.cudnn import load_bundled

load_bundled()  # before megatron-core, which imports Transformer Engine

from fp8_megatron.checkpoint import loading
from fp8_megatron.checkpoint.concurrency import NUM_READERS
from fp8_megatron.checkpoint.files import iteration_folder
from fp8_megatron.checkpoint.loading import load_checkpoint
from fp8_megatron.checkpoint.manifest import RecordedFile
from fp8_megatron.checkpoint.run_state import Progress, Resumable, Snapshot
from fp8_megatron.checkpoint.saving import CheckpointWriter
from fp8_megatron.checkpoint.torch_dist import TorchDistReader
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
    "copy_to_host": [(Snapshot, "of")],
    "decode": [(StateTensor, "load")],
    "serialise": [(torch, "save")],
    "checksum": [(zlib, "crc32")],
    "write": [(RecordedFile, "write")],
    "sync": [(os, "fsync")],
}
_LOAD_STAGES: dict[str, list[tuple[Any, str]]] = {
    "verify": [(loading, "problem_with")],
    "checksum": [(zlib, "crc32")],
    "read": [(torch, "load")],
    "place": [(TorchDistReader, "read")],
    "distribute": [(StateTensor, "store_"), (SplitSpaceState, "set_master"), (SpaceState, "derive_weights")],
}


def main() -> None:
    """Measure and print one JSON object on the first rank."""
    options, flags = _parse()
    folder = options.folder
    config = parse_config(flags)
    in_order = needs_launch_order(config.parallel, has_fp8_layers=config.precision.is_fp8)
    devices.prepare_cuda_environment(needs_launch_order=in_order)
    device = devices.select_device()
    with ExitStack() as stack:
        stack.enter_context(runtime(device))
        topology = stack.enter_context(initialized(config.parallel, config.model.num_layers, device))
        seed_everything(1, device, tensor_parallel_rank=topology.tp.rank(), pipeline_rank=topology.pp.rank())
        data = open_run_data(config, topology)
        state = build_training_state(config, data.vocab_size, topology, device)
        resumable = Resumable(
            config,
            state.optimizer,
            state.histories,
            topology,
            device,
            vocab_size=data.unpadded_vocab_size,
            padded_vocab_size=data.vocab_size,
        )
        loader = data.train_loader(0)

        def steps() -> None:
            for _ in range(options.steps):
                train_step(state, loader, wants_stop=False)

        def timed(action: Callable[[], object]) -> float:
            """Seconds of the slowest rank."""
            _synchronize(device)
            torch.distributed.barrier()
            started = time.perf_counter()
            action()
            _synchronize(device)
            seconds = torch.tensor(time.perf_counter() - started, device=device)
            torch.distributed.all_reduce(seconds, op=torch.distributed.ReduceOp.MAX)
            return seconds.item()

        steps()
        at_once, in_background = folder / "at_once", folder / "in_background"
        writer = CheckpointWriter(at_once, topology)
        save_seconds = timed(lambda: writer.save(resumable, Progress(1, 0, 0)))
        with _stages(_SAVE_STAGES) as save_stages:
            save_again = timed(lambda: writer.save(resumable, Progress(2, 0, 0)))
        writer.finish()
        saved = iteration_folder(at_once, 1)
        total = sum(path.stat().st_size for path in saved.iterdir())
        background = CheckpointWriter(in_background, topology, in_background=True)
        plain_steps = timed(steps)
        stall = timed(lambda: background.save(resumable, Progress(2, 0, 0)))
        steps_beside = timed(steps)
        background.finish()
        with _stages(_LOAD_STAGES) as load_stages:
            load_seconds = timed(lambda: load_checkpoint(at_once, resumable))
        sizes = [path.stat().st_size for path in sorted(saved.glob(f"__{topology.rank}_*"))]
        raw = [folder / f"raw_{topology.rank}_{index}" for index in range(len(sizes))]
        raw_write = timed(lambda: _write_all(raw, sizes))
        raw_read = timed(lambda: _read_all(raw, NUM_READERS))
        raw_write_of_one = timed(lambda: _write_all(raw[:1], [sum(sizes)]))
        raw_read_of_one = timed(lambda: _read_all(raw[:1], 1))
        torch.distributed.barrier()
        if topology.rank == 0:
            shutil.rmtree(folder)
            gb = total / 1e9
            share = sum(sizes) / 1e9
            result = {
                "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
                "cores": len(os.sched_getaffinity(0)),
                "ranks": topology.world_size,
                "gb": gb,
                "files_per_rank": len(sizes),
                "save_seconds": save_seconds,
                "save_again_seconds": save_again,
                "save_again_gb_per_s": gb / save_again,
                "raw_write_gb_per_s": gb / raw_write,
                "raw_write_of_one_file_gb_per_s": gb / raw_write_of_one,
                "save_again_stages": _table(save_stages, share),
                "load_seconds": load_seconds,
                "load_gb_per_s": gb / load_seconds,
                "raw_read_gb_per_s": gb / raw_read,
                "raw_read_of_one_thread_gb_per_s": gb / raw_read_of_one,
                "load_stages": _table(load_stages, share),
                "async_stall_seconds": stall,
                "step_seconds": plain_steps / options.steps,
                "step_seconds_beside_a_save": steps_beside / options.steps,
            }
            print(json.dumps(result))
            if options.output is not None:
                options.output.write_text(json.dumps(result, indent=1) + "\n")


def _parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description="Time saving and loading beside raw writes and reads.")
    parser.add_argument("--folder", type=Path, required=True, help="scratch folder; removed at the end")
    parser.add_argument("--output", type=Path, help="file to write the JSON object to as well")
    parser.add_argument("--steps", type=int, default=5, help="training steps beside a save, and without one")
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
