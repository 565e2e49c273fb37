"""What other code has left on a parameter: attributes, such as that it has no decay, and hooks."""

from __future__ import annotations

import torch

#: Hooks of gradients: ``register_hook`` and ``register_post_accumulate_grad_hook``.
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def keep_notes(old: torch.nn.Parameter, new: torch.nn.Parameter) -> None:
    """Give the parameter `new` the attributes and the hooks of the one that it replaces."""
    new.__dict__.update({key: value for key, value in old.__dict__.items() if key not in new.__dict__})
    for hooks in _HOOKS:
        if getattr(old, hooks):
            setattr(new, hooks, getattr(old, hooks))  # the same dict, from which handles remove their hook


def has_hooks(param: torch.Tensor) -> bool:
    """Whether hooks wait for the gradient of `param`."""
    return any(getattr(param, hooks) for hooks in _HOOKS)
