"""A Hugging Face model folder as a source and as a target of weights, one weight in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.files import CheckpointError, read_file, write_text
from ..checkpoint.weights import WeightReader, places
from ..config.schema import ModelConfig
from ..models.hugging_face import Rule
from ..models.keys import LAYERS, WORD_EMBEDDING
from ..models.registry import architecture_of, hugging_face_of_json, is_linear_weight, weight_shapes
from . import hugging_face_fp8 as fp8
from .hugging_face_fp8 import FP8Layout
from .safetensors_files import SafetensorsFolder, SafetensorsWriter, TensorSpec

CONFIG_FILE = "config.json"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_SCALE_SUFFIXES = tuple(f"weight{layout.scale_suffix}" for layout in FP8Layout)
# Buffers that older versions of transformers saved among the weights.
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq", ".input_scale")


class HuggingFaceWeights:
    """The weights of a Hugging Face folder under this project's keys, without vocabulary padding, in FP32.

    FP8 weights of either layout of `hugging_face_fp8` are dequantised.

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
            if self.json.get("quantization_config"):
                fp8.check_readable(self.json["quantization_config"])
        except CheckpointError as error:
            raise CheckpointError("\n".join(f"{folder}/{line}" for line in str(error).splitlines())) from None
        assert self.model.vocab_size is not None
        self._folder = folder
        self._tensors = SafetensorsFolder(folder)
        self.shapes = weight_shapes(self.model, self.model.vocab_size)
        rules = names.rules(self.model, self.model.vocab_size, self.json)
        self._rules = {rule.key: rule for rule in rules}
        # The published GPT-2 has no wrapper prefix in its names.
        without = self._rules[WORD_EMBEDDING].names[0].removeprefix(self.family.prefix)
        self._left_out = self.family.prefix if without in self._tensors.file_of else ""
        self._check()

    def read(self, key: str, layer: int | None) -> Tensor:
        """As `weights.WeightReader.read`."""
        rule = self._rules[key]
        return rule.join([self.read_theirs(name) for name in rule.names_of(layer)])

    def check_values(self) -> None:
        """Read at once what a rule may refuse, so that nothing is refused halfway through.

        Raises:
            CheckpointError: a rule refuses it.
        """
        for rule in self._rules.values():
            for layer in rule.layers(self.model) if rule.refuses else ():
                self.read(rule.key, layer)

    def read_theirs(self, name: str) -> Tensor:
        """Read a tensor by their name, dequantised, in FP32."""
        name = self._stored(name)
        tensor = self._tensors.read(name)
        if tensor.dtype is not torch.float8_e4m3fn:
            return tensor.float()
        for layout in FP8Layout:
            if name + layout.scale_suffix in self._tensors.file_of:
                scale = self._tensors.spec(name + layout.scale_suffix)
                if not fp8.can_dequantize(tuple(tensor.shape), scale.shape):
                    raise CheckpointError(
                        f"{self._folder}: {scale.name} has shape {scale.shape}, which is no scale of {name!r} of shape "
                        f"{tuple(tensor.shape)}; fetch the folder again"
                    )
                return fp8.dequantize(tensor, self._tensors.read(scale.name))
        raise CheckpointError(f"{self._folder}: {name!r} is FP8 without a scale beside it")

    def _stored(self, name: str) -> str:
        return name.removeprefix(self._left_out)

    def _check(self) -> None:
        """Check that exactly the expected tensors exist, with the expected shapes."""
        expected: dict[str, tuple[int, ...]] = {}
        for rule in self._rules.values():
            shape = self.shapes[rule.key]
            shapes = rule.split_shapes(shape[1:] if rule.key.startswith(LAYERS) else shape)
            for layer in rule.layers(self.model):
                names = map(self._stored, rule.names_of(layer))
                for name, own_shape in zip(names, shapes, strict=True):
                    if name not in self._tensors.file_of:  # a number of layers in the millions ends here
                        raise CheckpointError(f"{self._folder} has no tensor {name!r}, which {CONFIG_FILE} describes")
                    expected[name] = own_shape
        for name, own_shape in expected.items():
            found = self._tensors.spec(name).shape
            if found != own_shape:
                raise CheckpointError(f"{self._folder}: {name} has shape {found}, {CONFIG_FILE} describes {own_shape}")
        for name in self._tensors.names:
            known = name in expected or name.endswith((*_SCALE_SUFFIXES, *_BUFFERS))
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
        max_shard_bytes: maximum size of one file.
    """

    dtype: torch.dtype = torch.bfloat16
    fp8_layout: FP8Layout | None = None
    layers_in_16_bits: tuple[int, ...] = ()
    max_shard_bytes: int = 5 * 10**9

    def in_fp8(self, rule: Rule, layer: int | None) -> bool:
        """Whether a rule's weight of a layer is stored in FP8."""
        return self.fp8_layout is not None and is_linear_weight(rule.key) and layer not in self.layers_in_16_bits


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
    if export.fp8_layout is not None:
        if not names.family_of(model).has_linear_modules:
            raise CheckpointError(
                f"--fp8 {export.fp8_layout.value} quantises Linear modules, and {settings['model_type']} has Conv1D "
                f"instead, which no reader of that layout takes; export it in 16 bits"
            )
        settings["quantization_config"] = fp8.quantization_config(export.fp8_layout, _unquantized(rules, model, export))
    # Biases that this model lacks are zero in theirs. Their shapes come from the model with all biases.
    shapes = weight_shapes(replace(model, disable_bias_linear=False), reader.shapes[rules[0].key][0])
    specs = [spec for rule, layer in _places(rules, model) for spec in _specs(rule, layer, shapes[rule.key], export)]
    with SafetensorsWriter(folder, specs, max_shard_bytes=export.max_shard_bytes) as writer:
        for rule, layer in _places(rules, model):
            if rule.key in reader.shapes:
                weight = reader.read(rule.key, layer)
            else:
                weight = torch.zeros(shapes[rule.key][1:])
            for name, tensor in _theirs(rule, layer, weight, export):
                writer.write(name, tensor)
            on_weight()
    write_text(folder / CONFIG_FILE, json.dumps(settings, indent=2) + "\n")


