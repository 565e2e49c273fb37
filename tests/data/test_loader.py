import atexit
import gc
import multiprocessing
import os
import re
import signal
import threading
import time
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from fp8_megatron.data.document_bounds import NUM_TOKENS, SequencePart
from fp8_megatron.data.loader import SAMPLE_KEYS, build_loader
from fp8_megatron.errors import UserError
from tests.harness.forked import OfThisProcess


class Numbered(Dataset):
    """Sample i is filled with i."""

    def __init__(self, num_samples: int):
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {key: torch.full((4,), index) for key in SAMPLE_KEYS} | {"dataset_id": index}


class ProcessId(Numbered):
    """Sample i is filled with the id of the process that read it."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {key: torch.full((4,), os.getpid()) for key in SAMPLE_KEYS}


class Forgetful(Numbered):
    """Lets go of its parent's object where it is read."""

    def __init__(self, num_samples: int):
        super().__init__(num_samples)
        self.of_parent: OfThisProcess | None = OfThisProcess()

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.of_parent = None
        gc.collect()
        return super().__getitem__(index)


def indices(num_samples: int = 64, *, micro: int, rank: int = 0, size: int = 1, **options: Any) -> list[list[int]]:
    """Sample numbers of each micro-batch of a rank (32 micro-batches at most)."""
    loader = build_loader(
        Numbered(num_samples), micro_batch_size=micro, data_parallel_rank=rank, data_parallel_size=size, **options
    )
    return [batch["tokens"][:, 0].tolist() for batch in islice(loader, 32)]


def test_batches_hold_the_sample_keys_stacked():
    batch = next(build_loader(Numbered(8), micro_batch_size=3, data_parallel_rank=0, data_parallel_size=1))
    assert tuple(batch) == SAMPLE_KEYS
    assert {tensor.shape for tensor in batch.values()} == {(3, 4)}


def test_order_is_megatrons():
    assert indices(13, micro=2, rank=1, size=3) == [[2, 3], [8, 9]]  # samples 12 makes no whole micro-step


