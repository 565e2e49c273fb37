"""Convert a checkpoint between this project, megatron-core (torch_dist) and Hugging Face (GPT-2, Llama).

fp8-megatron convert --input gpt2/ --output runs/gpt2 --to ours --precision fp8
fp8-megatron convert --input runs/a --output exported/ --to hf --dtype bf16

The format of --input is detected. Weights are converted one at a time, so memory holds one weight and its converted
form. At the end, logits on random tokens are compared, one layer at a time: source with target, and this project's
model with transformers'.
"""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .program import exit_status, prepare_megatron

if TYPE_CHECKING:
    from ..config.schema import Config
    from ..conversion.conversion import Source

console = Console(stderr=True)


@dataclass(frozen=True)
class Options:
    """Convert a checkpoint between this project, megatron-core (torch_dist) and Hugging Face (GPT-2, Llama)."""

    input: Path
    """A Hugging Face model folder, a folder given to --save, or a torch_dist folder of megatron-core."""
    output: Path
    """Folder to create."""
    to: Literal["ours", "hf", "mcore"]
    """ours: a folder for --load; hf: config.json, safetensors and tokenizer; mcore: torch_dist in FP32."""
    iteration: int | None = None
    """Which of several checkpoints in --input. Default: the latest."""
    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE.yaml")] = None
    """Settings of a run: the model of a megatron-core checkpoint (with vocab_size), or the new config.yaml beside a
    checkpoint of ours."""
    precision: Literal["bf16", "fp16", "te", "fp8"] | None = None
    """To ours: precision for config.yaml."""
    opt_level: Literal["O1", "O2", "O3"] | None = None
    """To ours: level for config.yaml."""
    tensor_model_parallel_size: int | None = None
    """To ours: size for config.yaml. The vocabulary is padded for it."""
    pipeline_model_parallel_size: int | None = None
    """To ours: size for config.yaml."""
    seq_length: int | None = None
    """From hf to ours: tokens in a training sequence. Default: the longest that the model takes."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """To hf: dtype of weights that are not FP8."""
    fp8: Literal["compressed-tensors", "fp8"] | None = None
    """To hf: linear weights in E4M3, with one scale per weight (compressed-tensors) or per 128 × 128 block (fp8)."""
    max_shard_gb: float = 5.0
    """To hf: largest file, in GB of 10⁹ bytes."""
    verify: bool = True
    """Compare logits at the end."""
    verify_tokens: int = 64
    """Number of random tokens to compare logits on, at least 1."""
    seed: int = 0
    """Seed of these tokens."""


def run(options: Options) -> int:
    """Convert and verify; returns the exit status."""
    from ..config.checks import ConfigError
    from ..config.io import load_config
    from ..conversion.conversion import Format, check_new, open_source

    if options.verify and options.verify_tokens < 1:
        raise ConfigError(f"verify_tokens({options.verify_tokens}) compares nothing; give 1 or more, or --no-verify")
    check_new(options.output)
    config = load_config(options.config) if options.config is not None else None
    source = open_source(options.input, iteration=options.iteration, config=config)
    num_params = sum(prod(shape) for shape in source.weights.shapes.values())
    console.print(f"{source.format.value}: {source.folder}, {num_params / 1e6:,.1f} M parameters", highlight=False)
    converters = {Format.OURS: to_ours, Format.HUGGING_FACE: to_hugging_face, Format.MEGATRON_CORE: to_megatron_core}
    message = converters[Format(options.to)](source, options)
    for line in (f"{options.to}: {options.output}", message):
        console.print(line, highlight=False, soft_wrap=True)
    return verify(source, options) if options.verify else 0


def to_ours(source: Source, options: Options) -> str:
    """Write a checkpoint that --load takes; returns a message for the user."""
    from ..conversion.conversion import Format, check_trainable, rewrite_ours, write_ours
    from ..data.hugging_face_tokenizer import import_tokenizer
    from ..data.tokenizer import padded_vocab_size

    config = with_flags(source.config, options)
    check_trainable(config, source.vocab_size)
    if source.format is Format.OURS:
        rewrite_ours(options.output, source, config)
        return "tensors are as they were, optimizer state included; config.yaml is new"
    message = "weights alone: load it with --finetune"
    if source.format is Format.HUGGING_FACE:
        tokenizer = import_tokenizer(source.folder, options.output / "tokenizer")
        config = replace(config, data=tokenizer.data_section(config.data))
        message += f"; {tokenizer.message}"
    config = replace(config, model=replace(config.model, vocab_size=source.vocab_size))
    padded = padded_vocab_size(
        source.vocab_size, config.model.make_vocab_size_divisible_by, config.parallel.tensor_model_parallel_size
    )
    with progress("converting", num_weights(source)) as advance:
        write_ours(options.output, source, config, padded_vocab_size=padded, on_weight=advance)
    return message


def to_megatron_core(source: Source, options: Options) -> str:
    """Write only the weights, as torch_dist."""
    from ..conversion.conversion import write_megatron_core

    with progress("converting", num_weights(source)) as advance:
        write_megatron_core(options.output, source, on_weight=advance)
    return "weights alone, in FP32"


def to_hugging_face(source: Source, options: Options) -> str:
    """Write a folder that transformers loads."""
    from ..conversion import hugging_face_folder as folders
    from ..data.hugging_face_tokenizer import export_tokenizer

    config, vocab_size = source.config, source.vocab_size
    # Keep layers that the run kept out of FP8. A run without FP8 exports all layers in FP8.
    layers = range(config.model.num_layers) if config.precision.is_fp8 else ()
    layers_in_16_bits = tuple(layer for layer in layers if not config.is_fp8_layer(layer))
    export = folders.Export(
        folders.DTYPES[options.dtype],
        fp8_layout=folders.FP8Layout(options.fp8) if options.fp8 is not None else None,
        layers_in_16_bits=layers_in_16_bits,
        max_shard_bytes=int(options.max_shard_gb * 1e9),
    )
    output = options.output.resolve()  # "." has no name
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        tokenizer = export_tokenizer(config.data, partial)
        with progress("converting", folders.num_weights(config.model, vocab_size)) as advance:
            folders.write_hugging_face(
                partial,
                source.weights,
                config.model,
                vocab_size,
                export,
                token_ids=tokenizer.token_ids,
                on_weight=advance,
            )
        if output.exists():  # empty, and possibly a shell's working directory, so it is filled and not replaced
            for path in sorted(partial.iterdir(), key=lambda path: path.name == folders.CONFIG_FILE):
                path.replace(output / path.name)
        else:
            partial.replace(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return tokenizer.message


def with_flags(config: Config, options: Options) -> Config:
    """The configuration with the command line's settings, and without the source run's folders.

    On one tensor-parallel rank, sequence parallelism is turned off.
    """
    from ..config.schema import CheckpointConfig

    config = replace(config, checkpoint=CheckpointConfig(), logging=replace(config.logging, output_dir=None))
    if options.tensor_model_parallel_size == 1:
        config = replace(config, parallel=replace(config.parallel, sequence_parallel=False))
    names = {
        "precision": ("precision", "opt_level"),
        "parallel": ("tensor_model_parallel_size", "pipeline_model_parallel_size"),
        "model": ("seq_length",),
    }
    for section, fields in names.items():
        given = {name: getattr(options, name) for name in fields if getattr(options, name) is not None}
        config = replace(config, **{section: replace(getattr(config, section), **given)})
    return config


def num_weights(source: Source) -> int:
    """Number of weights that a conversion handles."""
    from ..checkpoint.weights import places

    return sum(1 for _ in places(source.weights.shapes))


def verify(source: Source, options: Options) -> int:
    """Compare logits; returns the exit status."""
    import torch

    from ..conversion import verification
    from ..conversion.conversion import open_source
    from ..conversion.hugging_face_folder import DTYPES

    target = open_source(options.output, config=source.config if options.to == "mcore" else None)
    stored = torch.float32
    if options.to == "hf":
        stored = DTYPES[options.dtype] if options.fp8 is None else torch.float8_e4m3fn
    if not verification.has_transformers():
        console.print("transformers is not installed: logits are compared on this project's side alone")
    with progress("comparing logits", verification.num_passes(source, target) * source.config.model.num_layers) as step:
        comparisons = verification.verify(
            source, target, stored, num_tokens=options.verify_tokens, seed=options.seed, on_layer=step
        )
    for comparison in comparisons:
        console.print(str(comparison), highlight=False, soft_wrap=True)
    return 0 if all(comparison.passes for comparison in comparisons) else 1


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar on a terminal; yields the function that advances it by one."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def main(words: Sequence[str] | None = None, prog: str = "convert_checkpoint.py") -> int:
    """Exit status: 0, 1 if the comparison fails, or 2 after an error."""
    options = tyro.cli(Options, args=words, prog=prog)
    warnings.filterwarnings("ignore")
    prepare_megatron()
    return exit_status(partial(run, options), OSError)


if __name__ == "__main__":
    sys.exit(main())
