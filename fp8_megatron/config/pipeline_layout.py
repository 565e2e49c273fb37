"""Which layers each pipeline stage holds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from .fields import MAX_LAYERS
from .parallel import ParallelConfig
from .words import shortened

_LAYER, _EMBEDDING, _LOSS = "t", "E", "L"
#: Repetitions of a layout, in the order in which Megatron replaces them: ``(tt|)*3``, then ``t*3``.
_REPEATED = (re.compile(r"\(([^)]+)\)\*(\d{1,9})"), re.compile(r"(.)\*(\d{1,9})"))


@dataclass(frozen=True)
class PipelineLayout:
    """The layers of every model chunk.

    Attributes:
        chunks: by stage, then by virtual stage: the chunk's layers, counted over the whole model. A chunk may hold no
            layer.
        is_interleaved: whether the schedule is the interleaved one.
    """

    chunks: tuple[tuple[range, ...], ...]
    is_interleaved: bool

    @property
    def num_stages(self) -> int:
        """Pipeline stages."""
        return len(self.chunks)

    @property
    def virtual_size(self) -> int | None:
        """Virtual stages per rank; None for the plain 1F1B schedule."""
        return len(self.chunks[0]) if self.is_interleaved else None

    @property
    def is_even(self) -> bool:
        """Whether every chunk has as many layers."""
        return len({len(chunk) for stage in self.chunks for chunk in stage}) == 1

    def layers_of(self, stage: int) -> list[int]:
        """Layers of a stage, all its chunks together."""
        return [layer for chunk in self.chunks[stage] for layer in chunk]

    def rows(self) -> Iterator[range]:
        """Layers of every chunk in the order of the model."""
        for virtual in range(len(self.chunks[0])):
            for stage in self.chunks:
                yield stage[virtual]

    @property
    def text(self) -> str:
        """The layout in Megatron's language: ``Et*3|t*5|t*4L``."""
        sizes = [len(layers) for layers in self.rows()]
        rows = [f"{_LAYER}*{size}" if size > 1 else _LAYER * size for size in sizes]
        return _EMBEDDING + "|".join(rows) + _LOSS


@lru_cache(maxsize=256)
def pipeline_layout(parallel: ParallelConfig, num_layers: int) -> PipelineLayout:
    """The layout that the settings ask for.

    Raises:
        ValueError: there is none. One line with values and fix.
    """
    pp = parallel.pipeline_model_parallel_size
    _check_conflicts(parallel)
    if parallel.pipeline_model_parallel_layout is not None:
        counts = _counts_of_text(parallel.pipeline_model_parallel_layout, pp, num_layers)
    else:
        counts = _counts_of_numbers(parallel, num_layers)
    virtual = len(counts) // pp
    wanted = parallel.num_virtual_stages_per_pipeline_rank
    if wanted not in (None, virtual):
        raise ValueError(
            f"num_virtual_stages_per_pipeline_rank({wanted}), but pipeline_model_parallel_layout has {len(counts)} "
            f"stages / pipeline_model_parallel_size({pp}) = {virtual}; drop the former"
        )
    rows, first = [], 0
    for count in counts:
        rows.append(range(first, first + count))
        first += count
    return PipelineLayout(tuple(tuple(rows[stage::pp]) for stage in range(pp)), is_interleaved=virtual > 1)


def _check_conflicts(parallel: ParallelConfig) -> None:
    """Raise `ValueError` for two settings that divide the layers in two ways."""
    ends = [
        f"{name}({size})"
        for name in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
        if (size := getattr(parallel, name)) is not None
    ]
    switches = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    accounted = [name for name in switches if getattr(parallel, name)]
    layout, per_virtual = parallel.pipeline_model_parallel_layout, parallel.num_layers_per_virtual_pipeline_stage
    sized = [f"num_layers_per_virtual_pipeline_stage({per_virtual})"] if per_virtual is not None else []
    if layout is not None and (others := ends + accounted + sized):
        raise ValueError(
            f"pipeline_model_parallel_layout({shortened(layout)}) and {others[0]} both divide the layers; drop one"
        )
    if ends and accounted:
        raise ValueError(f"{ends[0]} and {accounted[0]} both divide the layers; drop one")
    if ends and sized:
        raise ValueError(
            f"{sized[0]} cuts stages of one size, but {ends[0]} makes stages of several; give "
            f"--num-virtual-stages-per-pipeline-rank instead of the former"
        )
    if sized and (virtual := parallel.num_virtual_stages_per_pipeline_rank) is not None:
        raise ValueError(f"{sized[0]} and num_virtual_stages_per_pipeline_rank({virtual}) say the same; drop one")


