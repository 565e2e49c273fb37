"""A small model, its data, and a plain training loop that other loops are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

WIDTH, CLASSES, BATCH = 32, 16, 16


class SmallNet(torch.nn.Module):
    """An embedding, a norm and two linear layers of FP8 sizes: [b, s] token numbers → [b, CLASSES]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(64, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.head = torch.nn.Linear(4 * WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.relu(self.up(self.norm(self.embedding(tokens).mean(1)))))


def build(seed: int = 1, lr: float = 3e-2) -> tuple[SmallNet, torch.optim.AdamW]:
    """A model and its optimizer."""
    torch.manual_seed(seed)
    model = SmallNet()
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


def batches(count: int, seed: int = 2, batch: int = BATCH) -> Iterator[tuple[Tensor, Tensor]]:
    """One token eight times, [batch, 8], and its class."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        tokens = torch.randint(64, (batch, 1), generator=generator).expand(-1, 8).contiguous()
        yield tokens, tokens[:, 0] % CLASSES


def loss_of(model: Callable[[Tensor], Tensor], tokens: Tensor, classes: Tensor) -> Tensor:
    """Cross-entropy in FP32."""
    return torch.nn.functional.cross_entropy(model(tokens).float(), classes)


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Iterator[tuple[Tensor, Tensor]],
    *,
    accumulate: int = 1,
    max_norm: float | None = None,
    clip: Callable[..., Tensor] = torch.nn.utils.clip_grad_norm_,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> list[float]:
    """The loop that a user writes, under BF16 autocast; the loss of each micro-batch."""
    losses = []
    for number, (tokens, classes) in enumerate(data, 1):
        waits = number % accumulate and isinstance(model, torch.nn.parallel.DistributedDataParallel)
        with model.no_sync() if waits else nullcontext():
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, tokens, classes)
            (loss / accumulate).backward()
        losses.append(loss.item())
        if number % accumulate == 0:
            if max_norm is not None:
                clip(model.parameters(), max_norm)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
    return losses


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """A copy of the model's values."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
