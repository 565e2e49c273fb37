"""Conversions between checkpoint formats: detect and open a source, write a target."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from enum import Enum
from pathlib import Path

from ..checkpoint.description import read_description
from ..checkpoint.files import (
    CONFIG,
    META,
    TRACKER,
    CheckpointError,
    candidates,
    is_torch_files,
    iteration_folder,
    iteration_of,
    publish,
    start_writing,
    write_text,
)
from ..checkpoint.manifest import problem_with, read_manifest, write_manifest
from ..checkpoint.metadata_file import METADATA
from ..checkpoint.run_state import FORMAT_VERSIONS
from ..checkpoint.same_model import first_difference
from ..checkpoint.saved_run import saved_config, saved_model_settings
from ..checkpoint.saving import write_config, write_last_files
from ..checkpoint.torch_dist import TorchDistReader, write_chunks, write_metadata
from ..checkpoint.weights import Repadded, TorchDistWeights, WeightReader, check_shapes
from ..config.checks import check_config
from ..config.schema import CheckpointConfig, Config, DataConfig, ModelConfig
from ..models.keys import OUTPUT_LAYER, WORD_EMBEDDING
from ..models.registry import weight_shapes
from .hugging_face_folder import CONFIG_FILE, HuggingFaceWeights
from .megatron_weights import config_of, open_weights
from .torch_dist_writer import fp32_chunks, write_torch_dist


class CheckpointFormat(str, Enum):
    """A checkpoint's format."""

    OURS = "ours"
    MEGATRON_CORE = "mcore"
    HUGGING_FACE = "hf"


@dataclass(frozen=True)
class SourceCheckpoint:
    """A checkpoint to convert from.

    Attributes:
        folder: the folder with the weights of one iteration.
        weights: whole weights by standard key.
        config: its configuration. For a Hugging Face model: defaults, with its model section.
        vocab_size: without padding.
    """

    format: CheckpointFormat
    folder: Path
    weights: WeightReader
    config: Config
    vocab_size: int


def find_format(path: Path, iteration: int | None = None) -> tuple[CheckpointFormat, Path]:
    """The format at a path, and the folder of one checkpoint in it (the latest, or that of `iteration`).

    Raises:
        CheckpointError: the path has no readable checkpoint, or is one and `iteration` asks for another.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder; give a Hugging Face model, or what --save named")
    kind = _format_of_one(path)
    if kind is not None and iteration not in (None, iteration_of(path.resolve())):
        raise CheckpointError(
            f"--iteration {iteration}: {path} is one checkpoint, of another iteration or of none; give the folder "
            f"above it, or leave --iteration out"
        )
    if kind is not None:
        return kind, path
    folder = _tracked_folder(path) if iteration is None else iteration_folder(path, iteration)
    if folder is not None and _is_megatron(folder):
        return CheckpointFormat.MEGATRON_CORE, folder
    found = candidates(path, iteration)
    if not found:
        raise CheckpointError(
            f"{path} has none of {CONFIG_FILE} (Hugging Face), {METADATA} (torch_dist), mp_rank_* (torch) and "
            f"{TRACKER} (a folder of checkpoints)"
        )
    return CheckpointFormat.OURS, iteration_folder(path, found[0])


def _format_of_one(folder: Path) -> CheckpointFormat | None:
    """The format of a folder that is one checkpoint or one model; None if it is neither."""
    if (folder / CONFIG_FILE).is_file():
        return CheckpointFormat.HUGGING_FACE
    if (folder / METADATA).is_file() and (folder / META).is_file():
        return CheckpointFormat.OURS
    return CheckpointFormat.MEGATRON_CORE if _is_megatron(folder) else None


def _is_megatron(folder: Path) -> bool:
    """Whether a folder is one checkpoint in a format of Megatron-LM or megatron-core, and not this project's."""
    return is_torch_files(folder) or ((folder / METADATA).is_file() and not (folder / META).is_file())


def _tracked_folder(root: Path) -> Path | None:
    """The checkpoint that the tracker names; None if it names none, of which `candidates` tells."""
    if not (root / TRACKER).is_file():
        return None
    text = (root / TRACKER).read_bytes()[:100].strip()
    if text == b"release":  # Megatron's name for converted weights, which have no iteration
        return root / "release"
    return iteration_folder(root, int(text)) if text.isdigit() and len(text) <= 15 else None


