"""What other code has noted on a parameter, such as that it has no decay."""

from __future__ import annotations

import torch


def keep_notes(old: torch.nn.Parameter, new: torch.nn.Parameter) -> None:
    """Give the parameter `new` the attributes of the one that it replaces."""
    new.__dict__.update({key: value for key, value in old.__dict__.items() if key not in new.__dict__})
