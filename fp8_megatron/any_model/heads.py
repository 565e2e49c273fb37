"""Which linear layers of a model write the logits of a softmax over many classes: a language model's head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .te_modules import te_kind

#: Ends of the names of layers that are heads at any width: a vocabulary of bytes is narrower than most models.
_LM_HEAD = ("lm_head", "lm_heads")
#: Ends of the names of layers that are heads if they are wider than their input: ``ctc_head``, a list ``mtp_heads``,
#: ``to_logits``. A head that is no wider gives a value or a few classes.
_HEAD = ("head", "heads", "logits")
#: Other names of such layers: in torchtitan, Megatron, GPT-NeoX, Whisper, BERT, fairseq, and of classifiers.
_NAMES = frozenset(
    "classifier decoder embed_out output output_layer output_projection proj_out score unembed vocab_projector".split()
)
#: Where a module in a head's place has the head: PEFT's, `torch.compile`'s and the checkpointed one.
_WRAPPED = ("base_layer", "original_module", "_orig_mod", "_checkpoint_wrapped_module")


def language_heads(model: torch.nn.Module) -> set[torch.nn.Module]:
    """The linear layers, torch's or Transformer Engine's, that write logits.

    They are those that transformers' ``get_output_embeddings`` gives, those called ``lm_head``, and those with another
    name of a head that are wider than their input. The name may be any of a layer's names. It may stand for a list of
    heads, for a `torch.nn.Sequential` that ends in one, or for what PEFT, `torch.compile` or a checkpoint has put in
    its place. Layers that have a head's weight are heads, too: the weight gets the sum of their gradients.
    """
    found: set[torch.nn.Module] = set()
    for module in model.modules():
        for name, part in module._modules.items():  # `named_modules` has one name of each module alone
            if name.endswith(_LM_HEAD):
                found |= _linears(part)
            elif name.endswith(_HEAD) or (name in _NAMES and not isinstance(part, torch.nn.Sequential)):
                found |= set(filter(_is_wide, _linears(part)))
        found |= _linears(output_embeddings(module))
    weights = {weight for head in found for weight in _weight(head)}
    layers = filter(_is_linear, model.modules())
    return found | {layer for layer in layers if weights.intersection(_weight(layer))}


def _linears(head: object) -> set[torch.nn.Module]:
    """`head` itself, or those of a list (one for each codebook, as in Musicgen), the last of a sequence, or what a
    module in its place has (`_WRAPPED`, and PEFT's trained copies, ``modules_to_save``)."""
    if not isinstance(head, torch.nn.Module):
        return set()
    if _is_linear(head):
        return {head}
    if isinstance(head, torch.nn.ModuleList):
        return {layer for part in head for layer in _linears(part)}
    if isinstance(head, torch.nn.Sequential):
        last = [part for part in head if next(part.parameters(), None) is not None][-1:]
        return {layer for part in last for layer in _linears(part)}
    parts = [head._modules.get(name) for name in _WRAPPED]
    copies = head._modules.get("modules_to_save")
    parts += [] if copies is None else copies.children()
    return {layer for part in parts for layer in _linears(part)}


def _is_linear(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear) or te_kind(module) in ("Linear", "LayerNormLinear")


def _weight(layer: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Its own weight, if it has one; a parametrised layer has none."""
    weight = layer._parameters.get("weight")
    if weight is not None:
        yield weight


def _is_wide(layer: Any) -> bool:
    wide: bool = layer.out_features > layer.in_features
    return wide


def output_embeddings(module: torch.nn.Module) -> object:
    """What transformers' ``get_output_embeddings`` gives; None: nothing, or `module` has no such method."""
    get = getattr(module, "get_output_embeddings", None)
    if not callable(get):
        return None
    try:
        return get()
    except Exception:  # other people's code; transformers' models without a head raise, too
        return None