def open_source(
    path: Path,
    *,
    iteration: int | None = None,
    config: Config | None = None,
    stated: Collection[str] = (),
    vocab_size: int | None = None,
) -> SourceCheckpoint:
    """Open a checkpoint of any format. Weights are read on demand.

    Args:
        config: the model's configuration. A checkpoint of megatron-core alone has none. It has to agree with the
            arguments of Megatron-LM's and with the model of this project's, whose configuration it replaces. For a
            Hugging Face model it gives all but the model, of which it may state nothing else than ``config.json``.
        stated: settings that `config` does not have by default.
        vocab_size: size of the vocabulary without padding, for a checkpoint that does not say it.

    Raises:
        CheckpointError: the checkpoint is unreadable, damaged, or of another model than `config` describes.
    """
    kind, folder = find_format(path, iteration)
    if vocab_size is not None and kind is not CheckpointFormat.MEGATRON_CORE:
        raise CheckpointError(f"--vocab-size {vocab_size}: {folder} says how large its vocabulary is; leave it out")
    if kind is CheckpointFormat.HUGGING_FACE:
        theirs = HuggingFaceWeights(folder)
        own_vocab_size = theirs.model.vocab_size
        assert own_vocab_size is not None
        if config is not None:
            _check_states_nothing_else(folder, theirs.model, config.model, stated)
        theirs.check_values()
        return SourceCheckpoint(kind, folder, theirs, replace(config or Config(), model=theirs.model), own_vocab_size)
    if kind is CheckpointFormat.OURS:
        problem = next((text for record in read_manifest(folder) if (text := problem_with(folder, record))), None)
        if problem is not None:
            raise CheckpointError(f"{problem}; use another iteration (--iteration)")
        own_vocab_size = read_description(folder)["vocab_size"]
        config = saved_config(folder) if config is None else _of_the_same_model(folder, config, own_vocab_size)
        own_weights = TorchDistWeights(folder, TorchDistReader(folder, [r.name for r in read_manifest(folder)]))
        source = SourceCheckpoint(kind, folder, own_weights, config, own_vocab_size)
    else:
        weights, arguments = open_weights(folder)
        config = config_of(folder, arguments, config, vocab_size)
        assert config.model.vocab_size is not None
        source = SourceCheckpoint(kind, folder, weights, config, config.model.vocab_size)
    shapes = source.weights.shapes
    num_rows = shapes.get(WORD_EMBEDDING, (source.vocab_size,))[0]
    check_shapes(shapes, weight_shapes(source.config.model, num_rows), str(folder))
    num_head_rows = shapes.get(OUTPUT_LAYER, (num_rows,))[0]
    if num_head_rows != num_rows:
        raise CheckpointError(
            f"{folder}: the head has {num_head_rows} rows, the embedding {num_rows}: a file is damaged; copy the "
            f"folder again"
        )
    if num_rows < source.vocab_size:
        raise CheckpointError(
            f"{folder}: the embedding has {num_rows} rows, fewer than vocab_size({source.vocab_size}); correct it"
        )
    return source


def _check_states_nothing_else(folder: Path, theirs: ModelConfig, given: ModelConfig, stated: Collection[str]) -> None:
    """Raise `CheckpointError` if a stated setting differs from a Hugging Face model's. None states nothing."""
    names = [field.name for field in fields(ModelConfig) if field.name in stated]
    values = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    differing = [
        name for name in values if _meaning(replace(theirs, **{name: values[name]}), name) != _meaning(theirs, name)
    ]
    if differing:
        raise CheckpointError(
            "\n".join(
                f"{folder} has {name}({getattr(theirs, name)}), and nothing reads {name}({values[name]}) of --config; "
                f"leave it out{', or give --seq-length' if name == 'seq_length' else ''}"
                for name in differing
            )
        )


def _meaning(model: ModelConfig, name: str) -> object:
    """The value of a setting with its default filled in."""
    meanings = {
        "kv_channels": "head_dim",
        "num_query_groups": "query_groups",
        "ffn_hidden_size": "padded_ffn_hidden_size",
    }
    return getattr(model, meanings.get(name, name))


def _of_the_same_model(folder: Path, given: Config, vocab_size: int) -> Config:
    """A configuration to stand beside a checkpoint of this project.

    Raises:
        CheckpointError: the weights would compute something else under it, or it has another vocabulary.
    """
    found = first_difference(saved_model_settings(folder), given.model)
    if found is not None:
        raise CheckpointError(found.sentence(folder, "--config", "correct it"))
    if given.model.vocab_size not in (None, vocab_size):
        raise CheckpointError(
            f"{folder} was saved with a vocabulary of {vocab_size} tokens, --config has "
            f"vocab_size({given.model.vocab_size}); correct it"
        )
    return given


