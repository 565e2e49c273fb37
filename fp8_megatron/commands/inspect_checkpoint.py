"""Show what a checkpoint holds: step, layout, level, tensors with dtypes and sizes, scales, files.

fp8-megatron inspect runs/a/checkpoints --values --verify

Reads this project's checkpoints, Megatron's in both formats (torch, torch_dist) and Hugging Face folders. It executes
no code from them. It reads tensors only with --values, one at a time.
"""

from __future__ import annotations

import json
import sys
import warnings
from argparse import BooleanOptionalAction
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..config.model import ModelConfig
from ..errors import printable
from .arguments import Parser, existing, whole
from .program import exit_status, prepare_megatron

if TYPE_CHECKING:
    from torch import Tensor

    from ..checkpoint.megatron_checkpoint import MegatronCheckpoint

#: Masters in the names of all formats.
_MASTERS = ("master", "param", "fp32_param", "fp32_from_fp16_params")
#: What `inspect` shows of Megatron's arguments beside the model's.
_MEGATRON_ARGUMENTS = (
    "padded_vocab_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "bf16",
    "fp16",
    "fp8",
)


@dataclass(frozen=True)
class InspectOptions:
    """The command line. `parse_arguments` describes each flag."""

    path: Path
    iteration: int | None = None
    filter: str = ""
    values: bool = False
    verify: bool = False
    json: bool = False


def parse_arguments(words: Sequence[str] | None = None, prog: str | None = None) -> InspectOptions:
    """Read the command line.

    Raises:
        SystemExit: a flag or a value is wrong; code 2.
    """
    parser = Parser(prog=prog, description=__doc__)
    add = parser.add_argument
    add(
        "path",
        type=existing,
        help="a folder given to --save here or in Megatron-LM, one checkpoint in it, or a Hugging Face folder",
    )
    add("--iteration", type=whole(least=0), help="which of several checkpoints (the latest)")
    add("--filter", default="", help="show only tensors whose name contains this")
    switch: dict[str, Any] = {"action": BooleanOptionalAction, "default": False}
    values = "read tensors and show amax, root mean square, the E4M3 scale from the amax, and non-finite values"
    add("--values", **switch, help=values)
    add("--verify", **switch, help="compare every file with its checksum in the manifest")
    add("--json", **switch, help="print JSON instead of tables")
    return InspectOptions(**vars(parser.parse_args(words)))


@dataclass(frozen=True)
class TensorLine:
    """One tensor of a checkpoint. The last four fields are set only with --values."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    amax: float | None = None
    rms: float | None = None
    e4m3_scale: float | None = None
    num_not_finite: int | None = None


@dataclass(frozen=True)
class Inspection:
    """Contents of a checkpoint."""

    format: str
    folder: str
    description: dict[str, Any]
    tensors: list[TensorLine]
    files: dict[str, int]
    problems: list[str]


def report_of(options: InspectOptions) -> Inspection:
    """Read the contents of a checkpoint.

    Raises:
        CheckpointError: the path has nothing readable.
    """
    from ..checkpoint.files import is_torch_files
    from ..conversion.conversion import CheckpointFormat, find_format

    kind, folder = find_format(options.path, options.iteration)
    problems = _problems(folder) if options.verify and kind is CheckpointFormat.OURS else []
    lines = _safetensors_lines if kind is CheckpointFormat.HUGGING_FACE else _torch_dist_lines
    lines = _torch_lines if is_torch_files(folder) else lines
    tensors = list(lines(folder, options, problems))
    ranks = folder.glob("mp_rank_*/*")
    return Inspection(
        format=kind.value,
        folder=str(folder),
        description=_description(kind.value, folder),
        tensors=tensors,
        files={
            str(file.relative_to(folder)): file.stat().st_size
            for file in sorted([*folder.iterdir(), *ranks])
            if file.is_file()
        },
        problems=problems,
    )


def _description(kind: str, folder: Path) -> dict[str, Any]:
    from ..checkpoint.description import read_description
    from ..checkpoint.files import is_megatron_checkpoint
    from ..checkpoint.megatron_loading import open_megatron_checkpoint
    from ..conversion.hugging_face_folder import CONFIG_FILE, read_json

    if kind == "ours":
        return read_description(folder)
    if kind == "hf":
        names = ("model_type", "torch_dtype", "dtype", "vocab_size", "tie_word_embeddings", "quantization_config")
        settings = read_json(folder / CONFIG_FILE)
        return {name: settings[name] for name in names if name in settings}
    if is_megatron_checkpoint(folder):
        return _of_megatron(open_megatron_checkpoint(folder))
    number = folder.name.removeprefix("iter_")
    return {"iteration": int(number)} if number.isdigit() else {}


def _of_megatron(checkpoint: MegatronCheckpoint) -> dict[str, Any]:
    """Counts, whether moments are there, and Megatron's arguments of model and layout as far as it saved them."""
    names = [*ModelConfig.__dataclass_fields__, *_MEGATRON_ARGUMENTS]
    known = {name: checkpoint.arguments[name] for name in names if name in checkpoint.arguments}
    return {
        "iteration": checkpoint.iteration,
        "consumed_samples": checkpoint.consumed_samples,
        "optimizer": "saved" if checkpoint.has_moments else "not saved",
        **{name: value for name, value in known.items() if isinstance(value, bool | int | float | str)},
    }


