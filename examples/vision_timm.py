"""Vision transformers of timm, in BF16 AMP and in FP8.

python examples/vision_timm.py                  a small ViT, images made on the spot; a CPU takes seconds
python examples/vision_timm.py --model deit_s --data imagenet-1k --batch-size 128   the hub's name, or a local folder
python examples/vision_timm.py --model swin_1b --batch-size 16 --record   the shapes of FP8-LM's tables, random images

Models: small (a ViT for 32 × 32 images), deit_s (DeiT-S), swin_t (Swin-T), swin_1b (Swin-1.0B), vit_1b (ViT-1.2B).
"""

import argparse
from typing import Any

import timm
import torch
from torch.nn import functional as F

import fp8_megatron
from fp8_megatron.any_model.meter import Meter, Row, table

#: Name → timm's model, what differs from it, the size of its images.
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "small": (
        "vit_tiny_patch16_224",
        {"img_size": 32, "patch_size": 4, "embed_dim": 64, "depth": 2, "num_heads": 4},
        32,
    ),
    "deit_s": ("deit_small_patch16_224", {}, 224),
    "swin_t": ("swin_tiny_patch4_window7_224", {}, 224),
    "swin_1b": (
        "swin_tiny_patch4_window7_224",
        {"embed_dim": 448, "depths": (2, 2, 18, 2), "num_heads": (14, 28, 56, 112)},
        224,
    ),
    "vit_1b": ("vit_base_patch16_224", {"embed_dim": 2048, "depth": 24, "num_heads": 32}, 224),
}


def train(name: str, images: torch.Tensor, labels: torch.Tensor, arguments: argparse.Namespace) -> Row:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kind, settings, _ = MODELS[arguments.model]
    model = timm.create_model(kind, num_classes=int(labels.max()) + 1, **settings).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.05)
    if name != "BF16 AMP":
        model, optimizer = fp8_megatron.initialize(model, optimizer, opt_level=name)
    run = torch.compile(model) if arguments.compile else model

    def gradients(batch: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = F.cross_entropy(run(batch), target)
        loss.backward()
        return loss

    recorded = fp8_megatron.record_step(gradients, model) if arguments.record else None

    meter = Meter(name, model, optimizer)
    size = arguments.batch_size
    for step in range(arguments.steps):
        start = step * size % (len(images) - size + 1)
        batch, target = (each[start : start + size].to(device, non_blocking=True) for each in (images, labels))
        loss = (recorded or gradients)(batch, target)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        meter.step(loss)
        optimizer.zero_grad()
    if recorded:
        meter.kept_bytes = recorded.kept_bytes
    return meter.finish()


def made_on_the_spot(number: int, size: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Stripes of one colour and frequency a class, in noise."""
    draw = torch.Generator().manual_seed(2)
    labels = torch.randint(classes, (number,), generator=draw)
    labels[0] = classes - 1
    colours = torch.randn(classes, 3, 1, 1, generator=draw)
    waves = torch.sin(torch.linspace(0, 6.3, size) * torch.arange(1, classes + 1).view(-1, 1, 1, 1))
    return (colours * waves)[labels] + torch.randn(number, 3, size, size, generator=draw), labels


def real(path: str, number: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first images of a data set with the columns image and label, cut to squares."""
    from datasets import load_dataset
    from torchvision.transforms import v2

    prepare = v2.Compose(
        [
            v2.ToImage(),
            v2.RGB(),
            v2.RandomResizedCrop(size, scale=(0.5, 1.0)),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(timm.data.IMAGENET_DEFAULT_MEAN, timm.data.IMAGENET_DEFAULT_STD),
        ]
    )
    rows = load_dataset(path, split="train", streaming=True).shuffle(seed=1, buffer_size=1000).take(number)
    pairs = [(prepare(row["image"]), row["label"]) for row in rows]
    return torch.stack([image for image, _ in pairs]), torch.tensor([label for _, label in pairs])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--data", help="a data set of images: its name on the hub, or a local folder")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--record", action="store_true", help="forward and backward as one CUDA graph")
    arguments = parser.parse_args()
    size = MODELS[arguments.model][2]
    number = max(64, arguments.steps * arguments.batch_size if arguments.data else 4 * arguments.batch_size)
    images, labels = real(arguments.data, number, size) if arguments.data else made_on_the_spot(number, size, 10)
    print(table([train(name, images, labels, arguments) for name in ("BF16 AMP", "O1", "O2", "O3")]))


if __name__ == "__main__":
    main()
