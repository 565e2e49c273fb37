"""The work of a peer, and the figures that it must report.

A peer takes the flags of ``pretrain_gpt.py``. It reads the same tokens in the same order, starts from the same initial
weights, follows the same schedule and counts FLOPs in the same way. Precision, storage, transports and graphs follow
the recipe of the peer.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.provenance import versions
from fp8_megatron.config.checks import ConfigError
from fp8_megatron.config.io import own_and_run_flags, parse_config
from fp8_megatron.config.learning_rate import LearningRateSchedule
from fp8_megatron.config.schema import Config
from fp8_megatron.data.datasets import build_datasets
from fp8_megatron.data.document_bounds import SequencePart
from fp8_megatron.data.loader import build_loader
from fp8_megatron.data.tokenizer import padded_vocab_size
from fp8_megatron.data.tokenizer_settings import TokenizerOptions, build_tokenizer
from fp8_megatron.mcore.initialization import initial_values
from fp8_megatron.mcore.topology import region_of
from fp8_megatron.reporting.flops import model_flops_per_token

Batch = dict[str, Tensor]

_PACKAGES = ("torch", "megatron-core", "emerging_optimizers", "transformer_engine", "torchao")
#: Steps left out of the speed, as in benchmarks/compare.py.
WARM_UP_STEPS = 5


@dataclass(frozen=True)
class Work:
    """A run of `pretrain_gpt.py` as a peer sees it on this rank.

    Attributes:
        vocab_size: rows of the embedding: padded as this project pads them.
    """

    config: Config
    recipe: str
    device: torch.device
    rank: int
    world_size: int
    vocab_size: int

    @property
    def train_iters(self) -> int:
        """Optimizer steps."""
        return self.config.train_iters(self.world_size)

    @property
    def learning_rate_schedule(self) -> LearningRateSchedule:
        """The schedule that the run follows, counted in samples."""
        return LearningRateSchedule.of(self.config, self.world_size)

    @property
    def global_batch_size(self) -> int:
        """Samples of a step over all ranks, in which the schedule counts."""
        return self.config.global_batch_size(self.world_size)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one data-parallel rank and step."""
        return self.config.num_micro_batches(self.world_size)

    def initial_values(
        self, params: dict[str, torch.nn.Parameter], *, tensor_parallel_rank: int = 0, tensor_parallel_size: int = 1
    ) -> Iterator[tuple[str, Tensor]]:
        """(name, this rank's shard in FP32): the weights with which `pretrain_gpt.py` starts, by Megatron's names."""
        return initial_values(
            params,
            std=self.config.model.init_method_std,
            num_layers=self.config.model.num_layers,
            seed=self.config.training.seed,
            region_of=partial(region_of, rank=tensor_parallel_rank, size=tensor_parallel_size),
        )

    def micro_batches(self, data_parallel_rank: int, part: SequencePart | None = None) -> Iterator[Batch]:
        """This rank's micro-batches on its device: the same as in `pretrain_gpt.py`, in the same order.

        Args:
            part: this rank's tokens of each sequence; None: all of them.
        """
        config, model = self.config, self.config.model
        tokenizer = _tokenizer(config)
        datasets = build_datasets(
            config.data,
            seq_length=model.seq_length,
            seed=config.training.seed,
            num_train_samples=self.train_iters * config.global_batch_size(self.world_size),
            num_valid_samples=0,
            num_test_samples=0,
            tokenizer=tokenizer,
            vocab_size=model.vocab_size,
        )
        assert datasets.train is not None
        loader = build_loader(
            datasets.train,
            micro_batch_size=config.training.micro_batch_size,
            data_parallel_rank=data_parallel_rank,
            data_parallel_size=config.data_parallel_size(self.world_size),
            num_workers=config.data.num_workers,
            part=part,
        )
        for batch in loader:
            yield {key: tensor.to(self.device, non_blocking=True) for key, tensor in batch.items()}


