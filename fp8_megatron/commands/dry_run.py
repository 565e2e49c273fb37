"""--dry-run: what a run would be, printed without a GPU, another rank or the run's data."""

from __future__ import annotations

from pathlib import Path

from ..config.checks import ConfigError, check_batches, check_config
from ..config.io import CommandLine, format_config
from ..config.learning_rate import schedule_notes
from ..config.schema import Config
from ..models.registry import architecture_of
from ..update_rules import width_power


def dry_run(command_line: CommandLine, world_size: int) -> None:
    """Check a command line and print what it would train.

    Args:
        world_size: ranks of the launcher; --world-size goes before it.

    Raises:
        ConfigError: it would not train.
    """
    ranks = command_line.world_size or world_size
    check_config(command_line.config, ranks, on_this_machine=False)
    _check_first_start(command_line.config, ranks)
    print(dry_run_report(command_line.config, ranks), flush=True)


def _check_first_start(config: Config, world_size: int) -> None:
    """Check the first batches of a run whose --load equals --save, if this machine has no checkpoint there.

    Raises:
        ConfigError: its ranks cannot take them.
    """
    load = config.checkpoint.load
    if load is None or not config.checkpoint.loads_what_it_saves or any(Path(load).glob("iter_*")):
        return
    try:
        check_batches(config, world_size, 0)
    except ConfigError as error:
        reason = f"no checkpoint is under load({load}) here, so the run starts from scratch"
        raise ConfigError(f"{error} ({reason})") from None


def dry_run_report(config: Config, world_size: int) -> str:
    """The resolved configuration, the layout, memory of every pipeline stage and, of training, bytes on the wire.

    Args:
        config: a configuration that passed its checks for `world_size` ranks.
        world_size: ranks of the job.
    """
    from ..planning.memory import padded_vocab_size, vocab_size

    parallel, model = config.parallel, config.model
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    padded = padded_vocab_size(config)
    notes = [f"vocabulary: {vocab_size(config):,}, padded to {padded:,}"]
    if model.vocab_size is None:
        notes[0] += " (GPT-2's; the tokenizer is not read)"
    context = f"context {parallel.context_parallel_size} × " if parallel.context_parallel_size > 1 else ""
    layout = config.pipeline_layout
    work = _evaluation if config.training.skip_train else _steps
    notes += [
        f"ranks: {world_size} = tensor {tp} × {context}pipeline {pp} × data {config.data_parallel_size(world_size)}",
        *([f"stages: {layout.text} (E embedding, t layer, L loss)"] if pp > 1 else []),
        *([f"FP8: {config.fp8_summary}"] if config.precision.is_fp8 else []),
        *work(config, padded, world_size),
        *([] if config.training.skip_train else schedule_notes(config, world_size)),
        *(_mup(config) if model.use_mup and not config.training.skip_train else []),
        "not checked here: files, folders, installed packages, the GPUs",
    ]
    return "\n".join([format_config(config), "", _memory(config, padded, world_size), *notes])


def _evaluation(config: Config, padded_vocab_size: int, world_size: int) -> list[str]:
    """What --skip-train does, and the peak of its memory."""
    from ..planning.activations import predict_validation_bytes
    from ..planning.memory import predict_memory

    peaks: dict[int, tuple[int, int]] = {}
    for stage in range(config.parallel.pipeline_model_parallel_size):
        state = predict_memory(config, padded_vocab_size, world_size=world_size, stage=stage)
        activations = predict_validation_bytes(config, padded_vocab_size, stage=stage)
        peaks[stage] = state.linear.total + state.rest.total + activations, activations
    stage = max(peaks, key=lambda one: peaks[one])
    peak, activations = peaks[stage]
    return [
        f"evaluation: micro-batches of {config.training.micro_batch_size} per rank, nothing is trained",
        f"peak: predicted {_gigabytes(peak)} GB of stage {stage}, with {_gigabytes(activations)} GB of activations",
    ]


