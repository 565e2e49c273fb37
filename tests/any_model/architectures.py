"""Small models of other libraries, each with a task that has a floor: labels are noisy, so that the loss of a good
model is a number well above zero, and two runs can be compared by its ratio.

- tokens: the next one follows from the last with probability `RULE`, otherwise any comes.
- images: a class's prototype in noise; `WRONG` of the labels are drawn anew.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

VOCABULARY, SEQUENCE, BATCH = 96, 32, 8
CLASSES, IMAGE = 16, 32
RULE, WRONG = 0.6, 0.3

Loss = Callable[[torch.nn.Module, torch.Generator], Tensor]


@dataclass(frozen=True)
class Architecture:
    """A model and its training loss on a new batch."""

    build: Callable[[], torch.nn.Module]
    loss: Loss
    learning_rate: float = 1e-3
    is_slow: bool = True


def tokens(generator: torch.Generator) -> Tensor:
    """[BATCH, SEQUENCE + 1]"""
    anything = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
    follows = torch.rand(BATCH, SEQUENCE + 1, generator=generator) < RULE
    column = anything[:, 0]
    columns = [column]
    for index in range(1, SEQUENCE + 1):
        column = torch.where(follows[:, index], (5 * column + 7) % VOCABULARY, anything[:, index])
        columns.append(column)
    return torch.stack(columns, dim=1)


def images(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images [4 · BATCH, 3, IMAGE, IMAGE] and labels."""
    number = 4 * BATCH
    labels = torch.randint(CLASSES, (number,), generator=generator)
    prototypes = torch.randn(CLASSES, 3, IMAGE, IMAGE, generator=torch.Generator().manual_seed(99))
    pictures = 0.5 * prototypes[labels] + torch.randn(number, 3, IMAGE, IMAGE, generator=generator)
    wrong = torch.rand(number, generator=generator) < WRONG
    return pictures, torch.where(wrong, torch.randint(CLASSES, (number,), generator=generator), labels)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten())


def next_token(model: torch.nn.Module, generator: torch.Generator) -> Tensor:
    """Loss of a causal language model of transformers."""
    batch = tokens(generator)
    return _cross_entropy(model(input_ids=batch[:, :-1]).logits, batch[:, 1:])


def restored_token(model: torch.nn.Module, generator: torch.Generator) -> Tensor:
    """Loss of a masked language model of transformers: a token in four was replaced by any other."""
    batch = tokens(generator)[:, :-1]
    anything = torch.randint(VOCABULARY, batch.shape, generator=generator)
    replaced = torch.rand(batch.shape, generator=generator) < 0.25
    return _cross_entropy(model(input_ids=torch.where(replaced, anything, batch)).logits, batch)


def translation(model: torch.nn.Module, generator: torch.Generator) -> Tensor:
    """Loss of an encoder and decoder of transformers: the sequence one token on."""
    batch = tokens(generator)
    start = torch.zeros(BATCH, 1, dtype=torch.int64)
    logits = model(input_ids=batch[:, :-1], decoder_input_ids=torch.cat([start, batch[:, 1:-1]], dim=1)).logits
    return _cross_entropy(logits, batch[:, 1:])


def picture_class(model: torch.nn.Module, generator: torch.Generator) -> Tensor:
    """Loss of an image classifier."""
    pictures, labels = images(generator)
    output = model(pictures)
    return _cross_entropy(getattr(output, "logits", output), labels)


class Residual(torch.nn.Module):
    """Two convolutions with batch norms beside a shortcut, as in torchvision's ResNet."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = torch.nn.BatchNorm2d(channels), torch.nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.norm2(self.second(torch.relu(self.norm1(self.first(x))))))


def build_cnn() -> torch.nn.Module:
    """Convolutions, and a classifier of linear layers as in torchvision's VGG."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 4, stride=4), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), Residual(16),
        torch.nn.AvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(256, 128), torch.nn.ReLU(), torch.nn.Dropout(0.1),
        torch.nn.Linear(128, CLASSES),
    )  # fmt: skip


def build_mlp() -> torch.nn.Module:
    """A multi-layer perceptron with batch norm."""
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(3 * IMAGE * IMAGE, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(),
        torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, CLASSES),
    )  # fmt: skip


