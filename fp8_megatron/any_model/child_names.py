"""State dicts of a module that holds linear layers where its original held their parameters."""

from __future__ import annotations

from typing import Any, ClassVar

import torch


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
