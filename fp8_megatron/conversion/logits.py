"""FP32 logits of a checkpoint, with one layer in memory at a time, to compare two checkpoints of one model.

A model with a single layer computes them. Each layer's weights are loaded into it in turn, and the output of one layer
is the input of the next. Our model is megatron-core's GPTModel; theirs is transformers' own model, so a comparison
tests more than the mapping of names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from ..assembly import parts_of
from ..checkpoint.files import CheckpointError
from ..checkpoint.weights import WeightReader
from ..config.schema import Config, ModelConfig, ParallelConfig
from ..mcore.gpt import gpt_arguments, multiply_ends
from ..mcore.layer_spec import Attention, block_submodules
from ..mcore.mlp import mlp_spec
from ..mcore.runtime import runtime
from ..mcore.topology import initialized
from ..mcore.transformer_config import rotary_table, transformer_config
from ..models.keys import LAYERS, WORD_EMBEDDING, name_in_model
from ..models.registry import architecture_of, hugging_face_of_json, layers_of_key
from .hugging_face_folder import HuggingFaceWeights

_CPU = torch.device("cpu")


def random_tokens(vocab_size: int, *, batch_size: int, length: int, seed: int) -> Tensor:
    """Token ids [batch_size, length], uniform over the vocabulary."""
    return torch.randint(vocab_size, (batch_size, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits_of_weights(
    reader: WeightReader, model: ModelConfig, tokens: Tensor, *, on_layer: Callable[[], None] = lambda: None
) -> Tensor:
    """Logits [batch, length, rows of the head] of `tokens` [batch, length] through megatron-core's layers in FP32.

    Args:
        on_layer: called after each layer, for a progress bar.
    """
    rows = {key: layers_of_key(model, key) for key in reader.shapes if key.startswith(LAYERS)}
    with runtime(_CPU), initialized(ParallelConfig(), 1, _CPU):
        num_rows, kinds = reader.shapes[WORD_EMBEDDING][0], _kinds_of_layers(model)
        single = _single_layer(kinds[0], num_rows)
        layers = {kind: _single_layer(kind, num_rows).decoder.layers[0] for kind in {*kinds} - {kinds[0]}}
        layers[kinds[0]] = single.decoder.layers[0]
        params = dict(single.named_parameters())
        for key in reader.shapes.keys() - rows.keys():
            params[name_in_model(key, None)].copy_(reader.read(key, None))
        captured: list[Tensor] = []
        for module in layers.values():
            module.register_forward_hook(lambda _, __, output: captured.append(output[0]))
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        logits = torch.empty(0)
        for layer in range(model.num_layers):
            single.decoder.layers[0] = layers[kinds[layer]]
            tensors = dict(single.named_parameters()) | dict(single.named_buffers())
            for key, own in rows.items():
                if layer in own:
                    tensors[name_in_model(key, 0)].copy_(reader.read(key, own.index(layer)))
            hidden = captured.pop() if captured else None
            logits = single(tokens, positions, None, decoder_input=hidden)
            on_layer()
        return logits


def _kinds_of_layers(model: ModelConfig) -> list[ModelConfig]:
    """The model of each layer alone; layers that compute alike have equal ones."""
    single_layer = architecture_of(model).single_layer
    return [single_layer(model, layer) for layer in range(model.num_layers)]


def _single_layer(model: ModelConfig, num_rows: int) -> GPTModel:
    """The model of one layer."""
    config = Config(model=model)
    config = replace(config, precision=replace(config.precision, precision="bf16"))
    parts = parts_of(config)
    fp32 = replace(
        transformer_config(config, _CPU, parts.settings),
        bf16=False,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        autocast_dtype=torch.float32,
    )
    module = GPTModel(
        fp32,
        block_submodules(
            [None],
            [None],
            Attention("math", has_norms=model.qk_layernorm),
            [parts.mlps.get(0, partial(mlp_spec, activation=model.activation))],
        ),
        vocab_size=num_rows,
        **gpt_arguments(model),
    )
    table = rotary_table(model, _CPU)
    if table is not None:
        module.rotary_pos_emb = table
    multiply_ends(module, model)
    return module.eval()


@torch.no_grad()
def logits_of_folder(folder: Path, tokens: Tensor, *, on_layer: Callable[[], None] = lambda: None) -> Tensor:
    """Logits [batch, length, vocabulary] of `tokens` [batch, length] through transformers' layers in FP32.

    FP8 weights are dequantised; activations are not quantised.

    Raises:
        CheckpointError: transformers is not installed, or as `HuggingFaceWeights`.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise CheckpointError("comparing logits needs transformers: pip install transformers") from error
    weights = HuggingFaceWeights(folder)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        config.num_hidden_layers = 1
        has_layer_types = "sliding_attention" in (getattr(config, "layer_types", None) or ())
        config.quantization_config = None
        del config.quantization_config

        def single_layer(layer: int) -> Any:
            for name, value in names.settings_of_layer(weights.model, layer).items():
                setattr(config, name, value)
            return AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()

        names, kinds, stack = hugging_face_of_json(weights.json), _kinds_of_layers(weights.model), weights.family.layers
        single = single_layer(0)
        others = {kind: layer for layer, kind in enumerate(kinds) if kind != kinds[0]}
        layers = {kind: single_layer(layer).get_submodule(stack + "0") for kind, layer in others.items()}
    except Exception as error:  # a setting that this project does not read can raise almost anything there
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{folder}/config.json: transformers builds no model of it ({reason}); correct it, or give --no-verify"
        ) from error
    layers[kinds[0]] = single.get_submodule(stack + "0")
    params: dict[str, Tensor] = dict(single.named_parameters())
    for name, param in params.items():
        if not name.startswith(stack):
            param.copy_(weights.read_theirs(name))
    captured: list[Tensor] = []
    for module in layers.values():
        module.register_forward_hook(lambda _, __, output: captured.append(_hidden(output)))
    logits = torch.empty(0)
    for layer in range(weights.model.num_layers):
        own = layers[kinds[layer]]
        if has_layer_types:  # they choose the mask
            single.config.layer_types = ["full_attention" if kinds[layer].window_size is None else "sliding_attention"]
        single.get_submodule(stack.removesuffix("."))[0] = own
        for name, param in own.named_parameters():
            param.copy_(weights.read_theirs(f"{stack}{layer}.{name}"))
        if layer == 0:
            logits = single(input_ids=tokens, use_cache=False).logits
        else:
            if layer == 1 and "transformer.wpe.weight" in params:
                params["transformer.wpe.weight"].zero_()  # the first layer's input already includes positions
            logits = single(inputs_embeds=captured.pop(), use_cache=False).logits
        on_layer()
    return logits


def _hidden(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
