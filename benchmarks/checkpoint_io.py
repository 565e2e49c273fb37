"""Time saving and loading a checkpoint beside raw writes and reads of as many bytes.

torchrun --nproc-per-node 1 benchmarks/checkpoint_io.py --folder /scratch/io -- --config configs/gpt_345m.yaml \
    --mock-data

Everything after -- are flags of pretrain_gpt.py. Reports, from the slowest rank, in GB of 10^9 bytes: a save at once,
the stall of a save in the background while training steps go on, a load (the page cache holds the files: a raw read
stands beside it), and one raw file a rank, written and synced.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from fp8_megatron import device as devices
from fp8_megatron.checkpoint.loading import load_checkpoint
from fp8_megatron.checkpoint.run_state import Progress, Resumable
from fp8_megatron.checkpoint.saving import CheckpointWriter
from fp8_megatron.config_io import parse_config
from fp8_megatron.distributed.topology import initialized
from fp8_megatron.training.run_data import open_run_data
from fp8_megatron.training.setup import build_training_state
from fp8_megatron.training.train_step import train_step

_STEPS = 5


def main() -> None:
    """Measure and print one JSON object on the first rank."""
    folder, flags = _parse()
    config = parse_config(flags)
    devices.prepare_cuda_environment(config.parallel.tensor_model_parallel_size)
    device = devices.select_device()
    with ExitStack() as stack:
        stack.enter_context(devices.runtime(device))
        topology = stack.enter_context(initialized(config.parallel, config.model.num_layers, device))
        devices.seed_everything(1, device, tensor_parallel_rank=topology.tp.rank(), pipeline_rank=topology.pp.rank())
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
            for _ in range(_STEPS):
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
        writer.finish()
        total = sum(path.stat().st_size for path in at_once.rglob("*") if path.is_file())
        background = CheckpointWriter(in_background, topology, in_background=True)
        plain_steps = timed(steps)
        stall = timed(lambda: background.save(resumable, Progress(2, 0, 0)))
        steps_beside = timed(steps)
        background.finish()
        load_seconds = timed(lambda: load_checkpoint(at_once, resumable))
        raw = folder / f"raw{topology.rank}"
        share = total // topology.world_size
        raw_write = timed(lambda: _write(raw, share))
        raw_read = timed(lambda: _read(raw))
        raw.unlink()
        torch.distributed.barrier()
        if topology.rank == 0:
            shutil.rmtree(folder)
            gb = total / 1e9
            print(
                json.dumps(
                    {
                        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
                        "ranks": topology.world_size,
                        "gb": gb,
                        "save_seconds": save_seconds,
                        "save_gb_per_s": gb / save_seconds,
                        "raw_write_gb_per_s": gb / raw_write,
                        "load_seconds": load_seconds,
                        "load_gb_per_s": gb / load_seconds,
                        "raw_read_gb_per_s": gb / raw_read,
                        "async_stall_seconds": stall,
                        "step_seconds": plain_steps / _STEPS,
                        "step_seconds_beside_a_save": steps_beside / _STEPS,
                    }
                )
            )


def _parse() -> tuple[Path, list[str]]:
    parser = argparse.ArgumentParser(description="Time saving and loading beside raw writes and reads.")
    parser.add_argument("--folder", type=Path, required=True, help="scratch folder; removed at the end")
    own, flags = sys.argv[1:], ["--mock-data", "--vocab-size", "512"]
    if "--" in own:
        own, flags = own[: own.index("--")], own[own.index("--") + 1 :]
    return parser.parse_args(own).folder, flags


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _write(path: Path, num_bytes: int) -> None:
    block = os.urandom(min(num_bytes, 2**26))
    with path.open("wb") as file:
        for start in range(0, num_bytes, len(block)):
            file.write(block[: num_bytes - start])
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> None:
    buffer = bytearray(2**26)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


if __name__ == "__main__":
    main()
