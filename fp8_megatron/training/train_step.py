"""One optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from megatron.core.tensor_parallel.random import get_all_rng_states
from torch import Tensor

from ..device import memory as device_memory
from ..device.memory import HostCopy
from ..graphs.recorder import CudaRecorder, Recorder
from ..mcore.pipeline import schedule_arguments
from ..mcore.schedule import forward_backward_func
from ..planning.activations import predict_validation_bytes
from ..quantization.cast_report import CastReport
from ..reporting.step_figures import StepFigures
from ..storage import GradReduceMode
from .batches import Batch, forward_step, take_step
from .build import TrainingState
from .graph_choice import GraphChoice, documents_fit, has_memory
from .step_graph import StepGraph
from .stopping import StopReason, request_number, request_of


def train_step(
    state: TrainingState,
    loader: Iterator[Batch],
    *,
    stop: StopReason | None = None,
    num_micro_batches: int | None = None,
    measures_underflow: bool = False,
    samples_casts: bool = False,
    graph: StepGraph | None = None,
    before_update: Callable[[], None] | None = None,
) -> Tensor:
    """Forward and backward over the micro-batches, reduce, clip, update, advance the scales.

    Args:
        stop: what this rank asks to stop for, if anything. The collective that sums the loss shares it with all ranks.
        num_micro_batches: of this step; None: as many as `state` was built for. The batch may grow up to those.
        measures_underflow: count weight-gradient elements that the cast to FP8 makes zero, in a sample of large ones;
            measure updates of whole matrices.
        samples_casts: measure every cast of the first micro-batch, with `state.sampler`; also measures underflow.
        graph: from `step_graph`; it runs forward, backward and the reduction of gradients.
        before_update: called between the gradients and the update.

    Returns:
        FP32 on the device: the packed `StepFigures`, then what layers report (`TrainingState.layer_table`), then under
        delayed scaling the `CastReport`. This function does not wait for the step; reading them does.
    """
    measured = {"measures_underflow": measures_underflow or samples_casts, "samples_casts": samples_casts}
    num_micro_batches = num_micro_batches or state.num_micro_batches
    has_updates = state.optimizer.measure_updates(measured["measures_underflow"])
    if graph is not None:
        gradients = graph(loader, num_micro_batches, **measured)
    else:
        batches = take_step(loader, num_micro_batches, state.device)
        gradients = compute_gradients(state, batches, **measured)
    part_of_loss, counts = gradients.split([1, 4])
    if before_update is not None:
        before_update()
    grad_norm = state.optimizer.step(part_of_loss)
    state.schedule.step(num_micro_batches * state.samples_per_micro_batch)
    for history in state.histories:
        if history is not None:
            history.update(state.topology.stage_group)
    peak = device_memory.peak_memory_gib(state.device)
    figures, reports = _over_ranks(
        part_of_loss,
        state,
        stop=stop,
        peak_memory_gib=peak,
        counts=counts,
        autoscaling=_autoscaling(state),
        layer_numbers=_layer_numbers(state),
    )
    return torch.cat([StepFigures.pack(grad_norm=grad_norm, **figures, **_statistics(state, has_updates)), reports])


def compute_gradients(
    state: TrainingState, batches: list[Batch], *, measures_underflow: bool, samples_casts: bool = False
) -> Tensor:
    """Forward and backward over the micro-batches, and the reduction over replicas.

    Returns:
        FP32 [5] on the device. The first is this rank's part of the mean loss of the global batch: the sum over ranks
        is the mean. Two count elements of its FP8 weight gradients: those other than 0, and those of them that
        underflowed. Two count elements that GEMMs wrote in FP8: all of them, and those that were clamped.
    """
    for chunk in state.model:
        chunk.zero_grad_buffer(measures_underflow=measures_underflow, num_micro_batches=len(batches))
    if samples_casts and state.sampler is not None:
        state.sampler.begin()
    per_token = state.config.training.calculate_per_token_loss
    mean_tokens = _mean_tokens(batches, state) if per_token else None
    losses = run_schedule(state, batches, mean_tokens, forward_only=False)
    if samples_casts and state.sampler is not None:
        state.sampler.end()
    underflow = [buffer.underflow for buffer in state.optimizer.buffers]
    clamped = [buffer.clamped for buffer in state.optimizer.buffers]
    return torch.cat([_part_of_loss(losses, state), _sum(underflow, state), _sum(clamped, state)])


def step_graph(
    state: TrainingState,
    choice: GraphChoice,
    recorder: Recorder | None = None,
    *,
    most_documents: Callable[[], int | None] = lambda: None,
) -> StepGraph | None:
    """`compute_gradients` as a CUDA graph; None if steps are not recorded.

    Args:
        recorder: of these steps alone; None: the device's.
        most_documents: how many a micro-batch may have; None: attention crosses documents.
    """
    if not choice.records or not documents_fit(state.config, most_documents()):
        return None

    def before_recording() -> None:
        for chunk in state.model:
            chunk.before_recording()
        for history in state.histories:
            if history is not None:
                history.keep_addresses()

    def is_ready() -> bool:
        """Whether the last step of the warm-up casts as the recorded ones will, on all ranks: a stage without FP8
        layers would record before the others."""
        histories = [history for history in state.histories if history is not None]
        if state.topology.pp.size() == 1:
            return all(history.is_settled for history in histories)  # ranks of a stage have the same scales
        # Stages record at the same step and once: they wait until no cast is cold.
        is_known = all(history.is_settled and not history.has_cold_casts for history in histories)
        ready = torch.tensor([float(is_known)], device=state.device)
        torch.distributed.all_reduce(ready, torch.distributed.ReduceOp.MIN)
        return bool(ready.item())

    def has_memory_for_step() -> bool:
        rows, stage = state.padded_vocab_size, state.topology.pp.rank()
        return has_memory(state.device, predict_validation_bytes(state.config, rows, stage=stage))

    return StepGraph(
        partial(compute_gradients, state),
        recorder or CudaRecorder(state.device, lambda: [*get_all_rng_states().values()]),
        before_recording,
        can_measure=lambda: any(buffer.underflow is not None for buffer in state.optimizer.buffers),
        can_sample=state.sampler is not None,
        has_memory=has_memory_for_step if choice.needs_memory else lambda: True,
        is_ready=is_ready,
        casts=lambda: [n for history in state.histories if history for n in (history.num_known, len(history.left))],
        may_go_on=choice.needs_memory and state.topology.world_size == 1,
        num_micro_batches=state.num_micro_batches,
        device=state.device,
        warmup_steps=state.config.training.cuda_graph_warmup_steps,
    )


@torch.no_grad()
def evaluate(
    state: TrainingState,
    loader: Iterator[Batch],
    num_batches: int,
    *,
    over_tokens: bool = False,
    own_stop: Callable[[], StopReason | None] = lambda: None,
) -> tuple[float, StopReason | None]:
    """Mean loss over `num_batches` global batches, in nats per token, and what ended it before the last of them.

    Both are equal on all ranks.

    Args:
        over_tokens: the mean over all tokens that count, also without --calculate-per-token-loss.
        own_stop: what this rank asks to stop for, if anything. It ends all ranks' evaluation a batch later.
    """
    over_tokens |= state.config.training.calculate_per_token_loss
    for chunk in state.model:
        chunk.eval()
    total = torch.zeros(1, device=state.device)
    weights = torch.zeros(1, device=state.device)
    requests: HostCopy | None = None
    stop = None
    samples = state.config.eval_global_batch_size(state.topology.world_size)
    num_micro_batches = samples // state.samples_per_micro_batch
    for _ in range(num_batches):
        batches = take_step(loader, num_micro_batches, state.device)
        mean_tokens = _mean_tokens(batches, state) if over_tokens else None
        losses = run_schedule(state, batches, mean_tokens, forward_only=True)
        # Over tokens, a batch counts by its tokens.
        weight = torch.ones_like(total) if mean_tokens is None else mean_tokens
        figures, _ = _over_ranks(_part_of_loss(losses, state), state, stop=own_stop())
        total += weight * figures["loss"]
        weights += weight
        # Those of the batch before: the host does not wait for the one that it has just queued.
        stop = None if requests is None else request_of(*requests.read())
        if stop is not None:
            break
        requests = HostCopy(figures["stop_request"])
    for chunk in state.model:
        chunk.train()
    for history in state.histories:
        if history is not None:
            history.discard_current_step()
    return total.item() / max(weights.item(), 1e-30), stop


def _mean_tokens(batches: list[Batch], state: TrainingState) -> Tensor:
    """FP32 [1]: the unmasked tokens of a micro-batch in the mean over the global batch.

    All ranks that hold the same parameters call it together.
    """
    tokens = torch.stack([batch["loss_mask"].sum(dtype=torch.float32) for batch in batches]).sum(0, keepdim=True)
    replicas = state.topology.replicas
    if replicas.size > 1:
        torch.distributed.all_reduce(tokens, group=replicas.group)
    return tokens / (len(batches) * state.topology.dp.size())


def run_schedule(
    state: TrainingState, batches: list[Batch], mean_tokens: Tensor | None, *, forward_only: bool
) -> list[dict[str, Tensor]]:
    """Forward and, unless `forward_only`, backward of a step's micro-batches: their losses, on the last stage."""
    iterators = [iter(batches) for _ in state.model]
    config = state.config
    return forward_backward_func(config.parallel, forward_only=forward_only)(
        forward_step_func=forward_step if mean_tokens is None else partial(forward_step, mean_tokens=mean_tokens),
        data_iterator=iterators if len(iterators) > 1 else iterators[0],
        model=list(state.model),
        num_microbatches=len(batches),
        seq_length=config.model.seq_length,
        micro_batch_size=config.training.micro_batch_size,
        forward_only=forward_only,
        **schedule_arguments(state.model, state.topology, in_fp8=config.precision.fp8_pipeline_communication),
    )


