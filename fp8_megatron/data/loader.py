"""Batches: which samples a data-parallel rank reads, in which order, and where it starts after a resume."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import signal
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Literal

import psutil
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from ..errors import UserError
from .document_bounds import CU_SEQLENS, NUM_TOKENS, Bounds, SequencePart
from .pools import freeing_nothing_of_the_parent
from .time_limits import alarm

#: Keys of a sample (each tensor [seq]) and a batch (each [micro_batch, seq]). loss_mask is float32, the others int64.
#: A batch with documents also has `CU_SEQLENS`, one of parts of sequences `NUM_TOKENS`.
SAMPLE_KEYS = ("tokens", "labels", "loss_mask", "position_ids")

#: Seconds without a batch that are worth a line.
_TELL_AFTER_SECONDS = 10.0
#: What a batch may take of a collective's timeout. Other ranks wait in a collective: this rank knows why, and is first.
_SHARE_OF_TIMEOUT = 0.8

logger = logging.getLogger(__name__)


class MicroBatchSampler(Sampler[list[int]]):
    """Indices of one rank's micro-batches, in Megatron's order.

    Global micro-step k covers the next ``micro_batch_size · data_parallel_size`` samples, of which rank r takes the
    r-th run of `micro_batch_size`. So a step's set of samples depends only on the global batch, not on how it is split
    into ranks and micro-batches, and `consumed_samples` is enough to resume.

    Args:
        num_samples: length of the dataset.
        micro_batch_size: samples of one rank in one micro-step.
        data_parallel_rank, data_parallel_size: of this rank.
        consumed_samples: samples that all ranks together have already seen.
        cycle: start over at the end instead of stopping before an incomplete micro-step.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        consumed_samples: int = 0,
        cycle: bool = False,
    ):
        assert 0 <= data_parallel_rank < data_parallel_size, (data_parallel_rank, data_parallel_size)
        self._num_samples = num_samples
        self._micro_batch_size = micro_batch_size
        self._stride = micro_batch_size * data_parallel_size
        self._offset = micro_batch_size * data_parallel_rank
        self._consumed_samples = consumed_samples
        self._cycle = cycle
        if num_samples == 0:
            raise ValueError("the dataset holds no samples: give more data")
        if not cycle and consumed_samples + self._stride > num_samples:
            raise ValueError(
                f"consumed_samples({consumed_samples}) + micro_batch_size({micro_batch_size}) × "
                f"data_parallel_size({data_parallel_size}) exceed the {num_samples} samples of the dataset: nothing is "
                f"left to train on; raise --train-iters, or start without the data position (--finetune)"
            )

    def __iter__(self) -> Iterator[list[int]]:
        start = self._consumed_samples
        while self._cycle or start + self._stride <= self._num_samples:
            first = start + self._offset
            yield [index % self._num_samples for index in range(first, first + self._micro_batch_size)]
            start += self._stride