def _places(rules: Sequence[Rule], model: ModelConfig) -> Iterator[tuple[Rule, int | None]]:
    """(rule, layer) in the order of the forward pass: the weights of one layer follow each other."""
    by_key = {rule.key: rule for rule in rules}
    return ((by_key[key], layer) for key, layer in places(dict.fromkeys(by_key, (model.num_layers,))))


def _specs(rule: Rule, layer: int | None, shape: tuple[int, ...], export: Export) -> Iterator[TensorSpec]:
    shapes = rule.split_shapes(shape if layer is None else shape[1:])
    for name, part in zip(rule.names_of(layer), shapes, strict=True):
        if export.in_fp8(rule, layer):
            assert export.fp8_layout is not None
            yield from fp8.specs(export.fp8_layout, name, part)
        else:
            yield TensorSpec(name, export.dtype, part)


def _theirs(rule: Rule, layer: int | None, weight: Tensor, export: Export) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of all tensors that one weight of ours becomes."""
    names = rule.names_of(layer)
    if not torch.isfinite(weight).all():
        raise CheckpointError(f"{names[0]} would not be finite: the checkpoint's {rule.key} holds an inf or a NaN")
    if not export.in_fp8(rule, layer):
        for name, part in zip(names, rule.split(weight), strict=True):
            stored = part.to(export.dtype)
            if not torch.isfinite(stored).all():
                raise CheckpointError(f"{name} overflows {export.dtype} (|x| up to {part.abs().max():.0f}); use bf16")
            yield name, stored
        return
    assert export.fp8_layout is not None
    suffix = export.fp8_layout.scale_suffix
    if export.fp8_layout is FP8Layout.COMPRESSED_TENSORS:
        payload, scale = fp8.quantize_tensor(weight)
        for name, part in zip(names, rule.split(payload), strict=True):
            yield name, part
            yield name + suffix, scale
    else:
        for name, part in zip(names, rule.split(weight), strict=True):
            payload, scales = fp8.quantize_blocks(part)
            yield name, payload
            yield name + suffix, scales


def _unquantized(rules: Sequence[Rule], model: ModelConfig, export: Export) -> list[str]:
    """Linear modules in 16 bits: the head, and those of layers that stay out of FP8."""
    names = [
        name.removesuffix(".weight")
        for rule, layer in _places(rules, model)
        if is_linear_weight(rule.key) and not export.in_fp8(rule, layer)
        for name in rule.names_of(layer)
    ]
    return ["lm_head", *names]


def num_weights(model: ModelConfig, vocab_size: int) -> int:
    """Number of times that `write_hugging_face` calls `on_weight`."""
    return sum(len(rule.layers(model)) for rule in architecture_of(model).hugging_face().rules(model, vocab_size))
