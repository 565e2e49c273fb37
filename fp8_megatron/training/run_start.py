"""Where a run starts, before a model is built.

It takes the lock of its folder, finds what it resumes from, and checks that the machine has the memory and the disk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..assembly import first_weights
from ..checkpoint import run_lock
from ..checkpoint.files import (
    CheckpointError,
    RunLockError,
    candidates,
    is_megatron_checkpoint,
    iteration_folder,
    megatron_iterations,
    named_checkpoint,
    no_checkpoint,
    saved_iterations,
)
from ..checkpoint.loading import LoadOptions, load_checkpoint
from ..checkpoint.megatron_loading import differing_argument, open_megatron_checkpoint
from ..checkpoint.ranks import Ranks
from ..checkpoint.run_lock import RunIdentity, RunLock, own_restart, saved_by
from ..checkpoint.run_state import Progress, Resumable
from ..checkpoint.saved_run import differing_setting
from ..checkpoint.saved_settings import differing_order
from ..checkpoint.saving import CheckpointWriter, Retention
from ..config.folder_checks import load_problem
from ..config.schema import CheckpointConfig, Config
from ..device.device import node_size
from ..device.memory import memory_bytes
from ..errors import UserError
from ..mcore.topology import Topology
from ..outputs import check_free_bytes, free_bytes, writing_to
from ..planning.activations import predict_host_bytes
from ..planning.memory import predict_checkpoint_bytes, predict_memory
from ..reporting.run_log import RunLog
from ..watch.failures import RankWatch
from .graph_choice import GraphChoice
from .stopping import SignalHandler

#: Seconds that a run waits for another one to leave its folder: a process outlives a killed torchrun by up to 30 s.
_WAIT_SECONDS = 60.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointSource:
    """A folder of checkpoints to load from, what to load, and the newest iteration that may be loaded."""

    root: Path
    options: LoadOptions
    newest: int = 0

    def load(self, resumable: Resumable) -> Progress:
        """Load into `resumable`; returns where the checkpoint stands. Called by all ranks.

        Raises:
            CheckpointError: no checkpoint is left, or it cannot be loaded.
        """
        progress = load_checkpoint(self.root, resumable, self.options)
        if progress is None:
            raise CheckpointError(f"the checkpoints under {self.root} were removed while the run started")
        return progress


@dataclass(frozen=True)
class RunStart:
    """What a run starts with; equal on all ranks but for the lock.

    Attributes:
        source: None for a run from scratch.
        lock: on rank 0 of a run with --save.
        continues_save: the run resumes from the folder that it saves into.
    """

    identity: RunIdentity
    source: CheckpointSource | None
    lock: RunLock | None
    continues_save: bool


@dataclass(frozen=True)
class Session:
    """What `Trainer` has set up for one session of a run.

    Attributes:
        output_dir: the folder of logs and metrics.
        log: the run's events; None on all ranks but the first.
        started: when this session began, on the clock of `time.monotonic`.
        replaces_other_run: another run wrote into `output_dir` last.
    """

    output_dir: Path
    topology: Topology
    watch: RankWatch
    device: torch.device
    signals: SignalHandler
    graph_choice: GraphChoice
    start: RunStart
    log: RunLog | None
    started: float
    replaces_other_run: bool


@contextmanager
def starting_run(checkpoint: CheckpointConfig, topology: Topology) -> Iterator[RunStart]:
    """Take the lock of --save, and decide where the run begins. Leaving it releases the lock. Called by all ranks.

    Raises:
        CheckpointError: there is nothing to load, or --save belongs to another run. The same on every rank.
    """
    ranks = Ranks(topology)
    lock: RunLock | None = None
    identity = ranks.first_says(lambda: RunIdentity.drawn(_source_and_run(checkpoint, quiet=True)[1]))
    try:
        if checkpoint.save is not None:
            save = Path(checkpoint.save)
            lock = ranks.first_keeps(lambda: _opened(save, identity))
            _wait_for(lock, save, ranks)
        source, run = ranks.first_says(lambda: _start(checkpoint))
        if run is not None and run != identity.run:  # another run was waited for, and has saved
            identity = RunIdentity(run, identity.launch, identity.token)
        yield RunStart(identity, source, lock, _continues(checkpoint, source))
    finally:
        if lock is not None:
            lock.release()


def check_what_is_loaded(config: Config) -> None:
    """Check, before a model is built, that the settings beside what the run would load are this model's.

    A damaged checkpoint may be passed over later, so a problem of its own is not one here.

    Raises:
        CheckpointError: there is nothing to load, or it is of another model.
    """
    source, _ = _source_and_run(config.checkpoint, quiet=True)
    if source is None:
        return
    folder, finetune = iteration_folder(source.root, source.newest), source.options.finetune
    problem: str | None
    if source.options.first_weights is not None:
        problem = source.options.first_weights.problem_of(folder, config.model)
    elif is_megatron_checkpoint(folder):
        problem = differing_argument(open_megatron_checkpoint(folder), config.model, finetune=finetune)
    else:
        problem = differing_setting(folder, config.model, finetune=finetune)
    if problem is not None:
        raise CheckpointError(problem)


def warn_of_another_order(config: Config, source: CheckpointSource, progress: Progress) -> None:
    """Warn if the samples behind a checkpoint were drawn in another order: some of them come again, others never."""
    differing = differing_order(iteration_folder(source.root, progress.iteration), config)
    if differing and progress.consumed_samples:
        logger.warning(
            "the order of samples is not the checkpoint's (%s): some of its %d samples may come again; give its "
            "values, or --finetune to begin anew",
            ", ".join(differing),
            progress.consumed_samples,
        )


def checkpoint_writer(config: Config, topology: Topology, start: RunStart, iteration: int) -> CheckpointWriter | None:
    """The writer of a run that starts or resumes at `iteration`; None without --save."""
    checkpoint = config.checkpoint
    if checkpoint.save is None:
        return None
    return CheckpointWriter(
        Path(checkpoint.save),
        topology,
        Retention(checkpoint.num_newest_kept, checkpoint.retained_interval),
        in_background=checkpoint.async_save,
        resumed_at=iteration if start.continues_save else 0,
        identity=start.identity,
        lock=start.lock,
    )


def _opened(save: Path, identity: RunIdentity) -> RunLock:
    with writing_to(save, "--save"):
        save.mkdir(parents=True, exist_ok=True)
    return RunLock(save, identity)


def _wait_for(lock: RunLock | None, save: Path, ranks: Ranks) -> None:
    """Try to take the lock until its holder leaves, for up to `_WAIT_SECONDS`.

    Ranks meet after each attempt, so that no collective takes as long as that.
    """
    started = time.monotonic()
    said = False

    def attempt() -> bool:
        nonlocal said
        assert lock is not None
        with writing_to(save, "--save"):
            holder = lock.attempt()
        if holder is None:
            return True
        waited = time.monotonic() - started
        if waited > _WAIT_SECONDS:
            raise RunLockError(
                f"save({save}) is in use by {holder}, which was waited for {waited:.0f} s; stop that run, or give "
                f"another --save"
            )
        if not said:
            logger.warning("%s is in use by %s; waiting up to %.0f s for its end", save, holder, _WAIT_SECONDS)
            said = True
        time.sleep(run_lock.POLL_SECONDS)
        return False

    while not ranks.first_says(attempt):
        pass


def _start(checkpoint: CheckpointConfig) -> tuple[CheckpointSource | None, str | None]:
    """(what to load, whose run it is) of a run that holds the lock of --save."""
    source, run = _source_and_run(checkpoint)
    if checkpoint.save is not None:
        _keep_megatron_checkpoints(Path(checkpoint.save), source if _continues(checkpoint, source) else None)
    may_be_foreign = _continues(checkpoint, source) or checkpoint.allow_foreign_checkpoints
    if checkpoint.save is not None and not may_be_foreign:
        _refuse_foreign(checkpoint, Path(checkpoint.save), run)
    return source, run


def _source_and_run(checkpoint: CheckpointConfig, *, quiet: bool = False) -> tuple[CheckpointSource | None, str | None]:
    """What to load, None for a run from scratch, and the run that it continues, None for a new one.

    Raises:
        CheckpointError: there is nothing to load.
    """
    save = None if checkpoint.save is None else Path(checkpoint.save)
    if save is not None and own_restart(save):
        if not quiet:
            logger.info("started again by torchrun: going on from the newest checkpoint of %s", save)
        source = CheckpointSource(save, LoadOptions(optimizer=checkpoint.save_optim, rng=checkpoint.save_rng))
    elif checkpoint.load is None:
        return _pretrained(checkpoint), None
    else:
        root, iteration = named_checkpoint(Path(checkpoint.load), checkpoint.ckpt_step)
        options = LoadOptions(
            iteration,
            finetune=checkpoint.loads_weights_alone,
            optimizer=checkpoint.load_optim,
            rng=checkpoint.load_rng,
            first_weights=first_weights(checkpoint) if checkpoint.pretrained_checkpoint is None else None,
        )
        source = CheckpointSource(root, options)
    found = candidates(source.root, source.options.iteration) if source.root.is_dir() else []
    if not found and checkpoint.pretrained_checkpoint is not None:
        return _pretrained(checkpoint), None
    if not found:
        _allow_missing(checkpoint, source, quiet=quiet)
        return None, None
    source = replace(source, newest=found[0])
    runs = (saved_by(iteration_folder(source.root, number))[0] for number in found)
    return source, None if source.options.finetune else next((run for run in runs if run is not None), None)


def _pretrained(checkpoint: CheckpointConfig) -> CheckpointSource | None:
    """The first weights of a run without a checkpoint of its own; None without --pretrained-checkpoint.

    Raises:
        CheckpointError: it holds no checkpoint.
    """
    if checkpoint.pretrained_checkpoint is None:
        return None
    root, iteration = named_checkpoint(Path(checkpoint.pretrained_checkpoint))
    found = candidates(root, iteration) if root.is_dir() else []
    if not found:
        raise CheckpointError(no_checkpoint("pretrained_checkpoint", root))
    options = LoadOptions(iteration, finetune=True, first_weights=first_weights(checkpoint))
    return CheckpointSource(root, options, newest=found[0])


def _allow_missing(checkpoint: CheckpointConfig, source: CheckpointSource, *, quiet: bool) -> None:
    """Raise, unless this is the first start of a run that will resume from where it saves."""
    root = source.root
    problem = load_problem(root) or no_checkpoint("load", root)
    if source.options.finetune:
        raise CheckpointError(f"finetune: {problem}")
    if not _continues(checkpoint, source):
        raise CheckpointError(f"{problem}; a run from scratch has no --load, unless it equals --save")
    if checkpoint.exit_on_missing_checkpoint:
        raise CheckpointError(f"exit_on_missing_checkpoint: {problem}")
    if not quiet:
        logger.warning("no checkpoint under %s: starting from scratch", root)


def _continues(checkpoint: CheckpointConfig, source: CheckpointSource | None) -> bool:
    if checkpoint.save is None or source is None or source.options.finetune:
        return False
    return source.root.resolve() == Path(checkpoint.save).resolve()


def _keep_megatron_checkpoints(save: Path, continued: CheckpointSource | None) -> None:
    """Raise if this run would replace a checkpoint of Megatron-LM: it has no name of a run that could tell."""
    reached = 0 if continued is None else continued.newest
    later = [number for number in megatron_iterations(save) if number > reached or continued is None]
    if later:
        raise CheckpointError(
            f"save({save}) holds checkpoints of Megatron-LM ({iteration_folder(save, later[-1]).name}), which this run "
            f"would replace; give another --save"
        )


def _refuse_foreign(checkpoint: CheckpointConfig, save: Path, run: str | None) -> None:
    """Raise if there are checkpoints of another run than `run`, which this one continues."""
    whose = {number: saved_by(iteration_folder(save, number))[0] for number in saved_iterations(save)}
    foreign = [number for number in whose if run is None or whose[number] != run]
    if foreign:
        newest, fix = max(foreign), f"give --load {save} to go on with it, another --save"
        if checkpoint.loads_what_it_saves:  # for its weights alone
            fix = f"drop {checkpoint.weights_alone_flag} to go on with it, give another --save"
        raise CheckpointError(
            f"save({save}) holds checkpoints of another run (newest: {iteration_folder(save, newest).name} of run "
            f"{whose[newest] or 'unknown'}); {fix}, or --allow-foreign-checkpoints to save among them"
        )


def check_memory(config: Config, topology: Topology, device: torch.device, padded_vocab_size: int) -> None:
    """Compare the memory of a GPU, or of a machine without one, with what is certain to be held. For all ranks.

    Weights, gradients and optimizer state are certain. Activations and temporary memory are not counted, but for those
    that leave for the host.

    Raises:
        UserError: they do not fit. The same on every rank.
    """
    num_bytes, where = _state_on(config, topology, device, padded_vocab_size)
    available = memory_bytes(device)
    on_gpu = device.type == "cuda"
    problem = None if num_bytes <= available else _memory_problem(config, num_bytes, where, available, on_gpu=on_gpu)
    problem = problem or _host_problem(config, topology)
    for text in Ranks(topology).everyones(problem):
        if text is not None:
            raise UserError(text)


def _state_on(config: Config, topology: Topology, device: torch.device, padded_vocab_size: int) -> tuple[int, str]:
    """(bytes of state, its place in words) of this rank's GPU, or of all ranks of this machine."""
    stages = range(config.parallel.pipeline_model_parallel_size)

    def state_bytes(stage: int) -> int:
        predicted = predict_memory(config, padded_vocab_size, world_size=topology.world_size, stage=stage)
        return predicted.linear.total + predicted.rest.total

    if device.type == "cuda":
        return state_bytes(topology.pp.rank()), "a GPU"
    # Which stages are on this machine is not known. One machine at least has the mean.
    num_ranks = node_size()
    where = "this machine" if num_ranks == 1 else f"the {num_ranks} ranks of this machine"
    return num_ranks * sum(map(state_bytes, stages)) // len(stages), where


