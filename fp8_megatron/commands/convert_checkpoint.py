"""Convert a checkpoint between this project, Megatron (torch, torch_dist) and Hugging Face.

fp8-megatron convert --input gpt2/ --output runs/gpt2 --to ours --precision fp8
fp8-megatron convert --input runs/a --output exported/ --to hf --dtype bf16
fp8-megatron convert --input megatron/ --vocab-size 50257 --output exported/ --to hf --fp8 compressed-tensors

The format of --input is detected. Weights are converted one at a time, so memory holds one weight and its converted
form; each expert has its own. At the end, logits on random tokens are compared, one layer at a time: source with
target, and this project's model with transformers'.
"""

from __future__ import annotations

import shutil
import signal
import sys
import warnings
from argparse import BooleanOptionalAction
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..config.words import flag_name
from ..errors import UserError
from ..outputs import check_free_bytes, writing_to
from .arguments import Parser, existing, output_folder, path, real, seed, whole
from .program import exit_status, prepare_megatron

if TYPE_CHECKING:
    from ..config.schema import Config
    from ..conversion.conversion import SourceCheckpoint

console = Console(stderr=True, markup=False)


@dataclass(frozen=True)
class ConvertOptions:
    """The command line. `parse_arguments` describes each flag."""

    input: Path
    output: Path
    to: str
    iteration: int | None
    config: Path | None
    vocab_size: int | None
    precision: Literal["bf16", "fp16", "te", "fp8"] | None
    opt_level: Literal["O1", "O2", "O3"] | None
    tensor_model_parallel_size: int | None
    pipeline_model_parallel_size: int | None
    seq_length: int | None
    ckpt_state_dtype: Literal["fp32"] | None
    dtype: str
    fp8: str | None
    max_shard_gb: float
    verify: bool
    verify_tokens: int
    seed: int


def parse_arguments(words: Sequence[str] | None = None, prog: str | None = None) -> ConvertOptions:
    """Read the command line.

    Raises:
        SystemExit: a flag or a value is wrong; code 2.
    """
    parser = Parser(prog=prog, description=__doc__)
    add = parser.add_argument
    add(
        "--input",
        type=existing,
        required=True,
        help="Hugging Face model folder, folder given to --save here or in Megatron-LM, or one checkpoint in it",
    )
    add("--output", type=output_folder, required=True, help="folder to create")
    add(
        "--to",
        choices=("ours", "hf", "mcore"),
        required=True,
        help="ours: a folder for --load; hf: config.json, safetensors and tokenizer; mcore: torch_dist in FP32",
    )
    add("--iteration", type=whole(least=0), help="which of several checkpoints in --input (the latest)")
    add(
        "--config",
        type=path,
        metavar="FILE.yaml",
        help="settings of a run: the model of a megatron-core checkpoint (with vocab_size) that has no arguments of "
        "Megatron-LM, the new config.yaml beside a checkpoint of ours, all but the model beside a Hugging Face model",
    )
    add("--vocab-size", type=whole(), help="from mcore: size of the vocabulary without padding (as the input says)")
    add("--precision", choices=("bf16", "fp16", "te", "fp8"), help="to ours: precision for config.yaml")
    add("--opt-level", choices=("O1", "O2", "O3"), help="to ours: level for config.yaml")
    add(
        "--tensor-model-parallel-size",
        type=whole(),
        help="to ours: size for config.yaml; the vocabulary is padded for it",
    )
    add("--pipeline-model-parallel-size", type=whole(), help="to ours: size for config.yaml")
    add("--seq-length", type=whole(), help="from hf to ours: tokens in a training sequence (the longest that it takes)")
    add(
        "--ckpt-state-dtype",
        choices=("fp32",),
        help="from ours to ours: masters and moments in FP32, as torch_dist that megatron-core reads (as they were)",
    )
    add("--dtype", choices=("bf16", "fp16", "fp32"), help="to hf: dtype of weights that are not FP8 (bf16)")
    add(
        "--fp8",
        choices=("compressed-tensors", "fp8"),
        help="to hf: linear weights in E4M3, one scale per weight (compressed-tensors) or per 128 × 128 block (fp8)",
    )
    add("--max-shard-gb", type=real(above=0, most=1e9), help="to hf: largest file, in GB of 10⁹ bytes (5)")
    add("--verify", action=BooleanOptionalAction, default=True, help="compare logits at the end (on)")
    add("--verify-tokens", type=whole(most=1 << 20), help="number of random tokens to compare logits on (64)")
    add("--seed", type=seed, help="of these tokens (0)")
    given = vars(parser.parse_args(words))
    _check_no_flag_is_ignored(parser, given)
    return ConvertOptions(
        **{name: _DEFAULTS[name] if given[name] is None and name in _DEFAULTS else given[name] for name in given}
    )


