"""Runs and training states in this process, and steps of them, for tests on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8_megatron.config.io import parse_config
from fp8_megatron.device import device as devices
from fp8_megatron.mcore.runtime import runtime, seed_everything
from fp8_megatron.mcore.topology import initialized
from fp8_megatron.reporting.metrics_file import METRICS_FILE, read_rows
from fp8_megatron.training.build import build_training_state
from fp8_megatron.training.run_data import open_run_data
from fp8_megatron.training.train_step import train_step
from fp8_megatron.training.trainer import Trainer

from .runs import tiny_flags


def losses(output_dir: Path, **settings: object) -> list[float]:
    """Of every step of a run on random tokens."""
    Trainer(parse_config(tiny_flags(output_dir, **settings))).fit()
    return [row["loss"] for row in read_rows(output_dir / METRICS_FILE) if row["kind"] == "train"]


@contextmanager
def training_states(base: Mapping[str, object]) -> Iterator[Callable[..., Any]]:
    """A function that makes a training state, its loader and the bytes that the device held before.

    Its arguments are settings beside those of `base`. The states' ranks live until the block ends.
    """
    with ExitStack() as stack:

        def build(**overrides: object) -> Any:
            config = parse_config(tiny_flags(Path("unused"), **{**base, "train_iters": 100, **overrides}))
            device = devices.select_device()
            stack.enter_context(runtime(device))
            topology = stack.enter_context(initialized(config.parallel, config.model.num_layers, device))
            seed_everything(1, device, tensor_parallel_rank=0, pipeline_rank=0)
            data = open_run_data(config, topology)
            torch.ones(16, 16, device=device) @ torch.ones(16, 16, device=device)  # cuBLAS takes its workspace, once
            before = torch.cuda.memory_allocated()
            state = build_training_state(config, data.padded_vocab_size, topology, device)
            return state, data.train_loader(0), before

        yield build


def step_without_waiting(state: Any, loader: Any) -> Tensor:
    """What the last of three warm steps measured, with PyTorch's synchronisation checks set to raise in all three."""
    for _ in range(3):
        train_step(state, loader)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            values = train_step(state, loader)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return values