def _host_problem(config: Config, topology: Topology) -> str | None:
    """Why the host cannot take the activations of its ranks; None if it can. Stages count by their mean, as above."""
    count, stages = config.training.cpu_offloading_num_layers, config.pipeline_layout.num_stages
    total = sum(predict_host_bytes(config, world_size=topology.world_size, stage=stage) for stage in range(stages))
    needed, available = node_size() * total // stages, memory_bytes(torch.device("cpu"))
    if needed <= available:
        return None
    return (
        f"activations of cpu_offloading_num_layers({count}) take {needed / 1e9:,.3f} GB of host memory for "
        f"{node_size()} ranks, and this machine has {available / 1e9:,.3f} GB; lower it, or recompute more: "
        f"--recompute-granularity full keeps the least"
    )


def _memory_problem(config: Config, num_bytes: int, where: str, available: int, *, on_gpu: bool) -> str:
    model, parallel = config.model, config.parallel
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    # Ranks of one machine share its memory, so more of them are no help there.
    spread = f"raise tensor_model_parallel_size({tp}) or pipeline_model_parallel_size({pp})"
    return (
        f"weights, gradients and optimizer state take {num_bytes / 1e9:,.3f} GB on {where}, which has "
        f"{available / 1e9:,.3f} GB; lower num_layers({model.num_layers}), hidden_size({model.hidden_size}) or the "
        f"vocabulary, or {spread if on_gpu else 'use a machine with more memory'}"
    )