def _sum(counts: list[Tensor | None], state: TrainingState) -> Tensor:
    """FP32 [2]: the sum of int64 [2] counts of this rank's gradients."""
    total = torch.zeros(2, device=state.device)
    for count in counts:
        if count is not None:
            total += count
    return total


def _autoscaling(state: TrainingState) -> Tensor | None:
    """FP32 [2]: of this rank's tensors the largest saturated fraction and the largest -μ of auto-scaling, below all
    others on a rank without such a tensor; None if no rank scales so."""
    if state.config.parallel.fp8_grad_reduce is not GradReduceMode.NCCL:
        return None
    autoscales = [autoscale for buffer in state.optimizer.buffers for autoscale in buffer.autoscales]
    if not autoscales:
        return torch.full((2,), -torch.inf, device=state.device)
    saturated = torch.cat([autoscale.saturated_fraction for autoscale in autoscales]).amax(0, keepdim=True)
    return torch.cat([saturated, torch.cat([autoscale.mu for autoscale in autoscales]).amin(0, keepdim=True).neg()])


def _layer_numbers(state: TrainingState) -> Tensor | None:
    """FP32: what this rank's layers report of the step; None if they report nothing."""
    if state.layer_table is None:
        return None
    own = [part for chunk in state.model for part in chunk.reporting]
    return state.layer_table.pack({part.layer_number - 1: part.numbers() for part in own}, state.device)


