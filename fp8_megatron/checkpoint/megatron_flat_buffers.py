"""State of Megatron-LM's distributed optimizer as flat buffers of model-parallel ranks, a tensor a bucket.

A file does not say where a parameter lies in a bucket. What it says decides: the sizes of buckets, and each 16-bit
weight, which is its master rounded. Parameters whose matrices ranks share have an optimizer and buffers of
their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..config.model import ModelConfig
from ..config.parallel import layer_shares
from ..config.pipeline_layout import PipelineLayout, pipeline_layout
from ..config.schema import ParallelConfig
from ..models.keys import LAYERS, OUTPUT_LAYER, WORD_EMBEDDING
from ..models.registry import architecture_of, holds_matrices, layers_of_key, num_matrices
from ..sharding.region import Shape
from .files import CheckpointError
from .megatron_layout import (
    ChunkOrder,
    MatrixOrder,
    Name,
    Piece,
    axis_of_ranks,
    local_shape,
    merged,
    numels_of,
    part_of,
    places_in_buckets,
)
from .same_model import settings_of_arguments
from .torch_dist import TorchDistReader, Wanted

if TYPE_CHECKING:
    from .megatron_torch_dist import TorchDist

#: An optimizer of several, its group of ranks with duplicates, a buffer of it, a bucket, and what of it.
_FLAT = re.compile(
    r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_.*\.bucket_idx_(\d+)"
    r"\.(param|exp_avg|exp_avg_sq)"
)
#: Megatron's arguments that divide layers over stages otherwise than evenly, with the types of their values.
_DIVISION = {
    "pipeline_model_parallel_layout": str,
    "decoder_first_pipeline_num_layers": int,
    "decoder_last_pipeline_num_layers": int,
    "account_for_embedding_in_pipeline_split": bool,
    "account_for_loss_in_pipeline_split": bool,
}
#: Where a parameter is in the buffers: (stage, buffer, bucket, first element).
FlatPlace = tuple[int, int, int, int]
#: A buffer: whether it is of the optimizer of shared matrices, the group of ranks, and its number.
_Buffer = tuple[bool, int, int]


def has_flat_buffers(keys: Iterable[str]) -> bool:
    """Whether keys of a checkpoint are of flat buffers."""
    return any(map(_FLAT.fullmatch, keys))


class FlatBuffers:
    """The buffers of one checkpoint.

    Raises:
        CheckpointError: what the file says does not decide where parameters lie.
    """

    def __init__(self, checkpoint: TorchDist, reader: TorchDistReader) -> None:
        self._checkpoint, self._reader = checkpoint, reader
        arguments = checkpoint.arguments
        if not {"tensor_model_parallel_size", "pipeline_model_parallel_size"} <= arguments.keys():
            raise self._unknown("unknown parallel sizes")
        self._shares = layer_shares(arguments)
        self._stages: int = arguments["pipeline_model_parallel_size"]
        self._buckets = self._found_buckets()
        self._num_chunks = len({buffer for is_apart, _, buffer in self._buckets if not is_apart})
        self._layout = self._layout_of(arguments)
        self._order, self._places = self._with_known_order()

    def read(self, kind: str, name: Name) -> Tensor:
        """As `MegatronCheckpoint.read`."""
        if holds_matrices(name.key):
            own, holders = [Piece(name, matrix) for matrix in range(self._order.num_matrices)], self._shares.matrices
            whole = torch.stack([self._whole(kind, piece, holder) for holder in range(holders) for piece in own])
        else:
            whole = self._whole(kind, Piece(name), 0)
        if kind == "master":
            self._checkpoint.checked(self._checkpoint.in_model_dtype(whole), self._checkpoint.weight(name), name)
        return whole

    def _whole(self, kind: str, piece: Piece, holder: int) -> Tensor:
        ranks, is_joined = range(self._ranks_of(piece)), self._order.matrices is MatrixOrder.JOINED
        parts = [self._part(kind, piece, rank, self._places, is_joined, holder) for rank in ranks]
        return merged(piece.name.key, parts, is_gated=self._checkpoint.is_gated)

    def _unknown(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._checkpoint.folder} holds the optimizer's buffers of {what}; save it again with "
            f"--dist-ckpt-optim-fully-reshardable, or give --no-load-optim"
        )

    def _found_buckets(self) -> dict[_Buffer, list[str]]:
        """The keys of each buffer's buckets, in their order."""
        keys: dict[_Buffer, dict[int, str]] = {}
        for key in self._reader.shapes:
            match = _FLAT.fullmatch(key)
            if match is None or match[5] != "param":
                continue
            if int(match[1] or 0) > (self._shares.matrices > 1):
                raise self._unknown("several optimizers")
            buckets = keys.setdefault((match[1] == "1", int(match[2]), int(match[3])), {})
            buckets[int(match[4])] = key.removesuffix(".param")
        return {place: [found[index] for index in sorted(found)] for place, found in keys.items()}

    def _layout_of(self, arguments: Mapping[str, Any]) -> PipelineLayout:
        """The layers of every stage and model chunk, by Megatron's arguments."""
        division = {name: arguments[name] for name in _DIVISION if arguments.get(name)}
        unread = next((name for name, value in division.items() if not isinstance(value, _DIVISION[name])), None)
        if unread is not None:
            raise self._unknown(f"unknown stages ({unread} cannot be read)")
        parallel = ParallelConfig(
            pipeline_model_parallel_size=self._stages,
            num_virtual_stages_per_pipeline_rank=self._num_chunks if self._num_chunks > 1 else None,
            **division,
        )
        try:
            return pipeline_layout(parallel, self._model.num_layers)
        except ValueError as error:
            raise self._unknown(f"unknown stages ({error})") from None

    @cached_property
    def _model(self) -> ModelConfig:
        num_layers = max(shape[0] for key, shape in self._checkpoint.shapes.items() if key.startswith(LAYERS))
        return ModelConfig(**{**settings_of_arguments(self._checkpoint.arguments), "num_layers": num_layers})

    @cached_property
    def _layers(self) -> dict[str, tuple[int, ...]]:
        """All keys of weights, each with the layers that have it."""
        return {key: layers_of_key(self._model, key) for key in self._checkpoint.shapes}

    def _ranks_of(self, piece: Piece) -> int:
        """Tensor-parallel ranks that have parts of it."""
        if axis_of_ranks(piece.name.key) is None:
            return 1
        return self._shares.weight if piece.matrix is None else self._shares.matrix

    def _is_apart(self, piece: Piece) -> bool:
        """Whether it is in the buffers of an optimizer of shared matrices."""
        return piece.matrix is not None and self._shares.matrices > 1

    def _part(
        self,
        kind: str,
        piece: Piece,
        rank: int,
        places: Mapping[Piece, FlatPlace],
        is_joined: bool,
        holder: int = 0,
    ) -> Tensor:
        stage, buffer, bucket, start = places[piece]
        is_apart, group = self._is_apart(piece), stage * self._shares.weight + rank
        if is_apart:
            group = (stage * self._shares.matrices + holder) * self._shares.matrix + rank
        shape = self._local_shape(piece)
        is_transposed = is_joined and piece.matrix is not None
        value = torch.empty(shape[::-1] if is_transposed else shape)
        stored = f"{self._buckets[is_apart, group, buffer][bucket]}.{'param' if kind == 'master' else kind}"
        self._reader.read(stored, [Wanted((start,), (value.numel(),), value.view(-1))])
        return value.mT if is_transposed else value

    def _local_shape(self, piece: Piece) -> Shape:
        name = piece.name
        # The last stage's copy of the embedding has no shape of its own.
        is_copy = name.key == OUTPUT_LAYER and name.key not in self._checkpoint.shapes
        shape = self._checkpoint.shapes[WORD_EMBEDDING if is_copy else name.key]
        shape = shape[(name.layer is not None) + (piece.matrix is not None) :]
        return local_shape(name.key, shape, self._ranks_of(piece))

    def _with_known_order(self) -> tuple[ChunkOrder, dict[Piece, FlatPlace]]:
        """Where every parameter is, in the order under which masters are the weights."""
        problem: Exception | None = None
        of_rank = num_matrices(self._model) // self._shares.matrices
        for layer, matrices in product(architecture_of(self._model).layer_orders, MatrixOrder):
            order = ChunkOrder(layer, matrices, of_rank)
            try:
                places = dict(self._all_places(order))
                for piece in places:
                    is_looked_at = piece.name.layer in (None, 0) and piece.matrix in (None, 0, of_rank - 1)
                    if is_looked_at and piece.name.key in self._checkpoint.shapes:
                        self._check(piece, places, order)
                return order, places
            except (CheckpointError, IndexError, RuntimeError) as error:  # other sizes than a buffer's
                problem = error
        assert problem is not None
        raise CheckpointError(
            f"{self._checkpoint.folder} holds the optimizer's buffers in an order that is not known ({problem}); save "
            f"it again with --dist-ckpt-optim-fully-reshardable, or give --no-load-optim"
        ) from problem

    def _check(self, piece: Piece, places: Mapping[Piece, FlatPlace], order: ChunkOrder) -> None:
        weight = self._checkpoint.weight(piece.name)
        weight = weight if piece.matrix is None else weight[piece.matrix]
        own = part_of(piece.name.key, weight, 0, self._ranks_of(piece), is_gated=self._checkpoint.is_gated)
        master = self._part("master", piece, 0, places, order.matrices is MatrixOrder.JOINED)
        self._checkpoint.checked(self._checkpoint.in_model_dtype(master), own, piece.name)

    def _all_places(self, order: ChunkOrder) -> Iterator[tuple[Piece, FlatPlace]]:
        for stage in range(self._stages):
            num_apart = 0
            for chunk in range(self._num_chunks):
                pieces = order.pieces(
                    self._layers,
                    self._layout.chunks[stage][chunk],
                    is_first=stage == chunk == 0,
                    is_last=stage == self._stages - 1 and chunk == self._num_chunks - 1,
                    ties=self._checkpoint.ties_embeddings,
                )
                apart = [piece for piece in pieces if self._is_apart(piece)]
                together = [piece for piece in pieces if not self._is_apart(piece)]
                yield from self._places_in_buffer(together, stage, (False, stage * self._shares.weight, chunk))
                if apart:  # an optimizer has no buffer of a chunk without parameters of its own
                    first_group = stage * self._shares.matrices * self._shares.matrix
                    yield from self._places_in_buffer(apart, stage, (True, first_group, num_apart))
                    num_apart += 1

    def _places_in_buffer(self, pieces: list[Piece], stage: int, buffer: _Buffer) -> Iterator[tuple[Piece, FlatPlace]]:
        """Of a buffer's parameters, which stages' first ranks have as their others do."""
        keys = self._buckets.get(buffer)
        if keys is None:
            raise CheckpointError(f"stage {stage} has no buffer {buffer[2]}")
        sizes = [self._reader.shapes[f"{key}.param"][0] for key in keys]
        numels = numels_of([self._local_shape(piece) for piece in pieces])
        for piece, place in zip(pieces, places_in_buckets(numels, sizes), strict=True):
            yield piece, (stage, buffer[2], *place)