def _steps(config: Config, padded_vocab_size: int, world_size: int) -> list[str]:
    """What a step trains on, what it sends, and the peak of its memory."""
    from ..planning.wire import predict_stage_bytes, predict_wire_bytes

    pp = config.parallel.pipeline_model_parallel_size
    batch, num_micro_batches = config.global_batch_size(world_size), config.num_micro_batches(world_size)
    wires = [predict_wire_bytes(config, padded_vocab_size, world_size=world_size, stage=stage) for stage in range(pp)]
    wire = max(wires, key=lambda one: one.total)
    between = [predict_stage_bytes(config, world_size=world_size, stage=stage) for stage in range(pp)]
    return [
        f"step: {batch:,} sequences, {batch * config.model.seq_length:,} tokens, {num_micro_batches} "
        f"micro-batches of {config.training.micro_batch_size} per rank",
        f"wire: in each step a rank sends its data-parallel peers {_gigabytes(wire.gradients)} GB of gradients and "
        f"{_gigabytes(wire.weights)} GB of weights",
        *([f"stages: in each step a rank sends other stages up to {_gigabytes(max(between))} GB"] if pp > 1 else []),
        *_peak(config, world_size),
    ]


def _peak(config: Config, world_size: int) -> list[str]:
    """The largest predicted peak of a stage, and host memory for activations that leave a rank."""
    from ..planning.activations import predict_host_bytes
    from ..planning.layouts import largest_peak
    from ..training.graph_choice import may_record  # imports torch

    stage, peak = largest_peak(config, world_size, records=may_record(config, world_size))
    at = "logits" if peak.logits else "backward of a layer"
    extra = _gigabytes(peak.logits or peak.backward)
    lines = [
        f"peak: predicted {_gigabytes(peak.total)} GB of stage {stage}, with {_gigabytes(peak.activations)} GB of "
        f"activations, {extra} GB in the {at}"
        + (f", {_gigabytes(peak.recording)} GB beside a recorded step" if peak.recording else "")
    ]
    host = max(
        predict_host_bytes(config, world_size=world_size, stage=one) for one in range(config.pipeline_layout.num_stages)
    )
    lines += architecture_of(config.model).assumptions(config)
    return lines + ([f"host: {_gigabytes(host)} GB for the activations of a rank"] if host else [])


def _mup(config: Config) -> list[str]:
    """What muP makes of initial weights, learning rates and outputs: a line for each class of parameters."""
    model, optimizer = config.model, config.optimizer
    other_matrices = architecture_of(model).other_matrices
    width, depth = model.width_mult, 2 * model.num_layers
    hidden = f"initial standard deviation {model.hidden_init_std:g}"
    classes = [
        ("linear layers", f"{hidden} (proj and fc2: / √{depth})", (True, True)),
        *([] if other_matrices is None else [(other_matrices, hidden, (False, True))]),
        ("embeddings, output layer", f"initial standard deviation {model.init_method_std:g}", (False, False)),
        ("norms, biases", "initial values as without it", (False, False)),
    ]
    lines = [f"muP: m = {width:g}, hidden_size({model.hidden_size}) / {round(model.hidden_size / width)}"]
    for name, start, (is_linear, is_hidden) in classes:
        factor = width ** width_power(optimizer.optimizer, is_linear=is_linear, is_hidden=is_hidden)
        has_own = optimizer.decoupled_lr is not None and name.startswith("embeddings")
        lines.append(f"muP, {name}: {start}, learning rate {'of --decoupled-lr' if has_own else f'× {factor:g}'}")
    factors = model.embedding_mult, model.softmax_scale, model.output_mult
    return [*lines, "muP, outputs: embedding × {:g}, scores of attention × {:g}, logits × {:g}".format(*factors)]


def _memory(config: Config, padded_vocab_size: int, world_size: int) -> str:
    """Predicted GB of weights, gradients and optimizer state of one rank of each pipeline stage."""
    from ..planning.memory import predict_memory
    from ..reporting.tables import table_text

    stages = [
        predict_memory(config, padded_vocab_size, world_size=world_size, stage=stage)
        for stage in range(config.parallel.pipeline_model_parallel_size)
    ]
    headings = ("stage", "parameters", *(kind.replace("_", " ") for kind in stages[0].linear.by_kind), "total")
    rows = []
    for stage, memory in enumerate(stages):
        held = memory.linear + memory.rest
        kinds = map(_gigabytes, held.by_kind.values())
        rows.append([str(stage), f"{held.num_params:,}", *kinds, _gigabytes(held.total)])
    return table_text(headings, rows, title=f"Predicted GB (10^9 bytes) of one rank, {config.precision.level}")


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f}"