def _statistics(state: TrainingState, has_updates: bool) -> dict[str, Tensor]:
    """The loss scale, the figures of the whole model that the configuration asks for, and those of updates if they were
    measured."""
    logging, optimizer, figures = state.config.logging, state.optimizer, {}
    if optimizer.loss_scale is not None:
        figures["loss_scale"] = optimizer.loss_scale.scale.view(1)
    if logging.log_params_norm:
        figures["params_norm"] = optimizer.params_norm()
    if logging.log_num_zeros_in_grad:
        figures["num_zeros"] = optimizer.num_zeros_in_grad()
    return figures | (optimizer.update_figures() if has_updates else {})


def _part_of_loss(losses: list[dict[str, Tensor]], state: TrainingState) -> Tensor:
    """FP32 [1]: this rank's part of the mean loss; the sum over all ranks is the mean over the global batch."""
    if not state.topology.reads_loss:
        return torch.zeros(1, device=state.device)
    return (torch.stack([loss["loss"] for loss in losses]).mean() / state.topology.dp.size()).view(1)


def _over_ranks(
    loss: Tensor,
    state: TrainingState,
    *,
    stop: StopReason | None = None,
    peak_memory_gib: float = 0.0,
    counts: Tensor | None = None,
    autoscaling: Tensor | None = None,
    layer_numbers: Tensor | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """What all ranks have together, by one collective: figures by name, and behind one another what layers report and,
    under delayed scaling, the `CastReport`.

    Args:
        loss: [1]; it is added up.
        stop: what this rank asks to stop for. The largest request counts (`stopping.request_number`).
        peak_memory_gib: the largest counts.
        counts: see `compute_gradients`; they become fractions, of which 0/0 is NaN.
        autoscaling: see `_autoscaling`; the worst counts.
        layer_numbers: see `_layer_numbers`; it is added up.
    """
    world_size, rank = state.topology.world_size, state.topology.rank
    histories = [history for history in state.histories if history is not None]
    num_reported = CastReport.numel_of(world_size, len(histories)) if histories else 0
    num_layer_numbers = 0 if layer_numbers is None else layer_numbers.numel()
    width = 2 if autoscaling is None else 2 + len(autoscaling)
    sizes = [1, 4, world_size * width, num_layer_numbers, num_reported]
    values = torch.zeros(sum(sizes), device=state.device)
    total, counted, of_ranks, of_layers, reported = values.split(sizes)
    total.copy_(loss)
    if layer_numbers is not None:
        of_layers.copy_(layer_numbers)
    if counts is not None:
        counted.copy_(counts)
    own = of_ranks.view(world_size, width)[rank]
    own[:1].fill_(peak_memory_gib)  # a tensor made from a list is copied from the host, which waits
    own[1:2].fill_(request_number(stop))
    if autoscaling is not None:
        own[2:] = autoscaling
    for chunk, history in enumerate(histories):
        if history.report is not None:  # a stage without an FP8 layer has none
            CastReport.add_(reported, history.report, place=rank * len(histories) + chunk)
    if world_size > 1:
        torch.distributed.all_reduce(values)
    largest = of_ranks.view(world_size, width).amax(dim=0)
    figures = {"loss": total, "stop_request": largest[1:2], "peak_memory_gib": largest[:1]}
    if counts is not None:
        figures["grad_underflow_fraction"] = counted[1:2] / counted[:1]
        figures["weight_grad_saturation_fraction"] = counted[3:] / counted[2:3]
    if autoscaling is not None:
        # A negative fraction: no reduction has reported one. An infinite μ: no tensor has one.
        figures["grad_saturation_fraction"] = torch.where(largest[2:3] < 0, torch.nan, largest[2:3])
        figures["autoscale_mu"] = torch.where(largest[3:].isinf(), torch.nan, largest[3:].neg())
    return figures, values[sum(sizes[:3]) :]
