"""A Hugging Face model folder as a source and as a target of weights, one weight in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checkpoint.files import CheckpointError, read_file, write_text
from ..checkpoint.weights import WeightReader, is_finite
from ..config.schema import ModelConfig
from ..dtypes import E4M3
from ..kernels import ops
from ..models.hugging_face import Rule
from ..models.keys import LAYERS, WORD_EMBEDDING
from ..models.registry import (
    architecture_of,
    holds_matrices,
    hugging_face_of_json,
    is_linear_weight,
    weight_shapes,
)
from ..quantization.stored_scales import dequantize
from ..sharding.region import Shape
from . import hugging_face_fp8 as fp8
from .hugging_face_fp8 import FP8Layout
from .safetensors_files import SafetensorsFolder, SafetensorsWriter, TensorSpec

CONFIG_FILE = "config.json"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Tensors of whole numbers, which rules unpack.
_PACKED = ("_blocks", "_scales")
_MODELOPT_FILE = "hf_quant_config.json"
# Buffers that older versions of transformers saved among the weights, and scales of what inference casts.
_BUFFERS = (
    *(".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"),
    *(".input_scale", ".activation_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale"),
)


class HuggingFaceWeights:
    """The weights of a Hugging Face folder under this project's keys, without vocabulary padding, in FP32.

    FP8 weights are dequantised where `hugging_face_fp8.check_readable` takes their layout.

    Args:
        folder: with ``config.json`` and safetensors files.

    Attributes:
        json: contents of ``config.json``.
        model: the model that it describes.

    Raises:
        CheckpointError: an unsupported architecture or setting, or weights that are missing, unknown or misshapen.
    """

    def __init__(self, folder: Path) -> None:
        self.json = read_json(folder / CONFIG_FILE)
        try:
            names = hugging_face_of_json(self.json)
            self.model, self.family = names.model_from_json(self.json), names.families[self.json["model_type"]]
            modelopt = folder / _MODELOPT_FILE
            quantization = fp8.quantization_of(self.json, read_json(modelopt) if modelopt.is_file() else None)
            if quantization is not None:
                fp8.check_readable(quantization)
        except CheckpointError as error:
            raise CheckpointError("\n".join(f"{folder}/{line}" for line in str(error).splitlines())) from None
        assert self.model.vocab_size is not None
        self._folder = folder
        self._tensors = SafetensorsFolder(folder)
        self.shapes = weight_shapes(self.model, self.model.vocab_size)
        rules = names.rules(self.model, self.model.vocab_size, self.json)
        self._rules = {rule.key: self._stored_form(rule) for rule in rules}
        # The published GPT-2 has no wrapper prefix in its names.
        without = self._rules[WORD_EMBEDDING].names[0].removeprefix(self.family.prefix)
        self._left_out = self.family.prefix if without in self._tensors.file_of else ""
        self._check()

    def _stored_form(self, rule: Rule) -> Rule:
        """The one of a rule's two forms that the files have; `otherwise` is the other."""
        other = rule.otherwise
        if other is None or other.names_of(rule.layers(self.model)[0], 0)[0] not in self._tensors.file_of:
            return rule
        return replace(other, otherwise=replace(rule, otherwise=None))

    def read(self, key: str, layer: int | None, matrix: int | None = None) -> Tensor:
        """As `weights.WeightReader.read`."""
        rule = self._rules[key]
        return self._read(rule, None if layer is None else rule.layers(self.model)[layer], matrix)

    def _read(self, rule: Rule, layer: int | None, matrix: int | None = None) -> Tensor:
        """A weight of the model's layer number `layer`, without a matrix of all of them."""
        if matrix is None and holds_matrices(rule.key):
            return torch.stack([self._read(rule, layer, each) for each in rule.matrices(self.model)])
        own = matrix if rule.has_all_matrices else None
        return rule.join([self._read_tensor(self._stored(name), own) for name in rule.names_of(layer, matrix)])

    def check_values(self) -> None:
        """Read at once what a rule may refuse, so that nothing is refused halfway through.

        Raises:
            CheckpointError: a rule refuses it.
        """
        for rule in self._rules.values():
            for layer in rule.layers(self.model) if rule.refuses else ():
                self._read(rule, layer)

    def read_theirs(self, name: str) -> Tensor:
        """Read a tensor by their name, dequantised, in FP32. Files may have it in another form."""
        if self._stored(name) in self._tensors.file_of:
            return self._read_tensor(self._stored(name))
        if name not in self._other_names:
            raise CheckpointError(f"{self._folder} has no tensor {name!r}")
        form, layer, matrix, index = self._other_names[name]

        def part(matrix: int | None) -> Tensor:
            return form.split(self._read(self._rules[form.key], layer, matrix))[index]

        if not form.has_all_matrices:
            return part(matrix)
        return torch.stack([part(each) for each in form.matrices(self.model)])

    @cached_property
    def _other_names(self) -> dict[str, tuple[Rule, int | None, int | None, int]]:
        """The names in the form that the files do not have: of each its rule, layer and matrix, and which part of the
        weight it is."""
        forms = [rule.otherwise for rule in self._rules.values() if rule.otherwise is not None]
        return {
            name: (form, layer, matrix, index)
            for form in forms
            for layer in form.layers(self.model)
            for matrix in form.stored_matrices(self.model)
            for index, name in enumerate(form.names_of(layer, matrix))
        }

    def _read_tensor(self, name: str, matrix: int | None = None) -> Tensor:
        """Read a tensor of the files, or one matrix of it."""
        tensor = self._tensors.read(name, matrix)
        if tensor.dtype is not torch.float8_e4m3fn:
            return tensor.float()
        for layout in FP8Layout:
            if name + layout.scale_suffix in self._tensors.file_of:
                shape = self._tensors.spec(name + layout.scale_suffix).shape
                of_all = matrix is None or len(shape) < 2
                scale = self._tensors.read(name + layout.scale_suffix, None if of_all else matrix)
                try:
                    return dequantize(tensor, scale)
                except ValueError as error:
                    raise CheckpointError(
                        f"{self._folder}: {name + layout.scale_suffix}: {error}; fetch the folder again"
                    ) from error
        raise CheckpointError(f"{self._folder}: {name!r} is FP8 without a scale beside it")

    def _stored(self, name: str) -> str:
        return name.removeprefix(self._left_out)

    def _check(self) -> None:
        """Check that exactly the expected tensors exist, with the expected shapes."""
        expected: dict[str, Shape] = {}
        for rule in self._rules.values():
            shapes = rule.stored_shapes(_shape_of_one(rule, self.shapes[rule.key]), self.model)
            for layer, matrix in product(rule.layers(self.model), rule.stored_matrices(self.model)):
                names = map(self._stored, rule.names_of(layer, matrix))
                for name, own_shape in zip(names, shapes, strict=True):
                    if name not in self._tensors.file_of:  # a number of layers in the millions ends here
                        raise CheckpointError(f"{self._folder} has no tensor {name!r}, which {CONFIG_FILE} describes")
                    expected[name] = own_shape
        for name, own_shape in expected.items():
            found = self._tensors.spec(name).shape
            if found != own_shape:
                raise CheckpointError(f"{self._folder}: {name} has shape {found}, {CONFIG_FILE} describes {own_shape}")
            if self._tensors.spec(name).dtype is torch.uint8 and not name.endswith(_PACKED):
                raise CheckpointError(f"{self._folder}: {name} is U8, of a quantisation that is not supported")
        for name in self._tensors.names:
            scaled = {name.removesuffix(layout.scale_suffix) for layout in FP8Layout}
            known = not scaled.isdisjoint(expected) or name.endswith(_BUFFERS)
            if name == "lm_head.weight" and not known:  # the embedding is the head
                self._check_tied(name)
            elif not known:
                kind = self.family.model_type
                raise CheckpointError(
                    f"{self._folder} holds {name!r}, which a {kind} as {CONFIG_FILE} describes it has not"
                )

    def _check_tied(self, head: str) -> None:
        """Check that the head of a tied model is the embedding. Transformers 4 ignores another one, 5 takes it."""
        (embedding,) = map(self._stored, self._rules[WORD_EMBEDDING].names_of(None))
        if not torch.equal(self._tensors.read(head), self._tensors.read(embedding)):
            raise CheckpointError(
                f"{self._folder} holds {head!r} with other values than {embedding!r}, although tie_word_embeddings of "
                f"{CONFIG_FILE} makes them one; set it to false, or remove the head"
            )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        CheckpointError: the file is missing or is not a JSON object.
    """
    try:
        content = json.loads(read_file(path), object_pairs_hook=_without_repetition)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error
    except RecursionError:
        raise CheckpointError(f"{path} cannot be read (it nests too deeply)") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a JSON object")
    return content


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is in it twice")
    return content


@dataclass(frozen=True)
class Export:
    """How an exported folder stores weights.

    Attributes:
        dtype: dtype of weights that are not FP8.
        fp8_layout: layout of FP8 linear weights; None: no FP8.
        layers_in_16_bits: these layers stay out of FP8.
        has_fp8_weights: the run's weights are at rest in FP8 with a scale a matrix, which blocks then keep.
        power_of_two: the run rounds scales of blocks up to powers of two.
        max_shard_bytes: maximum size of one file.
    """

    dtype: torch.dtype = torch.bfloat16
    fp8_layout: FP8Layout | None = None
    layers_in_16_bits: tuple[int, ...] = ()
    has_fp8_weights: bool = False
    power_of_two: bool = False
    max_shard_bytes: int = 5 * 10**9

    def in_fp8(self, place: _Place) -> bool:
        """Whether a weight is stored in FP8."""
        is_linear = is_linear_weight(place.rule.key)
        return self.fp8_layout is not None and is_linear and place.layer not in self.layers_in_16_bits


def write_hugging_face(
    folder: Path,
    reader: WeightReader,
    model: ModelConfig,
    vocab_size: int,
    export: Export,
    *,
    token_ids: Mapping[str, Any] | None = None,
    on_weight: Callable[[], None] = lambda: None,
) -> None:
    """Write ``config.json`` and safetensors of a model.

    Args:
        vocab_size: without padding.
        token_ids: ``bos_token_id`` and the like, for config.json.
        on_weight: called after each weight of ours (see `num_weights`), for a progress bar.

    Raises:
        CheckpointError: no architecture of theirs computes this model, or a weight is not finite or overflows `dtype`.
    """
    names = architecture_of(model).hugging_face()
    rules = names.rules(model, vocab_size)
    settings = names.json_from_model(model, vocab_size, str(export.dtype).removeprefix("torch."))
    settings |= {"bos_token_id": None, "eos_token_id": None, **(token_ids or {})}
    # Biases that this model lacks are zero in theirs. Their shapes come from the model with all biases.
    shapes = weight_shapes(replace(model, disable_bias_linear=False), reader.shapes[rules[0].key][0])
    shapes = {rule.key: _shape_of_one(rule, shapes[rule.key]) for rule in rules}
    if export.fp8_layout is not None:
        if not names.family_of(model).has_linear_modules:
            raise CheckpointError(
                f"--fp8 {export.fp8_layout.value} quantises Linear modules, and {settings['model_type']} has others, "
                f"which no reader of that layout takes; export it in 16 bits"
            )
        unquantized = _unquantized(rules, shapes, model, export)
        settings["quantization_config"] = fp8.quantization_config(export.fp8_layout, unquantized)
    specs = [spec for place in _places(rules, model) for spec in _specs(place, shapes[place.rule.key], model, export)]
    with SafetensorsWriter(folder, specs, max_shard_bytes=export.max_shard_bytes) as writer:
        for place in _places(rules, model):
            key = place.rule.key
            weight = reader.read(key, place.row, place.matrix) if key in reader.shapes else torch.zeros(shapes[key])
            for name, tensor in _theirs(place, weight, export):
                writer.write(name, tensor)
            on_weight()
    write_text(folder / CONFIG_FILE, json.dumps(settings, indent=2) + "\n")


class _Place(NamedTuple):
    """A weight of ours: its rule, the model's layer and its row in checkpoints, and the matrix; None: all of them."""

    rule: Rule
    layer: int | None
    row: int | None
    matrix: int | None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of theirs."""
        return self.rule.names_of(self.layer, self.matrix)


def _shape_of_one(rule: Rule, shape: Shape) -> Shape:
    """The shape of what a rule splits: in one layer, of one matrix."""
    return shape[2 if holds_matrices(rule.key) else 1 :] if rule.key.startswith(LAYERS) else shape


def _places(rules: Sequence[Rule], model: ModelConfig) -> Iterator[_Place]:
    """Every weight in the order of the forward pass: the weights of one layer follow each other."""
    stacked = [rule for rule in rules if rule.key.startswith(LAYERS)]
    for rule in rules:
        if rule not in stacked:
            yield _Place(rule, None, None, None)
        elif rule is stacked[0]:
            yield from (place for layer in range(model.num_layers) for place in _places_of_layer(stacked, model, layer))


def _places_of_layer(rules: Sequence[Rule], model: ModelConfig, layer: int) -> Iterator[_Place]:
    for rule in rules:
        layers = rule.layers(model)
        if layer in layers:
            yield from (_Place(rule, layer, layers.index(layer), matrix) for matrix in rule.stored_matrices(model))


def _specs(place: _Place, shape: Shape, model: ModelConfig, export: Export) -> Iterator[TensorSpec]:
    for name, part in zip(place.names, place.rule.stored_shapes(shape, model), strict=True):
        if export.in_fp8(place):
            assert export.fp8_layout is not None
            yield from fp8.specs(export.fp8_layout, name, part)
        else:
            yield TensorSpec(name, export.dtype, part)


def _theirs(place: _Place, weight: Tensor, export: Export) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of all tensors that one weight of ours becomes."""
    rule, names = place.rule, place.names
    if not is_finite(weight):
        raise CheckpointError(f"{names[0]} would not be finite: the checkpoint's {rule.key} holds an inf or a NaN")
    if not export.in_fp8(place):
        for name, part in zip(names, rule.stored(weight), strict=True):
            stored = part.to(export.dtype)
            if not is_finite(stored):
                raise CheckpointError(f"{name} overflows {export.dtype} (|x| up to {part.abs().max():.0f}); use bf16")
            yield name, stored
        return
    assert export.fp8_layout is not None
    suffix = export.fp8_layout.scale_suffix
    if export.fp8_layout is FP8Layout.COMPRESSED_TENSORS or export.has_fp8_weights:
        payload, _, scale = ops.quantize_current(weight, E4M3)  # as the optimizer derives it
        for name, part in zip(names, rule.split(payload), strict=True):
            yield name, part
            yield name + suffix, scale.expand(fp8.scale_shape(export.fp8_layout, tuple(part.shape)))
    else:
        for name, part in zip(names, rule.split(weight), strict=True):
            payload, scales = fp8.quantize_blocks(part, power_of_two=export.power_of_two)
            yield name, payload
            yield name + suffix, scales


def _unquantized(rules: Sequence[Rule], shapes: Mapping[str, Shape], model: ModelConfig, export: Export) -> list[str]:
    """Linear modules in 16 bits: the head, what is a matrix in every layer, and layers that stay out of FP8."""
    names = [
        name.removesuffix(".weight")
        for place in _places(rules, model)
        if place.layer is not None and len(shapes[place.rule.key]) == 2 and not export.in_fp8(place)
        for name in place.names
    ]
    return ["lm_head", *names]


def num_weights(model: ModelConfig, vocab_size: int) -> int:
    """Number of times that `write_hugging_face` calls `on_weight`."""
    return sum(1 for _ in _places(architecture_of(model).hugging_face().rules(model, vocab_size), model))
