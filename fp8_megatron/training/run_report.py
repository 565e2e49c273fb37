"""What a run reports of itself: its settings, its memory, the figures of each step, the loss curve at its end."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path

import torch

from ..checkpoint.run_state import Progress
from ..config.io import config_text, format_changes
from ..config.learning_rate import schedule_notes
from ..config.schema import Config
from ..mcore.topology import Topology
from ..planning.memory import predict_memory
from ..reporting.cast_statistics import HealthSample
from ..reporting.flops import model_flops_per_token, peak_flops
from ..reporting.memory_report import memory_table
from ..reporting.metrics import EvalMetrics, MetricsLogger, StepMetrics
from ..reporting.metrics_file import METRICS_FILE
from ..reporting.plot import plot_losses
from ..reporting.report import Report, write_report
from .build import TrainingState, measured_storage
from .step_results import StepResult

logger = logging.getLogger(__name__)


def log_settings(config: Config, world_size: int) -> None:
    """Log the settings that differ from their defaults, and a line for each that another one replaces or cuts."""
    logger.info("settings that differ from their defaults (config.yaml has all)\n%s", format_changes(config))
    if config.precision.is_fp8:
        logger.info("FP8: %s", config.fp8_summary)
    for note in schedule_notes(config, world_size):
        logger.warning("%s", note)
    batches = config.batch_schedule(world_size)
    if not batches.is_constant:
        logger.info(
            "the global batch grows from %d to %d samples, which sample %d reaches%s",
            batches.batch_size(0),
            batches.largest,
            batches.phases[-1][0],
            "; Megatron-LM 0.20 no longer reads --rampup-batch-size" if config.training.rampup_batch_size else "",
        )


class RunReport:
    """The reports of a run. Every rank makes one; the first rank writes.

    Args:
        resume_iteration: of the checkpoint that the run goes on from; 0 for none.
        total_iterations: the step at which the run ends.
        replaces_other_run: another run wrote into `output_dir` last.
    """

    def __init__(
        self,
        config: Config,
        output_dir: Path,
        topology: Topology,
        device: torch.device,
        *,
        padded_vocab_size: int,
        resume_iteration: int,
        total_iterations: int,
        replaces_other_run: bool = False,
    ) -> None:
        self._config = config
        self._output_dir = output_dir
        self._topology = topology
        self._padded_vocab_size = padded_vocab_size
        self._is_writer = topology.rank == 0
        self._flops_per_token = model_flops_per_token(config.model, causal=False, padded_vocab_size=padded_vocab_size)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self._peak_flops = peak_flops(name, config.precision.precision)
        self._metrics = MetricsLogger(
            config.logging,
            output_dir,
            is_writer=self._is_writer,
            total_iterations=total_iterations,
            batches=config.batch_schedule(topology.world_size),
            left_out=config.training.left_out,
            resume_iteration=resume_iteration,
            replaces_other_run=replaces_other_run,
            peak_flops=self._peak_flops,
            run_config=asdict(config),
        )

    def start(self, state: TrainingState) -> None:
        """Write ``config.yaml`` and the memory table."""
        if not self._is_writer:
            return
        write_report(self._output_dir / "config.yaml", config_text(self._config).encode())
        memory = memory_table(
            measured_storage(state),
            self._config.precision.formats,
            predicted=predict_memory(self._config, self._padded_vocab_size, world_size=self._topology.world_size),
            level=self._config.precision.level,
            num_optimizer_shards=self._topology.replicas.size,
        )
        write_report(self._output_dir / "memory.txt", f"{memory}\n".encode())
        logger.info("%s", memory)

    def step(self, result: StepResult, progress: Progress) -> None:
        """Report one step.

        Args:
            progress: after the step.
        """
        model, world_size = self._config.model, self._topology.world_size
        tokens = result.batch_size * model.seq_length
        rate = tokens / result.step_seconds / world_size
        flops = rate * self._flops_per_token
        self._metrics.log_step(
            StepMetrics(
                **result.figures.as_dict(),
                iteration=result.iteration,
                learning_rate=result.learning_rate,
                tokens_per_second_per_gpu=rate,
                tflops_per_gpu=flops / 1e12,
                mfu=None if self._peak_flops is None else flops / self._peak_flops,
                step_seconds=result.step_seconds,
                skipped_steps=progress.skipped_steps,
                global_batch_size=result.batch_size,
                consumed_samples=progress.consumed_samples,
                consumed_tokens=progress.consumed_samples * model.seq_length,
            )
        )

    def health(self, sample: HealthSample) -> None:
        """Report the casts of a sampled step."""
        self._metrics.log_health(sample)

    def evaluation(self, iteration: int, split: str, loss: float) -> None:
        """Report the loss of a held-out split."""
        self._metrics.log_eval(EvalMetrics.from_loss(iteration, split, loss))

    def finish(self, reached: int) -> None:
        """Close the metrics, draw the loss curve, and log a summary.

        Args:
            reached: the iteration that the run stands at.
        """
        if not self._is_writer:
            return
        summary = self._metrics.summary(reached=reached)
        self._metrics.close()
        model = self._config.model
        title = f"GPT, {model.num_layers} layers × {model.hidden_size}, {self._config.precision.level}"
        figure = self._output_dir / "loss.png"
        with Report(figure).writing():
            plot_losses(self._output_dir / METRICS_FILE, figure, title=title)
        logger.info("%s", summary)

    def close(self) -> None:
        """Close the metrics. A run that failed has no summary."""
        self._metrics.close()
