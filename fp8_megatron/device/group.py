"""The name of a process group in annotations."""

from __future__ import annotations

import torch

#: Ranks that call collectives together.
Group = torch.distributed.ProcessGroup