class StepClock:
    """Times steps without waiting for them: events on a GPU, which are read at the end; the host's clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        """A step ends here and the next one begins."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def step_seconds(self) -> list[float]:
        """Seconds of each step; waits for the last one."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if not self._on_gpu:
            return [after - before for before, after in pairs]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairs]


def main(
    description: str, recipes: Sequence[str], check: Callable[[Config, str], None], train: Callable[..., None]
) -> int:
    """Read the command line of a peer, train, and return the exit status.

    Args:
        check: raises `ConfigError` for configurations that the peer does not support; called before any GPU is touched.
        train: called with (`Work`, path of the figures or None).
    """
    parser = argparse.ArgumentParser(description=description, epilog="Flags of pretrain_gpt.py follow --.")
    parser.add_argument("--recipe", choices=recipes, default=recipes[0])
    parser.add_argument("--output", type=Path, help="write the figures here too, as JSON")
    own, passed = own_and_run_flags(sys.argv[1:])
    args = parser.parse_args(own)
    try:
        config = parse_config(passed)
        _check(config)
        check(config, args.recipe)
        train(_work(config, args.recipe), args.output)
    except ConfigError as error:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def require(module: str, package: str) -> None:
    """Raise if an optional package is not installed.

    Raises:
        ConfigError: the message says how to install it.
    """
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"{package} is not installed: pip install {package}")


def report(work: Work, step_seconds: list[float], losses: Tensor, *, gpu_gb: float, output: Path | None) -> None:
    """Print a peer's figures as one line ``JSON {…}``, which benchmarks/compare.py reads; called on rank 0.

    Args:
        step_seconds: of every step, including the first ones.
        losses: FP32 [steps], nats per token, the mean over the global batch.
        gpu_gb: peak memory of a rank's allocator, 10⁹ bytes; NaN on a CPU.
    """
    model, training = work.config.model, work.config.training
    timed = step_seconds[WARM_UP_STEPS:] or step_seconds[-1:]
    seconds = statistics.median(timed)
    tokens = work.config.global_batch_size(work.world_size) * model.seq_length
    rate = tokens / seconds / work.world_size
    full, causal = (
        rate * model_flops_per_token(model, causal=counts_causal, padded_vocab_size=work.vocab_size) / 1e12
        for counts_causal in (False, True)
    )
    figures = {
        "recipe": work.recipe,
        "tok_s_gpu": rate,
        "step_ms": 1e3 * seconds,
        "tflops_gpu": full,
        "tflops_causal": causal,
        "mem_gb": 0.0 if math.isnan(gpu_gb) else gpu_gb,
        "losses": [float(loss) for loss in losses],
        "world_size": work.world_size,
        "micro_batch_size": training.micro_batch_size,
        "num_micro_batches": work.num_micro_batches,
        "versions": versions(_PACKAGES),
    }
    line = json.dumps(figures)
    print(f"JSON {line}", flush=True)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(line + "\n")


def peak_gb(device: torch.device) -> float:
    """The largest allocator peak of all ranks, 10⁹ bytes; NaN on a CPU. Called by all ranks together."""
    if device.type != "cuda":
        return math.nan
    peak = torch.tensor(torch.cuda.max_memory_allocated(device) / 1e9, device=device)
    torch.distributed.all_reduce(peak, op=torch.distributed.ReduceOp.MAX)
    return peak.item()


def _work(config: Config, recipe: str) -> Work:
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available() and local_rank >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ConfigError(f"LOCAL_RANK({local_rank}) has no GPU: this node has {count}; start {count} ranks")
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    vocab_size = padded_vocab_size(
        config.model.vocab_size or _tokenizer(config).vocab_size,
        config.model.make_vocab_size_divisible_by,
        config.parallel.tensor_model_parallel_size,
    )
    return Work(config, recipe, device, rank, world_size, vocab_size)


def _tokenizer(config: Config) -> Any:
    data, vocab_size = config.data, config.model.vocab_size
    try:
        if data.mock_data and data.tokenizer_model is None:
            return build_tokenizer("NullTokenizer", None, vocab_size)
        return build_tokenizer(data.tokenizer_kind, data.tokenizer_model, vocab_size, TokenizerOptions.of(data))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _check(config: Config) -> None:
    """Refuse settings that no peer supports, so that none is ignored silently."""
    training, checkpoint = config.training, config.checkpoint
    asked = {
        f"--eval-interval {training.eval_interval}": training.eval_interval > 0,
        f"--save {checkpoint.save}": checkpoint.save is not None,
        f"--load {checkpoint.load}": checkpoint.load is not None,
        f"--rampup-batch-size {' '.join(training.rampup_batch_size)}": bool(training.rampup_batch_size),
        f"--step-batch-size-schedule {' '.join(training.step_batch_size_schedule)}": bool(
            training.step_batch_size_schedule
        ),
        f"--optimizer {config.optimizer.optimizer}": config.optimizer.optimizer not in ("adam", "adamw", "muon"),
        "--use-mup": config.model.use_mup,
        f"--decoupled-lr {config.optimizer.decoupled_lr}": config.optimizer.decoupled_lr is not None,
        f"--iterations-to-skip {' '.join(training.iterations_to_skip)}": bool(training.iterations_to_skip),
        f"--mlp-chunks-for-training {training.mlp_chunks_for_training}": training.mlp_chunks_for_training > 1,
        "--no-decoupled-weight-decay": not config.optimizer.decoupled_weight_decay,
        f"--attention-dropout {config.model.attention_dropout}": config.model.attention_dropout > 0.0,
        f"--hidden-dropout {config.model.hidden_dropout}": config.model.hidden_dropout > 0.0,
    }
    if refused := [flag for flag, is_asked in asked.items() if is_asked]:
        raise ConfigError(f"a peer has no {', '.join(refused)}: it trains with AdamW or Muon, and does nothing else")