@pytest.mark.parametrize(("size", "micro"), [(2, 2), (4, 1), (2, 1)])
def test_a_step_has_the_same_samples_on_any_number_of_ranks(size, micro):
    global_batch = 8
    for step in range(64 // global_batch):
        seen = []
        for rank in range(size):
            per_step = global_batch // (micro * size)
            batches = indices(micro=micro, rank=rank, size=size)[step * per_step : (step + 1) * per_step]
            seen += [index for batch in batches for index in batch]
        assert sorted(seen) == list(range(step * global_batch, (step + 1) * global_batch))


@pytest.mark.parametrize("cycle", [False, True])
def test_resume_goes_on_where_it_stopped(cycle):
    whole = indices(20, micro=2, rank=1, size=2, cycle=cycle)
    for micro_steps in range(4):
        resumed = indices(20, micro=2, rank=1, size=2, cycle=cycle, consumed_samples=4 * micro_steps)
        length = min(len(whole) - micro_steps, len(resumed))
        assert length > 0 and resumed[:length] == whole[micro_steps:][:length]


def test_resume_under_another_layout_leaves_out_and_repeats_nothing():
    first = indices(micro=4, rank=0, size=1)[:4]
    rest = [batch for rank in range(4) for batch in indices(micro=1, rank=rank, size=4, consumed_samples=16)]
    assert sorted(index for batch in first + rest for index in batch) == list(range(64))


def test_validation_starts_again_at_the_end():
    assert indices(3, micro=2, cycle=True)[:4] == [[0, 1], [2, 0], [1, 2], [0, 1]]


def test_nothing_left_is_an_error_with_its_numbers():
    with pytest.raises(ValueError, match=r"consumed_samples\(62\) \+ micro_batch_size\(2\) × data_parallel_size\(2\)"):
        indices(micro=2, size=2, consumed_samples=62)
    with pytest.raises(ValueError, match="holds no samples"):
        indices(0, micro=1, cycle=True)


def test_worker_processes_change_neither_batches_nor_the_global_generator():
    state = torch.get_rng_state()
    assert indices(micro=2, rank=1, size=2, num_workers=2) == indices(micro=2, rank=1, size=2)
    assert torch.equal(torch.get_rng_state(), state)


def test_loader_processes_free_nothing_that_their_parent_made():
    dataset = Forgetful(4)
    OfThisProcess()
    loader = build_loader(dataset, micro_batch_size=1, data_parallel_rank=0, data_parallel_size=1, num_workers=1)
    assert [int(batch["tokens"][0, 0]) for batch in loader] == [0, 1, 2, 3]
    assert gc.get_freeze_count() == 0


def test_loader_process_outlives_the_signals_of_a_job_that_is_being_stopped():
    loader = build_loader(
        ProcessId(1000), micro_batch_size=1, data_parallel_rank=0, data_parallel_size=1, num_workers=1
    )
    worker = int(next(loader)["tokens"][0, 0])
    assert worker != os.getpid()
    os.kill(worker, signal.SIGINT)
    os.kill(worker, signal.SIGTERM)
    pids = {int(batch["tokens"][0, 0]) for batch in islice(loader, 200)}
    assert pids == {worker}


def test_loader_processes_end_when_closed_and_when_the_trainer_exits():
    loader = build_loader(
        ProcessId(1000), micro_batch_size=1, data_parallel_rank=0, data_parallel_size=1, num_workers=2
    )
    workers = {int(next(loader)["tokens"][0, 0]) for _ in range(4)}
    loader.close()
    assert len(workers) == 2 and not any(is_running(worker) for worker in workers)
    assert next(loader, None) is None
    reader, writer = multiprocessing.Pipe()
    trainer = multiprocessing.get_context("fork").Process(target=exit_with_an_open_loader, args=(writer,))
    trainer.start()
    pid = reader.recv()
    trainer.join(timeout=20)
    trainer.kill()
    assert trainer.exitcode == 0 and not is_running(pid)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_stopped_loader_process_is_named_in_seconds_and_ends_the_run_in_time(caplog, device):
    """On a GPU's machine a thread pins the batches, and waits for the process too."""
    torch.zeros(1, device=device)
    loader = build_loader(
        ProcessId(1000),
        micro_batch_size=1,
        data_parallel_rank=0,
        data_parallel_size=1,
        num_workers=2,
        name="train data corpus",
        timeout_seconds=3.0,
    )
    workers = {int(next(loader)["tokens"][0, 0]) for _ in range(4)}
    stopped = min(workers)
    os.kill(stopped, signal.SIGSTOP)
    started = time.monotonic()
    fix = r"look at the file system of the data, or raise the timeout"
    with pytest.raises(
        UserError, match=rf"no batch of train data corpus has .* 80% .*-minutes 0.05: data worker .*; {fix}"
    ):
        list(islice(loader, 100))
    assert 2.4 <= time.monotonic() - started < 10
    (line,) = [record.getMessage() for record in caplog.records]
    assert re.search(rf"train data corpus for 0 s: data worker .*{stopped} \(stopped\).*; the run ends in 2 s", line)
    loader.close()
    assert time.monotonic() - started < 10 and not any(is_running(worker) for worker in workers)


def test_a_loader_process_that_goes_on_again_gives_the_same_batches(caplog):
    """Also one that stops after it has handed out a batch, whose memory it still holds."""
    others = set(multiprocessing.active_children())
    loader = build_loader(
        Numbered(1000), micro_batch_size=1, data_parallel_rank=0, data_parallel_size=1, num_workers=1, timeout_seconds=6
    )
    next(loader)
    (worker,) = (process.pid for process in set(multiprocessing.active_children()) - others)
    os.kill(worker, signal.SIGSTOP)
    goes_on = threading.Timer(2.0, os.kill, (worker, signal.SIGCONT))
    goes_on.start()
    assert [int(batch["labels"][0, 0]) for batch in islice(loader, 20)] == list(range(1, 21))
    goes_on.join()
    assert "no batch of data for 1 s" in caplog.text
    loader.close()


def exit_with_an_open_loader(writer: Connection) -> None:
    loader = build_loader(
        ProcessId(1000), micro_batch_size=1, data_parallel_rank=0, data_parallel_size=1, num_workers=1
    )
    writer.send(int(next(loader)["tokens"][0, 0]))
    atexit._run_exitfuncs()  # a forked child leaves without them


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def megatrons_cyclic_order(
    num_samples: int, micro: int, rank: int, size: int, consumed: int, sharded: bool
) -> list[int]:
    """One rank's samples up to the end of a pass, by the rule of Megatron's MegatronPretrainingRandomSampler."""
    step = micro * size
    number, consumed = divmod(consumed, num_samples // step * step)
    generator = torch.Generator()
    generator.manual_seed(number)
    if sharded:
        part = num_samples // step * micro
        order = torch.randperm(part, generator=generator).tolist()
        return [rank * part + index for index in order[consumed // size :]]
    order = torch.randperm(num_samples // micro * micro, generator=generator).tolist()
    return order[consumed:][rank::size]


@pytest.mark.parametrize("shuffles", ["sharded", "whole"])
@pytest.mark.parametrize(("num_samples", "micro", "size"), [(24, 2, 3), (29, 2, 3), (20, 4, 1), (17, 1, 4)])
def test_cyclic_is_megatrons_from_any_place(num_samples: int, micro: int, size: int, shuffles: str) -> None:
    """In the first pass, in the middle of the second, and at the border between two."""
    per_pass = num_samples // (micro * size) * micro * size
    for consumed in (0, micro * size, per_pass, per_pass + 2 * micro * size):
        for rank in range(size):
            options = {"consumed_samples": consumed, "shuffles": shuffles}
            batches = indices(num_samples, micro=micro, rank=rank, size=size, **options)
            theirs = megatrons_cyclic_order(num_samples, micro, rank, size, consumed, shuffles == "sharded")
            whole = (per_pass - consumed % per_pass) // size  # Megatron's ranks fall out of step after these
            flat = [index for batch in batches for index in batch]
            assert flat[:whole] == theirs[:whole] and len(batches) == 32
            following = megatrons_cyclic_order(
                num_samples, micro, rank, size, consumed - consumed % per_pass + per_pass, shuffles == "sharded"
            )
            assert flat[whole : whole + micro] == following[:micro]


def test_a_cyclic_pass_has_no_sample_twice_and_ranks_share_none() -> None:
    passes = [indices(24, micro=2, rank=rank, size=3, shuffles="whole")[:4] for rank in range(3)]
    assert sorted(index for batches in passes for batch in batches for index in batch) == list(range(24))
    with pytest.raises(ValueError, match="the dataset's 5 samples are fewer than micro_batch_size"):
        indices(5, micro=2, size=3, shuffles="sharded")


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_share_sequences_read_chunks_of_the_same_samples(rank: int) -> None:
    """Two of four chunks each, one early and one late; masks tell how many tokens of whole sequences count."""
    row = torch.arange(8)
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0])
    samples = [{"tokens": row + 10 * n, "labels": row + 1, "loss_mask": mask, "position_ids": row} for n in range(2)]
    loader = build_loader(
        samples,  # type: ignore[arg-type]
        micro_batch_size=2,
        data_parallel_rank=0,
        data_parallel_size=1,
        part=SequencePart(rank, 2),
    )
    batch = next(loader)
    places = torch.tensor([[0, 1, 6, 7], [2, 3, 4, 5]][rank])
    assert torch.equal(batch["tokens"], torch.stack([places, 10 + places]))
    assert torch.equal(batch["position_ids"][0], places) and torch.equal(batch["labels"][0], places + 1)
    assert torch.equal(batch["loss_mask"][1], mask[places])
    assert batch[NUM_TOKENS].tolist() == [10.0]