def check_new(folder: Path) -> None:
    """Raise `CheckpointError` unless a folder is empty or does not exist."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is not an empty folder; give a new one")


def check_trainable(config: Config, vocab_size: int) -> None:
    """Raise `ConfigError` if a run on TP × CP × PP ranks would refuse this configuration. Settings of data, validation,
    folders and replicas are not checked.

    More data-parallel ranks leave fewer micro-batches per rank: if there are too few here, there are too few anywhere.
    """
    training = replace(
        config.training,
        eval_interval=0,
        full_validation=False,
        multiple_validation_sets=False,
        validation_set_names=(),
        check_weight_hash_across_dp_replicas_interval=None,
    )
    check_config(
        replace(
            config,
            model=replace(config.model, vocab_size=vocab_size),
            data=DataConfig(mock_data=True),
            training=training,
            checkpoint=CheckpointConfig(load="run", save="run", save_interval=1),
        ),
        config.parallel.ranks_per_sample,
    )


def write_ours(
    root: Path,
    source: SourceCheckpoint,
    config: Config,
    *,
    padded_vocab_size: int,
    on_weight: Callable[[], None] = lambda: None,
) -> Path:
    """Write a checkpoint of this project under `root`, at iteration 0 and with weights only (``--load … --finetune``).

    Args:
        config: contents of ``config.yaml`` beside it.
        padded_vocab_size: rows of the embedding.

    Returns:
        The checkpoint's folder.
    """
    folder = iteration_folder(root, 0)
    temporary = start_writing(folder)
    description = {
        "format_version": FORMAT_VERSIONS["fp32"],
        "state_dtype": "fp32",
        "iteration": 0,
        "consumed_samples": 0,
        "skipped_steps": 0,
        "topology": {
            "tensor_model_parallel_size": config.parallel.tensor_model_parallel_size,
            "pipeline_model_parallel_size": config.parallel.pipeline_model_parallel_size,
            "virtual_pipeline_model_parallel_size": config.pipeline_layout.virtual_size,
            "data_parallel_size": 1,
        },
        "level": config.precision.level,
        "vocab_size": source.vocab_size,
        "padded_vocab_size": padded_vocab_size,
        "optimizer": [],
    }
    common = {"checkpoint_version": 3.0, "iteration": 0, "content_metadata": description}
    weights = Repadded(source.weights, source.vocab_size, padded_vocab_size)
    records = write_torch_dist(temporary, weights, common=common, on_weight=on_weight)
    write_last_files(temporary, description, config, records)
    publish(temporary, folder)
    return folder


def rewrite_ours(root: Path, source: SourceCheckpoint, config: Config, *, in_fp32: bool = False) -> Path:
    """Copy one of this project's checkpoints, including optimizer state, with another ``config.yaml``.

    Tensors are stored under names of the whole model, so any level or layout can load them.
    ``checkpoint.json`` still states how they were saved.

    Args:
        in_fp32: write masters and moments in FP32, as megatron-core's ``torch_dist``.
    """
    description = read_description(source.folder)
    folder = iteration_folder(root, description["iteration"])  # the source may be a link of another name
    temporary = start_writing(folder)
    files = [record for record in read_manifest(source.folder) if record.name != CONFIG]
    decodes = in_fp32 and description.get("state_dtype") == "native"
    if decodes:
        files = [record for record in files if record.name.startswith("rank_")]
    for record in files:
        shutil.copyfile(source.folder / record.name, temporary / record.name)
        problem = problem_with(temporary, record)
        if problem is not None:
            raise CheckpointError(problem)
    if decodes:
        description |= {"format_version": FORMAT_VERSIONS["fp32"], "state_dtype": "fp32"}
        written, records = write_chunks(temporary, 0, fp32_chunks(TorchDistReader(source.folder)))
        common = {"checkpoint_version": 3.0, "iteration": description["iteration"], "content_metadata": description}
        records += write_metadata(temporary, written, common=common, checkpoint_id=folder.stem)
        write_last_files(temporary, description, config, [*files, *records])
    else:
        write_manifest(temporary, [*files, write_config(temporary, config)])
    publish(temporary, folder)
    return folder


def write_megatron_core(root: Path, source: SourceCheckpoint, *, on_weight: Callable[[], None] = lambda: None) -> Path:
    """Write weights only: megatron-core's ``torch_dist`` in FP32 and Megatron's tracker file; returns the folder."""
    iteration = read_description(source.folder)["iteration"] if source.format is CheckpointFormat.OURS else 0
    folder = iteration_folder(root, iteration)
    temporary = start_writing(folder)
    common = {"checkpoint_version": 3.0, "iteration": iteration}
    write_torch_dist(temporary, source.weights, common=common, model=source.config.model, on_weight=on_weight)
    temporary.rename(folder)
    write_text(root / TRACKER, str(iteration))
    return folder