_DEFAULTS: dict[str, Any] = {"dtype": "bf16", "max_shard_gb": 5.0, "verify_tokens": 64, "seed": 0}
#: Flags that only one --to reads.
_READ_BY = {
    "ours": (
        "precision",
        "opt_level",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "seq_length",
        "ckpt_state_dtype",
    ),
    "hf": ("dtype", "fp8", "max_shard_gb"),
}


def _check_no_flag_is_ignored(parser: Parser, given: dict[str, Any]) -> None:
    for target, names in _READ_BY.items():
        for name in names:
            if given["to"] != target and given[name] is not None:
                parser.error(
                    f"{flag_name(name)} {given[name]}: --to {given['to']} does not read it, --to {target} does; "
                    "leave it out"
                )
    for name in ("verify_tokens", "seed"):
        if not given["verify"] and given[name] is not None:
            parser.error(f"{flag_name(name)} {given[name]}: --no-verify compares nothing; leave one of them out")


def run(options: ConvertOptions) -> int:
    """Convert and verify; returns the exit status. The output gets its name when it is complete and compared."""
    from ..config.io import load_config, stated_settings
    from ..conversion.conversion import CheckpointFormat, check_new, open_source

    check_new(options.output)
    config = load_config(options.config) if options.config is not None else None
    stated = stated_settings(options.config) if options.config is not None else frozenset()
    source = open_source(
        options.input, iteration=options.iteration, config=config, stated=stated, vocab_size=options.vocab_size
    )
    num_params = sum(prod(shape) for shape in source.weights.shapes.values())
    console.print(f"{source.format.value}: {source.folder}, {num_params / 1e6:,.1f} M parameters", highlight=False)
    check_free_bytes(options.output, "--output", _num_bytes(source, options, num_params), "the converted checkpoint")
    converters = {
        CheckpointFormat.OURS: to_ours,
        CheckpointFormat.HUGGING_FACE: to_hugging_face,
        CheckpointFormat.MEGATRON_CORE: to_megatron_core,
    }
    with unfinished(options.output) as folder, writing_to(options.output, "--output"):
        message = converters[CheckpointFormat(options.to)](source, folder, options)
        if options.verify and not verify(source, folder, options):
            note = f"{options.output} is not written, since the logits differ; --no-verify writes it all the same"
            console.print(note, highlight=False, soft_wrap=True)
            return 1
        _move(folder, options.output)
    for line in (f"{options.to}: {options.output}", message):
        console.print(line, highlight=False, soft_wrap=True)
    return 0


