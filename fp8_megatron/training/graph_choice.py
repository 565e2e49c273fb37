"""Whether steps are recorded as CUDA graphs (`step_graph`), by --cuda-graph-impl.

A recording is faster where a layer's kernels are so short that the host cannot launch them in time. Elsewhere it only
costs memory: a recording reserves memory for activations, and nothing outside the recording can use it.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch

from ..config.checks import cuda_graph_problems
from ..config.schema import Config
from ..device import memory as device_memory
from ..reporting.flops import layer_flops

logger = logging.getLogger(__name__)

#: `auto` records only layers with fewer FLOPs than this (`layer_flops`). Milliseconds of a step, launched by Python and
#: recorded, on H200s (--fp8-recipe and --fp8-weight-grad-scaling delayed, --fp8-lm-head), by FLOPs in 10^12:
#: GPT-345M 0.4: 100 → 19, 2.9: 124 → 109; GPT-1.3B 5.8: 165 → 164; GPT-7B at TP 1 10.7: 1,399 → 1,395 with 1.8 GB more.
#: In two pipeline stages on H100s, eight micro-batches: GPT-345M 0.4: 472 → 91.
_RECORDS_BELOW_FLOPS = 6e12
#: The same limit with tensor parallelism. There a layer has twice as many launches, and each rank waits for the slowest
#: host: GPT-7B at TP 4 2.7: 739 → 502, at TP 2 5.4: 460 → 389; GPT-13B at TP 2 8.2: 1,403 → 1,412 with 3.5 GB
#: more, but 1,400 to 2,040 from step to step on a machine of slow hosts (docs/notebook.md, "The host").
_RECORDS_BELOW_FLOPS_OVER_RANKS = 12e12
#: The most layers × micro-batches that `auto` records in one graph. The largest graph that was tried has 160.
MOST_RECORDED_LAYERS = 1024
#: Rows of FP32 gradients that FlashAttention's backward takes for each document.
_TOKENS_PER_DOCUMENT = 128
#: Peak memory with a recording, over the peak before it, without validation. A recording does not share its memory with
#: a rank's shard of new weights (6.5% of GPT-13B's peak); the steps before it did. And its blocks leave gaps (10% of
#: GPT-345M's peak, with scales from the tensor and an LM head in 16 bits).
_MEMORY_FACTOR = 1.15


@dataclass(frozen=True)
class GraphChoice:
    """The decision on --cuda-graph-impl.

    Attributes:
        records: whether steps are recorded.
        reason: the reason, for the log.
        needs_memory: record only if there is enough memory (`has_memory`).
    """

    records: bool
    reason: str
    needs_memory: bool = False

    def log(self) -> None:
        """Log one line for the user if steps are recorded."""
        if self.records:
            logger.info("steps are recorded as a CUDA graph: %s", self.reason)
        else:
            logger.debug("steps are not recorded as a CUDA graph: %s", self.reason)


def choose_graph(config: Config, *, has_gpu: bool, world_size: int, node_size: int) -> GraphChoice:
    """Decide whether to record; the decision is the same on all ranks.

    `auto` records where a layer has few FLOPs (`_RECORDS_BELOW_FLOPS`) and all ranks are GPUs of one node. Recording on
    several nodes is untested. `auto` does not record if the configuration asks for something that cannot be recorded,
    or with --profile-trace, which shows the host's work beside the kernels.

    Args:
        node_size: number of ranks on this node.
    """
    impl = config.training.cuda_graph_impl
    if impl != "auto":
        return GraphChoice(impl == "local", f"cuda_graph_impl is {impl}")
    obstacle = _obstacle(config, has_gpu=has_gpu, world_size=world_size, node_size=node_size)
    if obstacle is not None:
        return GraphChoice(False, obstacle)
    flops = layer_flops(config)
    work = f"a layer has {flops / 1e12:.1f} TFLOP a micro-batch on a GPU"
    if waits_for_host(config):
        return GraphChoice(True, work, needs_memory=True)
    return GraphChoice(False, f"{work}, which gives the host the time to launch it")


def may_record(config: Config, world_size: int, gpus_per_node: int = 8) -> bool:
    """Whether a run on GPUs records its steps, if there is memory for it."""
    return choose_graph(config, has_gpu=True, world_size=world_size, node_size=min(world_size, gpus_per_node)).records


def waits_for_host(config: Config) -> bool:
    """Whether a layer's kernels may run faster than Python launches them."""
    over_ranks = config.parallel.tensor_model_parallel_size > 1
    return layer_flops(config) < (_RECORDS_BELOW_FLOPS_OVER_RANKS if over_ranks else _RECORDS_BELOW_FLOPS)


