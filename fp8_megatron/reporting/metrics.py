"""Metrics of steps and validations, and their logger: console, metrics.jsonl, TensorBoard and W&B."""

from __future__ import annotations

import logging
import math
import time
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from statistics import fmean, median
from typing import Any, Self

from ..config.batch_schedule import BatchSchedule
from ..config.schema import LoggingConfig
from .cast_statistics import HealthSample
from .flops import FLOPS_CONVENTION
from .layer_report import LayerReport
from .metrics_file import HEALTH_FILE, METRICS_FILE, MetricsFile, split_in_words
from .metrics_sinks import ProgressBar, ScalarSink, open_sinks, wants_progress_bar
from .step_figures import StepFigures, reported

logger = logging.getLogger(__name__)

#: The final train loss is the mean over this many last steps; the ETA uses their mean duration.
_FINAL_LOSS_STEPS = 10
_ETA_STEPS = 50


@dataclass(frozen=True, kw_only=True)
class StepMetrics(StepFigures):
    """One optimizer step: its figures, and what the host adds. Equal on all ranks."""

    iteration: int = reported(None)
    """1 for the first step."""
    learning_rate: float = reported("train/learning_rate")
    tokens_per_second_per_gpu: float = reported("throughput/tokens_per_second_per_gpu")
    """Positions of all samples a second, as the device computes them: with --sft the padding of samples is counted."""
    tflops_per_gpu: float = reported("throughput/tflops_per_gpu")
    """Model TFLOP/s with full attention (Megatron's convention)."""
    mfu: float | None = reported("throughput/mfu")
    """`tflops_per_gpu` over the device's dense peak, 0 to 1; None if the peak is unknown."""
    step_seconds: float = reported("throughput/step_seconds")
    skipped_steps: int = reported("train/skipped_steps")
    """Steps skipped so far in the whole run."""
    global_batch_size: int = reported("train/global_batch_size")
    """Samples of the step."""
    consumed_samples: int = reported("train/consumed_samples")
    consumed_tokens: int = reported("train/consumed_tokens")
    """Positions of `consumed_samples`, padding included."""

    def row(self) -> dict[str, Any]:
        """The step's line in metrics.jsonl."""
        reported_fields = [field.name for field in fields(self) if field.metadata["tag"] is not None]
        return {"kind": "train", "iteration": self.iteration} | {name: getattr(self, name) for name in reported_fields}

    def scalars(self) -> dict[str, float]:
        """Tag → value, for TensorBoard and W&B, without figures that are None."""
        tagged = ((field.metadata["tag"], getattr(self, field.name)) for field in fields(self))
        return {tag: value for tag, value in tagged if tag is not None and value is not None}


@dataclass(frozen=True)
class EvalMetrics:
    """One pass over held-out data."""

    iteration: int
    split: str
    """``valid`` or ``test``; ``valid-<name>`` of one of several validation sets."""
    loss: float
    """Mean, nats per token."""
    perplexity: float
    """``exp(loss)``; infinite if that overflows."""

    @classmethod
    def from_loss(cls, iteration: int, split: str, loss: float) -> EvalMetrics:
        """The metrics of a loss, with the perplexity computed."""
        return cls(iteration, split, loss, math.exp(loss) if not loss > 709 else math.inf)