@contextmanager
def unfinished(output: Path) -> Iterator[Path]:
    """A new folder beside `output`, of a name that no program takes for a checkpoint. It is removed at the end, also
    after SIGTERM.

    Raises:
        UserError: it exists.
    """
    output = output.resolve()  # "." has no name
    folder = output.with_name(f"{output.name}.partial")
    with writing_to(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.mkdir()
        except FileExistsError:
            raise UserError(
                f"{folder} exists: another conversion into {output} is under way, or one was killed; in that "
                f"case remove the folder"
            ) from None
    previous = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield folder
    finally:
        signal.signal(signal.SIGTERM, previous)
        shutil.rmtree(folder, ignore_errors=True)


def _move(folder: Path, output: Path) -> None:
    """Give a folder its name. An empty folder there may be a shell's working directory, so it is filled, not replaced.
    What tells a checkpoint from other folders comes last.
    """
    from ..checkpoint.files import TRACKER
    from ..conversion.hugging_face_folder import CONFIG_FILE

    if not output.exists():
        folder.replace(output.resolve())
        return
    for found in sorted(folder.iterdir(), key=lambda found: found.name in (CONFIG_FILE, TRACKER)):
        found.replace(output / found.name)


def _num_bytes(source: SourceCheckpoint, options: ConvertOptions, num_params: int) -> int:
    """Bytes that a conversion writes at least."""
    from ..conversion.conversion import CheckpointFormat

    if options.to == "hf":
        return num_params * (1 if options.fp8 else 4 if options.dtype == "fp32" else 2)
    if options.to == "ours" and source.format is CheckpointFormat.OURS and options.ckpt_state_dtype is None:
        return sum(file.stat().st_size for file in source.folder.iterdir() if file.is_file())
    if options.to == "ours" and source.format is CheckpointFormat.OURS:
        return 12 * num_params
    return 4 * num_params


def to_ours(source: SourceCheckpoint, folder: Path, options: ConvertOptions) -> str:
    """Write a checkpoint that --load takes into `folder`; returns a message for the user."""
    from ..conversion.conversion import CheckpointFormat, check_trainable, rewrite_ours, write_ours
    from ..data.hugging_face_tokenizer import import_tokenizer
    from ..data.tokenizer import padded_vocab_size

    config = with_flags(source.config, options)
    check_trainable(config, source.vocab_size)
    if source.format is CheckpointFormat.OURS:
        rewrite_ours(folder, source, config, in_fp32=options.ckpt_state_dtype == "fp32")
        tensors = "tensors are in FP32" if options.ckpt_state_dtype == "fp32" else "tensors are as they were"
        return f"{tensors}, optimizer state included; config.yaml is new"
    message = "weights alone: load it with --finetune"
    if source.format is CheckpointFormat.HUGGING_FACE:
        tokenizer = import_tokenizer(source.folder, folder / "tokenizer", options.output / "tokenizer")
        config = replace(config, data=tokenizer.data_section(config.data))
        message += f"; {tokenizer.message}"
    config = replace(config, model=replace(config.model, vocab_size=source.vocab_size))
    padded = padded_vocab_size(
        source.vocab_size, config.model.make_vocab_size_divisible_by, config.parallel.tensor_model_parallel_size
    )
    with progress("converting", num_weights(source)) as advance:
        write_ours(folder, source, config, padded_vocab_size=padded, on_weight=advance)
    return message


def to_megatron_core(source: SourceCheckpoint, folder: Path, options: ConvertOptions) -> str:
    """Write only the weights into `folder`, as torch_dist."""
    from ..conversion.conversion import write_megatron_core

    with progress("converting", num_weights(source)) as advance:
        write_megatron_core(folder, source, on_weight=advance)
    return "weights alone, in FP32"


def to_hugging_face(source: SourceCheckpoint, folder: Path, options: ConvertOptions) -> str:
    """Write files that transformers loads into `folder`."""
    from ..conversion import hugging_face_folder as folders
    from ..data.hugging_face_tokenizer import copy_tokenizer, export_tokenizer
    from ..models.registry import architecture_of

    config, vocab_size = source.config, source.vocab_size
    # Keep layers that the run kept out of FP8. A run without FP8 exports all layers in FP8.
    layers = range(config.model.num_layers) if config.precision.is_fp8 else ()
    layers_in_16_bits = tuple(layer for layer in layers if not config.is_fp8_layer(layer))
    export = folders.Export(
        folders.DTYPES[options.dtype],
        fp8_layout=folders.FP8Layout(options.fp8) if options.fp8 is not None else None,
        layers_in_16_bits=layers_in_16_bits,
        has_fp8_weights=_has_fp8_weights(config),
        power_of_two=config.precision.is_fp8 and config.precision.fp8_power_of_two_scales,
        max_shard_bytes=int(options.max_shard_gb * 1e9),
    )
    names_tokenizer = config.data.tokenizer_model is not None or config.data.vocab_file is not None
    if isinstance(source.weights, folders.HuggingFaceWeights) and not names_tokenizer:
        names = architecture_of(config.model).hugging_face()
        tokenizer = copy_tokenizer(
            source.folder,
            names.token_ids_of_json(source.weights.json),
            folder,
            model_changes_type=names.family_of(config.model) is not source.weights.family,
        )
    else:
        tokenizer = export_tokenizer(config.data, folder)
    with progress("converting", folders.num_weights(config.model, vocab_size)) as advance:
        folders.write_hugging_face(
            folder, source.weights, config.model, vocab_size, export, token_ids=tokenizer.token_ids, on_weight=advance
        )
    return tokenizer.message


def _has_fp8_weights(config: Config) -> bool:
    """Whether a run holds each linear weight in FP8 with one scale, derived from the whole master."""
    from ..dtypes import StorageDtype

    formats, precision = config.precision.formats, config.precision
    is_whole = config.parallel.tensor_model_parallel_size == 1 and formats.master_weight is not StorageDtype.SPLIT
    return precision.is_fp8 and formats.weight is StorageDtype.FP8 and is_whole


def with_flags(config: Config, options: ConvertOptions) -> Config:
    """The configuration with the command line's settings, and without the source run's folders.

    On one tensor-parallel rank, sequence parallelism is turned off.
    """
    from ..config.schema import CheckpointConfig

    config = replace(config, checkpoint=CheckpointConfig(), logging=replace(config.logging, output_dir=None))
    if options.tensor_model_parallel_size == 1:
        config = replace(config, parallel=replace(config.parallel, sequence_parallel=False))
    stages = options.pipeline_model_parallel_size
    if stages not in (None, config.parallel.pipeline_model_parallel_size):
        config = replace(config, parallel=config.parallel.with_stages(stages))
    names = {
        "precision": ("precision", "opt_level"),
        "parallel": ("tensor_model_parallel_size",),
        "model": ("seq_length",),
    }
    for section, fields in names.items():
        given = {name: getattr(options, name) for name in fields if getattr(options, name) is not None}
        config = replace(config, **{section: replace(getattr(config, section), **given)})
    return config


def num_weights(source: SourceCheckpoint) -> int:
    """Number of weights that a conversion handles."""
    from ..checkpoint.weights import places

    return sum(1 for _ in places(source.weights.shapes))


def verify(source: SourceCheckpoint, folder: Path, options: ConvertOptions) -> bool:
    """Compare the source's logits with those of the checkpoint in `folder`; whether they agree."""
    import torch

    from ..conversion import verification
    from ..conversion.conversion import open_source
    from ..conversion.hugging_face_folder import DTYPES

    model = replace(source.config.model, vocab_size=source.vocab_size)
    target = open_source(folder, config=replace(source.config, model=model) if options.to == "mcore" else None)
    stored = torch.float32
    if options.to == "hf":
        stored = DTYPES[options.dtype] if options.fp8 is None else torch.float8_e4m3fn
    if not verification.has_transformers():
        console.print("transformers is not installed: logits are compared on this project's side alone")
    with progress("comparing logits", verification.num_passes(source, target) * source.config.model.num_layers) as step:
        comparisons = verification.verify(
            source,
            target,
            stored,
            num_tokens=options.verify_tokens,
            seed=options.seed,
            target_name=options.output,
            on_layer=step,
        )
    for comparison in comparisons:
        console.print(str(comparison), highlight=False, soft_wrap=True)
    return all(comparison.passes for comparison in comparisons)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar on a terminal; yields the function that advances it by one."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def main(words: Sequence[str] | None = None, prog: str = "convert_checkpoint.py") -> int:
    """Exit status: 0, 1 if the comparison fails, or 2 after an error."""
    options = parse_arguments(words, prog)
    warnings.filterwarnings("ignore")
    prepare_megatron()
    return exit_status(partial(run, options), OSError)


if __name__ == "__main__":
    sys.exit(main())
