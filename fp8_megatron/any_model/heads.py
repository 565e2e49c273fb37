"""Which linear layers of a model write the logits of a softmax over many classes: a language model's head."""

from __future__ import annotations

from typing import Any

import torch

from .te_modules import te_kind

#: What a head is called in GPT, Llama, torchtitan, Megatron, GPT-NeoX and image classifiers.
_NAMES = frozenset({"lm_head", "output", "output_layer", "embed_out", "head"})


def language_heads(model: torch.nn.Module) -> set[torch.nn.Module]:
    """The linear layers, torch's or Transformer Engine's, that transformers' ``get_output_embeddings`` names, and those
    with a head's name that are wider than their input. Where PEFT has put a module of its own in a head's place, the
    head's layers inside of it.
    """
    found: set[torch.nn.Module] = set()
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in _NAMES:
            found |= set(filter(_is_wide, _linears(module)))
        found |= _linears(_output_embeddings(module))
    return found


def _linears(head: object) -> set[torch.nn.Module]:
    """`head` itself, or those of a list (one for each codebook, as in Musicgen), or what PEFT has put it into: the
    ``base_layer`` of adapters; the ``original_module`` and its trained copies, ``modules_to_save``."""
    if not isinstance(head, torch.nn.Module):
        return set()
    if isinstance(head, torch.nn.Linear) or te_kind(head) == "Linear":
        return {head}
    if isinstance(head, torch.nn.ModuleList):
        return {layer for part in head for layer in _linears(part)}
    parts = [head._modules.get("base_layer"), head._modules.get("original_module")]
    copies = head._modules.get("modules_to_save")
    parts += [] if copies is None else copies.children()
    return {layer for part in parts for layer in _linears(part)}


def _is_wide(layer: Any) -> bool:
    wide: bool = layer.out_features > layer.in_features
    return wide


def _output_embeddings(module: torch.nn.Module) -> object:
    get = getattr(module, "get_output_embeddings", None)
    if not callable(get):
        return None
    try:
        return get()
    except Exception:  # other people's code; transformers' models without a head raise, too
        return None