class MetricsLogger:
    """Logs steps and validations on the writing rank. On other ranks, every call does nothing."""

    def __init__(
        self,
        config: LoggingConfig,
        output_dir: Path,
        *,
        is_writer: bool,
        total_iterations: int,
        batches: BatchSchedule | None = None,
        left_out: Collection[int] = (),
        resume_iteration: int = 0,
        replaces_other_run: bool = False,
        layer_files: Collection[str] = (),
        peak_flops: float | None = None,
        run_config: Mapping[str, Any] | None = None,
    ) -> None:
        """Open all outputs.

        Args:
            batches: samples of each step, for the time that is left; None: all steps have one batch.
            left_out: iterations that are no steps (--iterations-to-skip).
            resume_iteration: last iteration before this session; metrics.jsonl is cut after it. 0: a new run.
            replaces_other_run: older files of `output_dir` are another run's: they are renamed, and nothing goes on
                from them.
            layer_files: names of the files that parts of layers may write.
            peak_flops: the MFU's denominator in FLOP/s, to be logged.
            run_config: the run's configuration, for W&B.
        """
        self._is_writer = is_writer
        self._log_interval = config.log_interval
        self._total_iterations = total_iterations
        self._batches = batches
        self._left_out = sorted(left_out)
        self._resume_iteration = resume_iteration
        self._peak_flops = peak_flops
        self._history = _RunHistory()
        self._sinks: list[ScalarSink] = []
        self._progress: ProgressBar | None = None
        if not is_writer:
            return
        kept_until = 0 if replaces_other_run else resume_iteration
        self._file = MetricsFile(output_dir / METRICS_FILE, resume_iteration=kept_until)
        self._health_file = MetricsFile(output_dir / HEALTH_FILE, resume_iteration=kept_until)
        self._layer_files = {name: MetricsFile(output_dir / name, resume_iteration=kept_until) for name in layer_files}
        self._file.make()
        self._history.restore(self._file.kept)
        self._sinks = open_sinks(config, output_dir, resume_iteration=kept_until, run_config=run_config)
        if wants_progress_bar(config):
            self._progress = ProgressBar(
                total=self._steps_to(total_iterations), completed=self._steps_to(resume_iteration)
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def log_step(self, metrics: StepMetrics, layers: LayerReport | None = None) -> None:
        """Log one step. Prints its line for the first, the last, every log_interval-th and every non-finite step.

        Args:
            layers: what a part of its layers reports.
        """
        if not self._is_writer:
            return
        first = self._history.num_session_steps == 0
        self._history.add_step(metrics)
        self._file.append({**metrics.row(), **(layers.row() if layers else {})})
        self._send({**metrics.scalars(), **(layers.scalars() if layers else {})}, metrics.iteration)
        for name, row in layers.file_rows(metrics.iteration).items() if layers else ():
            self._layer_files[name].append(row)
        due = metrics.iteration % self._log_interval == 0 or metrics.iteration == self._total_iterations
        if due or first or not math.isfinite(metrics.loss):
            logger.info("%s", self._step_line(self._history.typical(metrics), layers))
        if self._progress is not None:
            self._progress.update(self._steps_to(metrics.iteration), metrics.loss)

    def log_eval(self, metrics: EvalMetrics) -> None:
        """Log one validation or test.

        A run that is started again at its end replaces its last ones in metrics.jsonl. Sinks, which replace nothing,
        keep the first.
        """
        if not self._is_writer:
            return
        is_again = self._history.add_eval(metrics)
        row = {"kind": "eval", **asdict(metrics)}
        if is_again:
            self._file.replace_eval(row)
        else:
            self._file.append(row)
            scalars = {f"{metrics.split}/loss": metrics.loss, f"{metrics.split}/perplexity": metrics.perplexity}
            self._send(scalars, metrics.iteration)
        logger.info("%s", eval_line(metrics, self._total_iterations))

    def log_health(self, sample: HealthSample) -> None:
        """Log the casts of one sampled step: all of them in health.jsonl, the worst ones in the other outputs."""
        if not self._is_writer or not sample.casts:
            return
        self._health_file.append(sample.row())
        self._send(sample.scalars(), sample.iteration)

    def summary(self, *, reached: int | None = None) -> str:
        """A readable summary of the run so far; empty on ranks that write nothing.

        Args:
            reached: the iteration that the run stands at. Default: that of the last step.
        """
        if not self._is_writer:
            return ""
        last = self._history.last
        reached = reached or (self._resume_iteration if last is None else last.iteration)
        rows = [("steps", self._steps_text(reached)), *self._history.summary_rows(self._peak_flops)]
        width = max(len(name) for name, _ in rows) + 3
        lines = [f"  {name:<{width}}{value}" for name, value in rows]
        file = str(self._file.path) if self._file.path.exists() else None
        written = filter(None, [file, *(sink.destination for sink in self._sinks)])
        lines += [f"  {'' if i else 'written':<{width}}{where}" for i, where in enumerate(written)]
        return "\n".join(["training summary", *lines])

    def close(self) -> None:
        """Remove the bar and close every file. Further calls do nothing."""
        if not self._is_writer:
            return
        if self._progress is not None:
            self._progress.close()
        self._file.close()
        self._health_file.close()
        for file in self._layer_files.values():
            file.close()
        while self._sinks:
            self._sinks.pop().close()

    def _steps_to(self, iteration: int) -> int:
        """Iterations up to `iteration` that are steps."""
        return iteration - bisect_right(self._left_out, iteration)

    def _steps_text(self, reached: int) -> str:
        """How far the run is, what of it is this session's, and what was left out."""
        num_left_out = reached - self._steps_to(reached)
        resumed, num_steps = self._resume_iteration, self._history.num_session_steps
        notes = [f"{num_steps or 'none'} in this session, resumed at {resumed}"] if resumed else []
        notes += [f"{num_left_out} left out by --iterations-to-skip"] if num_left_out else []
        return f"{reached} of {self._total_iterations}" + (f" ({'; '.join(notes)})" if notes else "")

    def _step_line(self, metrics: StepMetrics, layers: LayerReport | None) -> str:
        grows = self._batches is not None and not self._batches.is_constant
        return step_line(
            metrics,
            self._total_iterations,
            peak_flops=self._peak_flops,
            eta_seconds=self._seconds_left(metrics),
            shows_batch=grows,
            layers=layers,
        )

    def _seconds_left(self, metrics: StepMetrics) -> float:
        """From a step to the run's end. Iterations that are left out take no time, and pass over their samples."""
        done, end, batches = metrics.iteration, self._total_iterations, self._batches
        if batches is None or batches.is_constant:
            return self._history.seconds_per_step() * (self._steps_to(end) - self._steps_to(done))

        def samples_to(iteration: int) -> int:
            assert batches is not None
            return batches.num_samples(iteration - done, metrics.consumed_samples)

        passed_over = (samples_to(one) - samples_to(one - 1) for one in self._left_out if done < one <= end)
        return self._history.seconds_per_sample() * (samples_to(end) - sum(passed_over))

    def _send(self, scalars: Mapping[str, float], iteration: int) -> None:
        for sink in self._sinks:
            sink.log(scalars, iteration)


def step_line(
    metrics: StepMetrics,
    total_iterations: int,
    *,
    peak_flops: float | None,
    eta_seconds: float | None,
    shows_batch: bool = False,
    layers: LayerReport | None = None,
) -> str:
    """The console's line of one step; fields that are None are left out."""
    fields = [
        f"iter {_progress_count(metrics.iteration, total_iterations)}",
        f"loss {metrics.loss:.4f}",
        f"grad norm {metrics.grad_norm:.3f}",
        None if metrics.params_norm is None else f"params norm {metrics.params_norm:.3f}",
        None if metrics.num_zeros is None else f"zeros {metrics.num_zeros:,.0f}",
        f"lr {metrics.learning_rate:.1e}",
        f"batch {metrics.global_batch_size:,}" if shows_batch else None,
        f"{metrics.tokens_per_second_per_gpu:>7,.0f} tok/s/GPU",
        f"{_tflops_text(metrics.tflops_per_gpu)} TFLOP/s/GPU ({FLOPS_CONVENTION[False]})",
        _mfu_text(metrics.mfu, peak_flops),
        f"{metrics.peak_memory_gib:.1f} GiB peak",
        *(layers.texts() if layers else ()),
        _clamped_text(metrics),
        None if metrics.grad_saturation_fraction is None else f"saturated {metrics.grad_saturation_fraction:.4%}",
        None if metrics.grad_underflow_fraction is None else f"underflow {metrics.grad_underflow_fraction:.2%}",
        None if metrics.loss_scale is None else f"loss scale {metrics.loss_scale:g}",
        f"skipped {metrics.skipped_steps}",
        None if eta_seconds is None else f"ETA {_duration(eta_seconds)}",
    ]
    return " | ".join(field for field in fields if field is not None)


class _RunHistory:
    """What the summary and the ETA need of all steps. Throughput, time and memory cover this session only."""

    def __init__(self) -> None:
        self.evals: list[EvalMetrics] = []
        self.last: StepMetrics | None = None
        self._final_losses: deque[float] = deque(maxlen=_FINAL_LOSS_STEPS)
        self._step_seconds: deque[float] = deque(maxlen=_ETA_STEPS)
        self._step_samples: deque[int] = deque(maxlen=_ETA_STEPS)
        self._tokens_per_second = array("d")
        #: Steps of this session up to the last line.
        self._line_at = 0
        self._tflops = array("d")
        self._peak_memory_gib = 0.0
        self._started = time.monotonic()

    @property
    def num_session_steps(self) -> int:
        return len(self._tokens_per_second)

    def restore(self, rows: list[dict[str, Any]]) -> None:
        """Restore losses and validations of earlier sessions from the rows of metrics.jsonl."""
        for row in rows:
            loss = math.nan if row["loss"] is None else row["loss"]
            if row["kind"] == "train":
                self._final_losses.append(loss)
            elif row["kind"] == "eval":
                self.evals.append(EvalMetrics.from_loss(row["iteration"], row["split"], loss))

    def add_eval(self, metrics: EvalMetrics) -> bool:
        """Add a validation; whether it replaces one of its split and iteration."""
        others = [one for one in self.evals if (one.split, one.iteration) != (metrics.split, metrics.iteration)]
        is_again = len(others) < len(self.evals)
        self.evals = [*others, metrics]
        return is_again

    def add_step(self, metrics: StepMetrics) -> None:
        self.last = metrics
        self._final_losses.append(metrics.loss)
        self._step_seconds.append(metrics.step_seconds)
        self._step_samples.append(metrics.global_batch_size)
        self._tokens_per_second.append(metrics.tokens_per_second_per_gpu)
        self._tflops.append(metrics.tflops_per_gpu)
        self._peak_memory_gib = max(self._peak_memory_gib, metrics.peak_memory_gib)

    def typical(self, metrics: StepMetrics) -> StepMetrics:
        """`metrics` with the median speed of the steps since the last call.

        Lines come on steps that measure more than others, so their own speed is below the others'.
        """
        since, self._line_at = self._line_at, self.num_session_steps
        rate = median(self._tokens_per_second[since:])
        factor = rate / metrics.tokens_per_second_per_gpu
        return replace(
            metrics,
            tokens_per_second_per_gpu=rate,
            tflops_per_gpu=metrics.tflops_per_gpu * factor,
            mfu=None if metrics.mfu is None else metrics.mfu * factor,
        )

    def seconds_per_step(self) -> float:
        return fmean(self._step_seconds)

    def seconds_per_sample(self) -> float:
        return sum(self._step_seconds) / sum(self._step_samples)

    def summary_rows(self, peak_flops: float | None) -> list[tuple[str, str]]:
        """Names and values of the summary behind the number of steps; none without a step of this session."""
        if self.last is None:
            return []
        tflops = median(self._tflops)
        mfu = _mfu_text(None if peak_flops is None else tflops * 1e12 / peak_flops, peak_flops)
        rates = [
            f"{median(self._tokens_per_second):,.0f} tok/s/GPU",
            f"{_tflops_text(tflops)} TFLOP/s/GPU (full attention)",
            mfu,
        ]
        losses = list(self._final_losses)
        return [
            ("train loss", f"{fmean(losses):.4f} (mean of the last {len(losses)} steps)"),
            *self._eval_rows(),
            ("tokens", f"{self.last.consumed_tokens:,}"),
            ("wall time", _duration(time.monotonic() - self._started)),
            ("throughput", " | ".join(rate for rate in rates if rate is not None) + " (medians)"),
            ("peak memory", f"{self._peak_memory_gib:.1f} GiB"),
            ("skipped steps", str(self.last.skipped_steps)),
        ]

    def _eval_rows(self) -> list[tuple[str, str]]:
        rows: list[tuple[str, str]] = []
        for split in dict.fromkeys(metrics.split for metrics in self.evals if metrics.split != "test"):
            valid = [metrics for metrics in self.evals if metrics.split == split]
            # A NaN loss is never the best.
            best = min(valid, key=lambda metrics: math.inf if math.isnan(metrics.loss) else metrics.loss)
            name = f"{split_in_words(split)} loss"
            rows += [(name, _eval_text(valid[-1])), (f"best {name}", _eval_text(best))]
        tests = [metrics for metrics in self.evals if metrics.split == "test"]
        return rows + [("test loss", _eval_text(metrics)) for metrics in tests[-1:]]


def _eval_text(metrics: EvalMetrics) -> str:
    return f"{metrics.loss:.4f} (perplexity {metrics.perplexity:.2f}, iteration {metrics.iteration})"


def _tflops_text(tflops: float) -> str:
    return f"{tflops:.1f}" if tflops >= 1.0 else f"{tflops:.3f}"


def _mfu_text(mfu: float | None, peak_flops: float | None) -> str | None:
    if mfu is None:
        return None
    return f"MFU {mfu:.1%}" + ("" if peak_flops is None else f" of {peak_flops / 1e12:.0f}")


def _clamped_text(metrics: StepMetrics) -> str | None:
    """What delayed scales clamped, by role; None if nothing was."""
    if not metrics.saturated_tensors:
        return None
    roles = {
        "inputs": metrics.input_saturation_fraction,
        "output gradients": metrics.grad_output_saturation_fraction,
        "head input": metrics.head_input_saturation_fraction,
        "weight gradients": metrics.weight_grad_saturation_fraction,
    }
    shares = ", ".join(f"{fraction:.2g} of {role}" for role, fraction in roles.items() if fraction)
    return f"clamped in {metrics.saturated_tensors:.0f} tensors" + (f" ({shares})" if shares else "")


def eval_line(metrics: EvalMetrics, total_iterations: int | None) -> str:
    """The console's line of a pass over held-out data; the run's length may be unknown."""
    count = metrics.iteration if total_iterations is None else _progress_count(metrics.iteration, total_iterations)
    split = split_in_words(metrics.split)
    return f"iter {count} | {split} loss {metrics.loss:.4f} | perplexity {metrics.perplexity:.2f}"


def _progress_count(iteration: int, total_iterations: int) -> str:
    return f"{iteration:>{len(str(total_iterations))}}/{total_iterations}"


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(max(0.0, seconds))))
