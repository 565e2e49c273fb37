"""Which linear layers of a model write the logits of a softmax over many classes: a language model's head."""

from __future__ import annotations

import torch

#: What a head is called in GPT, Llama, torchtitan, Megatron, GPT-NeoX and image classifiers.
_NAMES = frozenset({"lm_head", "output", "output_layer", "embed_out", "head"})


def language_heads(model: torch.nn.Module) -> set[torch.nn.Module]:
    """The linear layers that transformers' ``get_output_embeddings`` names, and those with a head's name that are wider
    than their input."""
    found: set[torch.nn.Module] = set()
    for name, module in model.named_modules():
        is_wide = isinstance(module, torch.nn.Linear) and module.out_features > module.in_features
        if is_wide and name.rpartition(".")[2] in _NAMES:
            found.add(module)
        named = _output_embeddings(module)
        if isinstance(named, torch.nn.Linear):
            found.add(named)
    return found


def _output_embeddings(module: torch.nn.Module) -> object:
    get = getattr(module, "get_output_embeddings", None)
    if not callable(get):
        return None
    try:
        return get()
    except Exception:  # other people's code; transformers' models without a head raise, too
        return None