def _torch_dist_lines(folder: Path, options: InspectOptions, problems: list[str]) -> Iterator[TensorLine]:
    """Tensors shared by all ranks, then the tensors that each rank keeps for itself."""
    from ..checkpoint.metadata_file import read_metadata
    from ..checkpoint.torch_dist import TorchDistReader

    reader = TorchDistReader(folder) if options.values else None
    for name, entry in sorted(read_metadata(folder).items()):
        if options.filter in name:
            nbytes = prod(entry.shape) * entry.dtype.itemsize
            statistics = _statistics(reader.read_whole(name)) if reader is not None else {}
            yield TensorLine(name, entry.shape, _name(entry.dtype), nbytes, **statistics)
    for file in sorted(folder.glob("rank_*.safetensors")):
        yield from _file_lines(file, options, problems, prefix=f"{file.stem}/")


def _torch_lines(folder: Path, options: InspectOptions, problems: list[str]) -> Iterator[TensorLine]:
    """Tensors of every model-parallel rank in Megatron's ``torch``: ``mp_rank_00/model.<name>``, and of its optimizer.

    If a file cannot be read, this is added to `problems`.
    """
    from ..checkpoint.files import CheckpointError
    from ..checkpoint.pickles import read_megatron_file

    for file in sorted(folder.glob("mp_rank_*/*.pt")):
        try:
            content = read_megatron_file(file)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        prefix = "optimizer." if file.stem == "distrib_optim" else ""
        for name, tensor in _tensors_in(content):
            name = f"{file.parent.name}/{prefix}{name}"
            if options.filter in name:
                statistics = _statistics(tensor) if options.values and tensor.is_floating_point() else {}
                yield TensorLine(name, tuple(tensor.shape), _name(tensor.dtype), tensor.nbytes, **statistics)


