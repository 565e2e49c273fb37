"""The losses of a model on held-out data: of a run, and with --skip-train of a checkpoint alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from ..checkpoint.files import iteration_folder
from ..config.schema import Config
from ..mcore.runtime import seed_everything
from ..mcore.topology import Topology
from ..reporting.metrics import EvalMetrics, eval_line
from ..reporting.metrics_file import json_line
from ..reporting.report import AppendedFile
from ..watch.failures import RankWatch
from .build import TrainingState, build_training_state
from .run_data import RunData, open_run_data
from .run_start import CheckpointSource, check_memory
from .stopping import SignalHandler, StopReason
from .train_step import evaluate

#: In --output-dir, one line a loss of --skip-train.
EVALUATIONS_FILE = "evaluations.jsonl"

logger = logging.getLogger(__name__)


def evaluate_split(
    state: TrainingState,
    data: RunData,
    split: str,
    *,
    consumed_samples: int = 0,
    before_each: Callable[[], None],
    report: Callable[[str, float], None],
    own_stop: Callable[[], StopReason | None],
) -> StopReason | None:
    """Report the losses of a split, by the names of its sets. All ranks call this together.

    Args:
        consumed_samples: see `RunData.evaluations`.
        own_stop: what this rank asks to stop for, if anything. A request of any rank ends the evaluation without the
            losses that are not known yet.

    Returns:
        That request, or None.
    """
    for one in data.evaluations(split, consumed_samples):
        before_each()
        loss, stop = evaluate(state, one.loader, one.num_batches, over_tokens=one.is_whole, own_stop=own_stop)
        if stop is not None:
            if state.topology.rank == 0:
                logger.warning("the evaluation (%s) is given up, because %s", one.name, stop.value)
            return stop
        report(one.name, loss)
    return None


def evaluate_checkpoint(
    config: Config,
    source: CheckpointSource,
    topology: Topology,
    device: torch.device,
    *,
    watch: RankWatch,
    signals: SignalHandler,
) -> None:
    """Log the losses of the validation and the test data, and add them to `EVALUATIONS_FILE` of --output-dir.

    They are those of the first batches, as with --eval-fixed-samples. Nothing is trained, and no file of a run changes.
    All ranks call this together.

    Raises:
        CheckpointError: the checkpoint cannot be loaded.
        ConfigError: any problem with tokenizer or data.
        UserError: the weights do not fit.
    """
    tensor_rank, pipeline_rank = topology.tp.rank(), topology.pp.rank()
    seed_everything(config.training.seed, device, tensor_parallel_rank=tensor_rank, pipeline_rank=pipeline_rank)
    data = open_run_data(config, topology)
    unpadded = data.unpadded_vocab_size
    check_memory(config, topology, device, data.padded_vocab_size)
    state = build_training_state(config, data.padded_vocab_size, topology, device, unpadded_vocab_size=unpadded)
    reached = source.load(state.resumable(unpadded)).iteration
    # A damaged one is passed over. With --finetune the iteration is 0.
    checkpoint = iteration_folder(source.root, reached or source.newest)
    is_writer = topology.rank == 0
    if is_writer:
        logger.info("evaluating %s, nothing is trained", checkpoint)

    def report(name: str, loss: float) -> None:
        if is_writer:
            _report(config, checkpoint, EvalMetrics.from_loss(reached, name, loss))

    stop = None
    for split in ("valid", "test"):
        if stop is None:
            stop = evaluate_split(
                *(state, data, split),
                before_each=lambda: watch.at(reached, "evaluating"),
                report=report,
                own_stop=lambda: StopReason.SIGNAL if signals.received() else None,
            )


def _report(config: Config, checkpoint: Path, metrics: EvalMetrics) -> None:
    logger.info("%s", eval_line(metrics, total_iterations=None))
    if config.logging.output_dir is None:
        return
    row = {"checkpoint": str(checkpoint), "precision": config.precision.level, **asdict(metrics)}
    lines = AppendedFile(Path(config.logging.output_dir) / EVALUATIONS_FILE)
    lines.append(json_line(row).encode())
    lines.close()
