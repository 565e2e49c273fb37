"""Handwritten digits: a small convolutional network, in BF16 AMP and in FP8.

python examples/mnist.py                      images made on the spot; a CPU takes seconds
python examples/mnist.py --data ylecun/mnist  the real ones, from the Hugging Face hub or a local folder
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import fp8_megatron
from fp8_megatron.any_model.meter import Meter, Row, table


class Digits(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.fc1 = nn.Linear(32 * 7 * 7, 256)
        self.fc2 = nn.Linear(256, 10)  # 10 is no multiple of 16, which FP8 GEMMs take: it stays as it is

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.conv2(F.relu(self.conv1(images))))
        return self.fc2(F.relu(self.fc1(hidden.flatten(1))))


def train(name: str, images: torch.Tensor, labels: torch.Tensor, *, steps: int, batch_size: int) -> Row:
    torch.manual_seed(0)
    device = images.device
    model = Digits().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if name != "BF16 AMP":
        model, optimizer = fp8_megatron.initialize(model, optimizer, opt_level=name)  # the line that is new

    meter = Meter(name, model, optimizer)
    order = torch.Generator().manual_seed(1)
    for _ in range(steps):
        batch = torch.randint(len(images), (batch_size,), generator=order).to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        meter.step(loss)
        optimizer.zero_grad()
    return meter.finish()


def made_on_the_spot(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ten blurred patterns, each shifted by up to two pixels, in noise."""
    draw = torch.Generator().manual_seed(2)
    patterns = F.avg_pool2d(torch.randn(10, 1, 28, 28, generator=draw), 5, stride=1, padding=2) * 2
    labels = torch.randint(10, (number,), generator=draw)
    shifts = torch.randint(-2, 3, (number, 2), generator=draw).tolist()
    images = [torch.roll(patterns[label], shift, (1, 2)) for label, shift in zip(labels, shifts, strict=True)]
    return torch.stack(images) + torch.randn(number, 1, 28, 28, generator=draw), labels


def real(path: str) -> tuple[torch.Tensor, torch.Tensor]:
    from datasets import load_dataset

    rows = load_dataset(path, split="train").with_format("torch")
    images = torch.stack([image.view(1, 28, 28) for image in rows["image"]])
    return (images.float() / 255 - 0.13) / 0.31, torch.as_tensor(rows["label"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="MNIST: its name on the hub, or a local folder (default: made on the spot)")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=32)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images, labels = real(arguments.data) if arguments.data else made_on_the_spot(2000)
    rows = [
        train(name, images.to(device), labels.to(device), steps=arguments.steps, batch_size=arguments.batch_size)
        for name in ("BF16 AMP", "O1", "O2", "O3")
    ]
    print(table(rows))


if __name__ == "__main__":
    main()