def _tensors_in(content: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in nested containers, under its keys joined by dots."""
    from torch import Tensor

    if isinstance(content, Tensor):
        yield name, content
        return
    if isinstance(content, list | tuple):
        content = dict(enumerate(content))
    for key, value in content.items() if isinstance(content, dict) else ():
        text = "_".join(map(_name, key)) if isinstance(key, tuple) else str(key)
        yield from _tensors_in(value, f"{name}.{text}" if name else text)


def _safetensors_lines(folder: Path, options: InspectOptions, problems: list[str]) -> Iterator[TensorLine]:
    from ..conversion.safetensors_files import SafetensorsFolder

    for file in sorted(set(SafetensorsFolder(folder).file_of.values())):
        yield from _file_lines(folder / file, options, problems)


def _file_lines(path: Path, options: InspectOptions, problems: list[str], *, prefix: str = "") -> Iterator[TensorLine]:
    """Tensors of a file. If it cannot be opened, this is added to `problems`."""
    from ..checkpoint.files import CheckpointError
    from ..conversion.safetensors_files import open_safetensors

    try:
        opened = open_safetensors(path)
    except CheckpointError as error:
        problems.append(str(error))
        return
    with opened as file:
        for name in file.keys():  # noqa: SIM118  # it is not a mapping
            if options.filter not in prefix + name:
                continue
            tensor = file.get_tensor(name)  # mapped, not read
            statistics = _statistics(tensor) if options.values and tensor.is_floating_point() else {}
            yield TensorLine(prefix + name, tuple(tensor.shape), _name(tensor.dtype), tensor.nbytes, **statistics)


def _statistics(tensor: Tensor) -> dict[str, Any]:
    """The figures of --values, over finite elements. FP8 payloads are taken without their scale."""
    import torch

    from ..dtypes import E4M3, MAX_FINITE

    values = tensor.float().flatten()
    finite = values[torch.isfinite(values)]
    if finite.numel() == 0:
        return {"num_not_finite": values.numel()}
    amax = finite.abs().max().item()
    rms = finite.double().square().mean().sqrt().item()
    return {
        "amax": amax,
        "rms": rms,
        "e4m3_scale": amax / MAX_FINITE[E4M3],
        "num_not_finite": values.numel() - finite.numel(),
    }


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _problems(folder: Path) -> list[str]:
    from ..checkpoint.manifest import problem_with, read_manifest

    return [problem for record in read_manifest(folder) if (problem := problem_with(folder, record)) is not None]


def print_report(report: Inspection, console: Console, *, verified: bool) -> None:
    """Tables for a person. Names and values are a foreign file's."""

    def line(text: str) -> None:
        console.print(printable(text), highlight=False, markup=False, soft_wrap=True)

    line(f"{report.format}: {report.folder}")
    for name, value in report.description.items():
        line(f"  {name} = {value}")
    has_values = any(line.num_not_finite is not None for line in report.tensors)
    table = Table(box=None)
    columns = ["tensor", "shape", "dtype", "MB"] + (["amax", "rms", "amax / 448", "not finite"] if has_values else [])
    for column in columns:
        table.add_column(column, justify="left" if column in ("tensor", "shape", "dtype") else "right", no_wrap=True)
    for tensor in report.tensors:
        shape = " × ".join(map(str, tensor.shape))
        cells = [escape(printable(tensor.name)), shape, tensor.dtype, f"{tensor.nbytes / 1e6:.3f}"]
        if has_values:
            numbers = (tensor.amax, tensor.rms, tensor.e4m3_scale)
            cells += ["" if number is None else f"{number:.3e}" for number in numbers]
            cells.append("" if tensor.num_not_finite is None else str(tensor.num_not_finite))
        table.add_row(*cells)
    console.print(table)
    for group, (count, num_params, nbytes) in sums(report).items():
        line(f"{group}: {count} tensors, {num_params:,} elements, {nbytes / 1e6:,.3f} MB")
    total = sum(report.files.values())
    line(f"{len(report.files)} files, {total / 1e6:,.3f} MB on disk")
    if verified and not report.problems:
        line("every file is as the manifest says" if report.format == "ours" else "no manifest to verify by")
    for problem in report.problems:
        line(problem)


def sums(report: Inspection) -> dict[str, tuple[int, int, int]]:
    """Kind of tensor → (tensors, elements, bytes): weights, moments, tensors of single ranks."""
    found: dict[str, tuple[int, int, int]] = {}
    for line in report.tensors:
        group = _group(line.name)
        count, num_params, nbytes = found.get(group, (0, 0, 0))
        found[group] = (count + 1, num_params + prod(line.shape), nbytes + line.nbytes)
    return found


def _group(name: str) -> str:
    """The kind of tensor that a name tells, in every format."""
    if name.startswith("rank_"):
        return "of single ranks"
    is_of_rank = name.startswith("mp_rank_")
    parts = (name.partition("/")[2] if is_of_rank else name).split(".")
    if "optimizer" not in parts:
        return "other" if is_of_rank and not parts[0].startswith("model") else "weights"
    from ..optimizer.rules.rule import known_states

    known = {*_MASTERS, *known_states()}
    return next((f"optimizer.{part}" for part in parts if part in known), "optimizer")


def main(words: Sequence[str] | None = None, prog: str = "inspect_checkpoint.py") -> int:
    """Exit status: 0, 1 if a file is damaged, or 2 after an error."""
    options = parse_arguments(words, prog)
    warnings.filterwarnings("ignore")
    prepare_megatron()
    return exit_status(partial(run, options), OSError)


def run(options: InspectOptions) -> int:
    """Read and print a checkpoint's contents; returns the exit status."""
    report = report_of(options)
    if options.filter and not report.tensors:
        print(f"--filter {options.filter}: no tensor's name contains this", file=sys.stderr)
    if options.json:
        print(json.dumps(asdict(report), indent=1))
    else:
        console = Console()
        print_report(report, console if console.is_terminal else Console(width=200), verified=options.verify)
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