class EncoderDecoder(torch.nn.Module):
    """torch's own transformer with a causal decoder, which has cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = torch.nn.Embedding(VOCABULARY, 64), torch.nn.Embedding(VOCABULARY, 64)
        self.place = torch.nn.Parameter(0.02 * torch.randn(SEQUENCE, 64))
        self.transformer = torch.nn.Transformer(64, 4, 2, 2, dim_feedforward=128, dropout=0.1, batch_first=True)
        self.head = torch.nn.Linear(64, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        padding = torch.zeros(source.shape, dtype=mask.dtype)
        padding[:, -2:] = float("-inf")
        x = self.transformer(
            self.source(source) + self.place, self.target(target) + self.place, tgt_mask=mask, tgt_is_causal=True,
            src_key_padding_mask=padding, memory_key_padding_mask=padding,
        )  # fmt: skip
        logits: Tensor = self.head(x)
        return logits


def torch_translation(model: torch.nn.Module, generator: torch.Generator) -> Tensor:
    """Loss of `EncoderDecoder`: the sequence one token on."""
    batch = tokens(generator)
    target = torch.cat([torch.zeros(BATCH, 1, dtype=torch.int64), batch[:, 1:-1]], dim=1)
    return _cross_entropy(model(batch[:, :-1], target), batch[:, 1:])


class Mixer(torch.nn.Module):
    """MLP-Mixer (arXiv 2105.01601): linear layers along patches, then along channels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = torch.nn.Conv2d(3, 64, 8, stride=8)
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(64) for _ in range(4))
        self.mlps = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(size, 64), torch.nn.GELU(), torch.nn.Linear(64, size))
            for size in (16, 64, 16, 64)
        )
        self.head = torch.nn.Linear(64, CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.patches(pictures).flatten(2).transpose(1, 2)
        for index, (norm, mlp) in enumerate(zip(self.norms, self.mlps, strict=True)):
            y = norm(x)
            x = x + (mlp(y.transpose(1, 2)).transpose(1, 2) if index % 2 == 0 else mlp(y))
        return self.head(x.mean(dim=1))


def _transformers(model: str, config: str, **settings: Any) -> Callable[[], torch.nn.Module]:
    def build() -> torch.nn.Module:
        library = pytest.importorskip("transformers")
        return getattr(library, model)(getattr(library, config)(**settings))

    return build


def _timm(name: str, **settings: Any) -> Callable[[], torch.nn.Module]:
    def build() -> torch.nn.Module:
        try:
            _import_torchvision()
            timm = importlib.import_module("timm")
        except ImportError as error:
            pytest.skip(f"timm cannot be imported: {error}")
        return timm.create_model(name, num_classes=CLASSES, img_size=IMAGE, **settings)

    return build


@functools.cache
def _import_torchvision() -> torch.library.Library | None:
    """Import torchvision. Its compiled operators may be for another build of torch; image classifiers need none.

    The library that declares them lives as long as this function's result.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        importlib.import_module("torchvision")
        return library
    return None


_TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": SEQUENCE + 8, "pad_token_id": 0}
_SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
_PICTURE = {"image_size": IMAGE, "num_labels": CLASSES}

ARCHITECTURES: dict[str, Architecture] = {
    "mlp": Architecture(build_mlp, picture_class, is_slow=False),
    "cnn": Architecture(build_cnn, picture_class),
    "torch transformer": Architecture(EncoderDecoder, torch_translation),
    "mlp mixer": Architecture(Mixer, picture_class),
    "gpt2": Architecture(
        _transformers(
            "GPT2LMHeadModel", "GPT2Config", vocab_size=VOCABULARY, n_positions=SEQUENCE, n_embd=64, n_layer=2, n_head=4
        ),
        next_token,
    ),
    "llama": Architecture(
        _transformers("LlamaForCausalLM", "LlamaConfig", **_TEXT, **_SMALL, num_key_value_heads=2), next_token
    ),
    "bert": Architecture(_transformers("BertForMaskedLM", "BertConfig", **_TEXT, **_SMALL), restored_token),
    "t5": Architecture(
        _transformers(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=VOCABULARY,
            d_model=64,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        ),
        translation,
    ),
    "vit": Architecture(
        _transformers("ViTForImageClassification", "ViTConfig", **_PICTURE, **_SMALL, patch_size=8), picture_class
    ),
    "swin": Architecture(
        _transformers(
            "SwinForImageClassification",
            "SwinConfig",
            **_PICTURE,
            patch_size=4,
            embed_dim=32,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
        ),
        picture_class,
    ),
    "convnext": Architecture(
        _transformers(
            "ConvNextForImageClassification", "ConvNextConfig", **_PICTURE, hidden_sizes=[32, 64], depths=[1, 2],
            num_stages=2,
        ),
        picture_class,
    ),
    "timm swin": Architecture(
        _timm(
            "swin_tiny_patch4_window7_224", patch_size=2, window_size=4, embed_dim=32, depths=(2, 2), num_heads=(2, 4)
        ),
        picture_class,
    ),
}  # fmt: skip