class ShuffledSampler(Sampler[list[int]]):
    """Indices of one rank's micro-batches where every pass over the dataset has an order of its own (cyclic).

    The order is that of Megatron's ``MegatronPretrainingRandomSampler``: torch's `randperm` with the number of the pass
    as its seed. It never ends.

    Args:
        num_samples, micro_batch_size, data_parallel_rank, data_parallel_size, consumed_samples: see
            `MicroBatchSampler`.
        sharded: each rank shuffles a part of the dataset of its own; False: all ranks share one order, of which each
            takes every `data_parallel_size`-th sample.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        consumed_samples: int = 0,
        sharded: bool = True,
    ):
        assert 0 <= data_parallel_rank < data_parallel_size, (data_parallel_rank, data_parallel_size)
        self._micro_batch_size = micro_batch_size
        self._rank, self._num_ranks = data_parallel_rank, data_parallel_size
        self._stride = micro_batch_size * data_parallel_size
        self._num_samples = num_samples
        self._consumed_samples = consumed_samples
        self._sharded = sharded
        if num_samples < self._stride:
            raise ValueError(
                f"the dataset's {num_samples} samples are fewer than micro_batch_size({micro_batch_size}) × "
                f"data_parallel_size({data_parallel_size}), which a pass of --dataloader-type cyclic takes; give more "
                f"data"
            )

    def __iter__(self) -> Iterator[list[int]]:
        samples_per_pass = self._num_samples // self._stride * self._stride
        number, consumed = divmod(self._consumed_samples, samples_per_pass)
        while True:
            # After another global batch it may stand inside of a micro-step, which is read again from its start: a
            # later resume counts whole micro-steps, too.
            order = self._order(number)[consumed // self._stride * self._micro_batch_size :]
            for start in range(0, len(order) - self._micro_batch_size + 1, self._micro_batch_size):
                yield order[start : start + self._micro_batch_size]
            number, consumed = number + 1, 0

    def _order(self, number: int) -> list[int]:
        """This rank's samples of a pass."""
        generator = torch.Generator().manual_seed(number)
        if self._sharded:
            size = self._num_samples // self._stride * self._micro_batch_size
            return (torch.randperm(size, generator=generator) + self._rank * size).tolist()
        size = self._num_samples // self._micro_batch_size * self._micro_batch_size
        own = torch.randperm(size, generator=generator)[self._rank :: self._num_ranks]
        return own[: self._num_samples // self._stride * self._micro_batch_size].tolist()


class BatchLoader(Iterator[dict[str, torch.Tensor]]):
    """Batches of a DataLoader. Ends its processes when it is closed or collected, or when this process exits.

    The processes ignore SIGTERM (`_ignore_signals`), so without this class the exit would wait for them forever.

    Args:
        loader: gives the batches.
        name: what they are of, for errors.
        timeout_seconds: --distributed-timeout-minutes, for a batch; None: no limit.
    """

    def __init__(self, loader: DataLoader, *, name: str = "data", timeout_seconds: float | None = None):
        self._name, self._timeout_seconds = name, timeout_seconds
        before = set(multiprocessing.active_children())
        with freeing_nothing_of_the_parent():
            self._batches: Iterator[dict[str, torch.Tensor]] | None = iter(loader)
        self._processes = set(multiprocessing.active_children()) - before
        if self._processes:
            atexit.register(_close, weakref.ref(self))

    def __next__(self) -> dict[str, torch.Tensor]:
        if self._batches is None:
            raise StopIteration
        if self._timeout_seconds is None:
            return next(self._batches)
        first = min(_TELL_AFTER_SECONDS, self._timeout_seconds / 6)
        left = iter([_SHARE_OF_TIMEOUT * self._timeout_seconds - first])
        try:
            with alarm(first, lambda: self._overdue(first, next(left, None))):
                return next(self._batches)
        except UserError:
            self._kill()
            raise

    def _overdue(self, waited: float, left: float | None) -> float:
        """Say that no batch has come for so many seconds; how long to wait on.

        Raises:
            UserError: no time is left.
        """
        who = "this process reads it"
        if self._processes:
            who = "data worker " + ", ".join(f"{pid} ({state})" for pid, state in sorted(self._states().items()))
        minutes = (self._timeout_seconds or 0) / 60
        if left is None:
            raise UserError(
                f"no batch of {self._name} has come within {_SHARE_OF_TIMEOUT:.0%} of --distributed-timeout-minutes "
                f"{minutes:g}: {who}; look at the file system of the data, or raise the timeout"
            )
        logger.warning("no batch of %s for %.0f s: %s; the run ends in %.0f s", self._name, waited, who, left)
        return left

    def _states(self) -> dict[int, str]:
        """The processes by number, and what the system says that they do: "stopped", "disk-sleep" and the like."""
        states = {}
        for process in self._processes:
            with suppress(psutil.Error):
                states[process.pid or 0] = psutil.Process(process.pid).status()
        return states

    def _kill(self) -> None:
        """End the processes before torch looks for them: it would wait for one that is stopped, or raise."""
        handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for process in self._processes:
            process.kill()
            process.join()
        signal.signal(signal.SIGCHLD, handler)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """End the loader processes. There are no batches afterwards."""
        self._batches = None  # its finaliser asks the processes to end, and waits for a while
        for process in self._processes:
            if process.is_alive():
                process.kill()
        self._processes = set()


def build_loader(
    dataset: Dataset,
    *,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    num_workers: int = 0,
    consumed_samples: int = 0,
    cycle: bool = False,
    shuffles: Literal["sharded", "whole"] | None = None,
    documents: Bounds | None = None,
    part: SequencePart | None = None,
    name: str = "data",
    timeout_seconds: float | None = None,
) -> BatchLoader:
    """One rank's micro-batches on the CPU (pinned if there is a GPU), in the order of `MicroBatchSampler`.

    Takes the sampler's arguments and:
        dataset: samples with `SAMPLE_KEYS`, already shuffled (GPTDataset is).
        shuffles: shuffle every pass over the dataset, each rank its part or all the whole (`ShuffledSampler`).
        num_workers: loader processes; 0 loads in this process. It does not change the batches.
        documents: finds the documents that attention stays within; None: attention crosses documents.
        part: this rank's tokens of each sequence; None: all of them.
        name, timeout_seconds: see `BatchLoader`.

    Raises:
        ValueError: there are no samples after `consumed_samples`.
    """
    place: dict[str, int] = {
        "micro_batch_size": micro_batch_size,
        "data_parallel_rank": data_parallel_rank,
        "data_parallel_size": data_parallel_size,
        "consumed_samples": consumed_samples,
    }
    num_samples = len(dataset)  # type: ignore[arg-type]  # map-style datasets have one; their base class declares none
    sampler: Sampler[list[int]] = (
        MicroBatchSampler(num_samples, cycle=cycle, **place)
        if shuffles is None
        else ShuffledSampler(num_samples, sharded=shuffles == "sharded", **place)
    )
    loader = DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=num_workers,
        collate_fn=partial(_stack, documents=documents, part=part),
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=_ignore_signals if num_workers else None,
        # The loader draws a seed for its workers. It must not change the global generator, which training uses.
        generator=torch.Generator(),
    )
    return BatchLoader(loader, name=name, timeout_seconds=timeout_seconds)


def _stack(
    samples: Sequence[dict[str, torch.Tensor]],
    documents: Bounds | None = None,
    part: SequencePart | None = None,
) -> dict[str, torch.Tensor]:
    batch = {key: torch.stack([sample[key] for sample in samples]) for key in SAMPLE_KEYS}
    if documents is not None:
        batch[CU_SEQLENS] = documents.of(batch[documents.key])
    return batch if part is None or part.is_whole else part_of(batch, part)


def part_of(batch: dict[str, torch.Tensor], part: SequencePart) -> dict[str, torch.Tensor]:
    """A rank's tokens of a batch of whole sequences, and with `NUM_TOKENS` how many count over all ranks.

    Documents stay those of the whole sequences.
    """
    num_tokens = batch["loss_mask"].sum(dtype=torch.float32).view(1)
    own = {key: tensor if key == CU_SEQLENS else part.of(tensor, dim=1) for key, tensor in batch.items()}
    return own | {NUM_TOKENS: num_tokens}


def _ignore_signals(_worker: int) -> None:
    """Ignore the signals that schedulers and terminals send to every process of a job.

    The trainer needs batches until it has finished the step and saved. Then it ends the loader process itself.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _close(loader: weakref.ref[BatchLoader]) -> None:
    if (alive := loader()) is not None:
        alive.close()