def documents_fit(config: Config, most_documents: int | None) -> bool:
    """Whether `auto` records steps whose micro-batches have up to so many documents; None: they have none.

    A recording has room for all of them in every step. FlashAttention's backward takes 128 rows of FP32 gradients for
    each: as many documents as 128 go into the tokens, and one more a sequence, double its memory.
    """
    training, seq_length = config.training, config.model.seq_length
    most = training.micro_batch_size * (seq_length // _TOKENS_PER_DOCUMENT + 1)
    if most_documents is None or training.cuda_graph_impl == "local" or most_documents <= most:
        return True
    logger.info(
        "steps are not recorded as a CUDA graph: a micro-batch may have %d documents, and a recording takes memory for "
        "as many in every step, which is worth it up to %d; --cuda-graph-impl local records in any case",
        most_documents,
        most,
    )
    return False


def has_memory(device: torch.device, validation_bytes: int) -> bool:
    """Whether a recording fits into every rank's GPU: `_MEMORY_FACTOR` times the peak so far, and validation.

    All ranks call this once, at the same step. It waits for the device.

    Args:
        validation_bytes: what a step of validation holds, which cannot use a recording's memory
            (`planning.activations.predict_validation_bytes`).
    """
    used, validation = device_memory.peak_used_share(device), validation_bytes / device_memory.memory_bytes(device)
    shares = torch.tensor([used * _MEMORY_FACTOR + validation, used, validation], device=device)
    if torch.distributed.get_world_size() > 1:
        torch.distributed.all_reduce(shares, torch.distributed.ReduceOp.MAX)
    needed, most_used, most_of_validation = shares.tolist()  # waits: the host's next action depends on it
    if needed <= 1.0:
        return True
    logger.info(
        "steps are not recorded as a CUDA graph: %.0f%% of a GPU's memory were in use, and a recording may take %.0f%% "
        "more of that%s; --cuda-graph-impl local records in any case, none goes over NCCL between more than two "
        "tensor-parallel ranks, which is faster for steps that Python launches",
        100 * most_used,
        100 * (_MEMORY_FACTOR - 1),
        f" and {most_of_validation:.0%} of the memory for validation" if most_of_validation else "",
    )
    return False


def _obstacle(config: Config, *, has_gpu: bool, world_size: int, node_size: int) -> str | None:
    """Why `auto` does not record even small layers; None if it may."""
    if not has_gpu:
        return "there is no GPU"
    if world_size != node_size:
        return f"of WORLD_SIZE({world_size}) ranks LOCAL_WORLD_SIZE({node_size}) are on this node"
    if world_size > 1 and (value := os.environ.get("NCCL_GRAPH_REGISTER", "0")) != "0":
        return f"NCCL_GRAPH_REGISTER is {value}, with which its first launch may hang"
    problem = next(cuda_graph_problems(config), None)
    if problem is not None:
        return problem
    stages = config.parallel.pipeline_model_parallel_size
    layers = config.model.num_layers // stages * config.num_micro_batches(world_size)
    if layers > MOST_RECORDED_LAYERS:
        return f"a step has {layers} layers × micro-batches, more than {MOST_RECORDED_LAYERS}"
    if config.profile.profile_trace:
        return "profile_trace shows how Python launches a step"
    return None
