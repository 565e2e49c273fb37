"""What a model keeps where modules were swapped: names in state dicts, attributes and hooks of parameters."""

from __future__ import annotations

from typing import Any, ClassVar

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


class ChildNames(torch.nn.Module):
    """Gives parameters of children the original's names in a state dict, and takes such state dicts."""

    #: The original's name of a parameter → its name here.
    original_names: ClassVar[dict[str, str]] = {}

    def state_dict(self, *args: Any, prefix: str = "", keep_vars: bool = False, **kwargs: Any) -> Any:
        """torch's, with the original's names, in its order: its own parameters, then those of its children."""
        destination = super().state_dict(*args, prefix=prefix, keep_vars=keep_vars, **kwargs)
        for theirs, ours in self.original_names.items():
            if prefix + ours in destination:
                destination[prefix + theirs] = destination.pop(prefix + ours)
        others = [
            key for key in destination if key.startswith(prefix) and key[len(prefix) :] not in self.original_names
        ]
        for key in others:
            destination[key] = destination.pop(key)
        return destination

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        # In place: torch loads the children from this dict afterwards.
        for theirs, ours in self.original_names.items():
            if prefix + theirs in state_dict:
                state_dict[prefix + ours] = state_dict.pop(prefix + theirs)
        super()._load_from_state_dict(state_dict, prefix, *others)
