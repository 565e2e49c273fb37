"""--skip-train: the losses of a checkpoint on the held-out data. Nothing is trained, and no run's folder is changed."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path

import torch

from ..checkpoint.files import CheckpointError, iteration_folder
from ..checkpoint.loading import load_checkpoint
from ..checkpoint.run_state import Resumable
from ..config.schema import Config
from ..mcore.runtime import seed_everything
from ..mcore.topology import Topology
from ..outputs import writing_to
from ..reporting.metrics import EvalMetrics, eval_line
from ..reporting.metrics_file import json_line
from ..watch.failures import RankWatch
from .build import build_training_state
from .run_data import open_run_data
from .run_start import Source
from .stopping import SignalHandler, StopReason
from .train_step import evaluate

#: In --output-dir, one line a loss.
EVALUATIONS_FILE = "evaluations.jsonl"

logger = logging.getLogger(__name__)


def evaluate_checkpoint(
    config: Config,
    source: Source | None,
    topology: Topology,
    device: torch.device,
    *,
    watch: RankWatch,
    signals: SignalHandler,
) -> None:
    """Log the losses of the validation and the test data, and add them to `EVALUATIONS_FILE` of --output-dir.

    They are those of the validation of a training run that stands at this checkpoint. All ranks call this together.

    Args:
        source: what to load.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be loaded.
        ConfigError: any problem with tokenizer or data.
    """
    if source is None:
        raise CheckpointError("skip_train evaluates a checkpoint; give --load")
    seed_everything(
        config.training.seed, device, tensor_parallel_rank=topology.tp.rank(), pipeline_rank=topology.pp.rank()
    )
    data = open_run_data(config, topology)
    state = build_training_state(
        config, data.vocab_size, topology, device, unpadded_vocab_size=data.unpadded_vocab_size
    )
    resumable = Resumable(
        config,
        state.optimizer,
        state.histories,
        topology,
        device,
        vocab_size=data.unpadded_vocab_size,
        padded_vocab_size=data.vocab_size,
    )
    progress = load_checkpoint(source.root, resumable, source.options)
    if progress is None:
        raise CheckpointError(f"the checkpoints under {source.root} were removed while the run started")
    is_writer = topology.rank == 0
    # A damaged one is passed over. With --finetune the iteration is 0.
    folder = iteration_folder(source.root, progress.iteration or source.newest)
    if is_writer:
        logger.info("evaluating %s, nothing is trained", folder)
    for split in ("valid", "test"):
        for one in data.evaluations(split):
            watch.at(progress.iteration, "evaluating")
            loss, stop = evaluate(
                state,
                one.loader,
                one.num_batches,
                over_tokens=one.is_whole,
                own_stop=lambda: StopReason.SIGNAL if signals.received() else None,
            )
            if stop is not None:
                if is_writer:
                    logger.warning("the evaluation (%s) is given up, because %s", one.name, stop.value)
                return
            if is_writer:
                _report(config, folder, EvalMetrics.from_loss(progress.iteration, one.name, loss))


def _report(config: Config, checkpoint: Path, metrics: EvalMetrics) -> None:
    logger.info("%s", eval_line(metrics, total_iterations=None))
    if config.logging.output_dir is None:
        return
    folder = Path(config.logging.output_dir)
    with writing_to(folder, "--output-dir"):
        folder.mkdir(parents=True, exist_ok=True)
        record = {"checkpoint": str(checkpoint), "precision": config.precision.level, **asdict(metrics)}
        with (folder / EVALUATIONS_FILE).open("a") as lines:
            lines.write(json_line(record))