def check_disk(config: Config, start: RunStart, topology: Topology, padded_vocab_size: int) -> None:
    """Compare the free space of --save with the checkpoints to come; log a warning if not all fit. For all ranks.

    Raises:
        CheckpointError: not even one fits. The same on every rank.
    """
    if config.checkpoint.save is None:
        return
    save = Path(config.checkpoint.save)
    num_bytes = predict_checkpoint_bytes(config, padded_vocab_size)
    Ranks(topology).first_says(lambda: _check_free_disk(save, config, topology.world_size, start, num_bytes))


def _check_free_disk(save: Path, config: Config, world_size: int, start: RunStart, num_bytes: int) -> None:
    check_free_bytes(save, "--save", num_bytes, "one checkpoint")
    checkpoint = config.checkpoint
    reached = start.source.newest if start.continues_save and start.source is not None else 0
    remaining = max(0, config.train_iters(world_size) - reached)
    intervals = [each for each in (checkpoint.save_interval, checkpoint.non_persistent_save_interval) if each]
    count = max(1, sum(-(-remaining // interval) for interval in intervals))
    retained = checkpoint.retained_interval
    if checkpoint.num_newest_kept is not None or retained is not None:
        held = checkpoint.num_newest_kept or 1
        if retained is not None:
            held += remaining // retained
        present = len(saved_iterations(save)) if start.continues_save else 0
        # The oldest is removed when the next one is whole.
        count = min(count, max(1, held + 1 - present))
    free = free_bytes(save)
    if free is not None and free < count * num_bytes:
        logger.warning(
            "%s: %d checkpoints of %.3f GB are to come, its disk has %.3f GB free; free some, or give --keep-last",
            save,
            count,
            num_bytes / 1e9,
            free / 1e9,
        )