def _counts_of_numbers(parallel: ParallelConfig, num_layers: int) -> list[int]:
    """Layers of every chunk in the order of the model, from the settings that are numbers and switches.

    The embedding and the loss count as a layer each if they are accounted for.
    """
    pp = parallel.pipeline_model_parallel_size
    stages = _stage_sizes(parallel, num_layers)
    per_virtual, virtual = parallel.num_layers_per_virtual_pipeline_stage, parallel.num_virtual_stages_per_pipeline_rank
    name = f"num_virtual_stages_per_pipeline_rank({virtual})"
    if per_virtual is not None:
        name = f"num_layers_per_virtual_pipeline_stage({per_virtual})"
    if pp == 1 and (per_virtual is not None or (virtual or 1) > 1):
        raise ValueError(
            f"{name} needs pipeline stages, but pipeline_model_parallel_size(1) has one; raise it or drop the former"
        )
    if per_virtual is not None:
        if stages[0] % per_virtual or stages[0] == per_virtual:
            raise ValueError(
                f"{name} does not divide {_counted(parallel, num_layers)} / pipeline_model_parallel_size({pp}) = "
                f"{stages[0]} layers of a stage into two or more equal parts; choose a smaller divisor of {stages[0]}"
            )
        virtual = stages[0] // per_virtual
    virtual = virtual or 1
    stage = next((stage for stage, size in enumerate(stages) if size % virtual), None)
    if stage is not None:
        raise ValueError(
            f"{name} does not divide the {stages[stage]} layers of stage {stage} into equal parts; choose a divisor of "
            f"{stages[stage]}"
        )
    counts = [size // virtual for _ in range(virtual) for size in stages]
    counts[0] -= parallel.account_for_embedding_in_pipeline_split
    counts[-1] -= parallel.account_for_loss_in_pipeline_split
    return counts


def _counted(parallel: ParallelConfig, num_layers: int) -> str:
    """What the stages share, in words."""
    parts = [f"num_layers({num_layers})"]
    parts += ["the embedding"] if parallel.account_for_embedding_in_pipeline_split else []
    parts += ["the loss"] if parallel.account_for_loss_in_pipeline_split else []
    return parts[0] if len(parts) == 1 else f"({' + '.join(parts)})"


def _stage_sizes(parallel: ParallelConfig, num_layers: int) -> list[int]:
    """Layers of every stage; the embedding and the loss count where they are accounted for."""
    pp = parallel.pipeline_model_parallel_size
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    if first is None and last is None:
        total = num_layers
        total += parallel.account_for_embedding_in_pipeline_split + parallel.account_for_loss_in_pipeline_split
        if total % pp:
            counted = _counted(parallel, num_layers)
            equation = f"{counted} % pipeline_model_parallel_size({pp}) = {total % pp}"
            raise ValueError(
                f"{equation}; choose a number of stages that divides the layers, or give "
                f"--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers or "
                f"--pipeline-model-parallel-layout"
            )
        return [total // pp] * pp
    given = {
        name: size
        for name, size in (
            ("decoder_first_pipeline_num_layers", first),
            ("decoder_last_pipeline_num_layers", last),
        )
        if size is not None
    }
    names = " and ".join(f"{name}({size})" for name, size in given.items())
    if pp < 2:
        raise ValueError(f"{names} needs pipeline stages, but pipeline_model_parallel_size({pp}) has one; drop it")
    middle, stages = num_layers - sum(given.values()), pp - len(given)
    if stages == 0 and middle != 0:
        raise ValueError(
            f"{names} make {num_layers - middle} layers of two stages, but num_layers is {num_layers}; drop one"
        )
    if stages > 0 and (middle <= 0 or middle % stages):
        left = f"num_layers({num_layers}) - {names.replace(' and ', ' - ')} = {middle}"
        raise ValueError(f"{left} for the other stages, {stages}; choose sizes that leave a positive multiple of it")
    sizes = [middle // stages if stages else 0] * pp
    sizes[0] = sizes[0] if first is None else first
    sizes[-1] = sizes[-1] if last is None else last
    return sizes


def _counts_of_text(text: str, pp: int, num_layers: int) -> list[int]:
    """Layers of every chunk in the order of the model, from Megatron's language (``Ettt|(tt|)*2,ttL``)."""
    name = f"pipeline_model_parallel_layout({shortened(text)})"
    rows = _unrolled(text, name).split("|")
    unknown = sorted({letter for row in rows for letter in row} - {_LAYER, _EMBEDDING, _LOSS})
    if unknown:
        what = {"m": "multi-token prediction, which there is not"}.get(unknown[0], "no kind of layer")
        raise ValueError(f"{name}: {unknown[0]!r} is {what}; use E (embedding), t (layer), L (loss), | and *")
    if len(rows) % pp:
        raise ValueError(
            f"{name} has {len(rows)} stages, which pipeline_model_parallel_size({pp}) does not divide; separate a "
            f"multiple of {pp} stages by |"
        )
    if pp == 1 and len(rows) > 1:
        raise ValueError(f"{name} has {len(rows)} stages, but pipeline_model_parallel_size is 1; raise it")
    letters = "".join(rows)
    wrong_end = not rows[0].startswith(_EMBEDDING) or not rows[-1].endswith(_LOSS)
    if wrong_end or letters.count(_EMBEDDING) != 1 or letters.count(_LOSS) != 1:
        raise ValueError(f"{name}: the first stage begins with the only E and the last one ends with the only L")
    counts = [row.count(_LAYER) for row in rows]
    if sum(counts) != num_layers:
        raise ValueError(f"{name} has {sum(counts)} layers (t), but num_layers is {num_layers}; make them equal")
    return counts


def _unrolled(text: str, name: str) -> str:
    """A layout without its repetitions and commas."""
    text = text.replace(",", "").replace(" ", "")
    for pattern in _REPEATED:
        if _unrolled_length(pattern, text) > 4 * MAX_LAYERS:
            raise ValueError(f"{name} is longer than a model of {MAX_LAYERS} layers; lower a repetition")
        text = pattern.sub(lambda found: found[1] * int(found[2]), text)
    return text


def _unrolled_length(pattern: re.Pattern[str], text: str) -> int:
    """The length of `text` after its repetitions are replaced."""
    return len(text) + sum(len(found[1]) * int(found[2]) for found in pattern.finditer(text))
