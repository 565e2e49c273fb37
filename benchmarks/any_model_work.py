"""The models, batches and rivals that `any_model.py` measures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

#: One batch: the keyword arguments of the model's forward, labels included; it returns the loss.
Batch = dict[str, Tensor]
#: Sizes that an FP8 GEMM takes.
_MULTIPLE = 16


@dataclass(frozen=True)
class Work:
    """A model of transformers, or of Transformer Engine's layers, and its batches.

    Attributes:
        build: the model with FP32 weights. True: a tiny one of the same kind, for a CPU.
        batch: (generator, device, tiny) → one batch.
        samples: sequences or images of a batch.
        needs: the package that the model's layers are from.
    """

    build: Callable[[bool], nn.Module]
    batch: Callable[[torch.Generator, torch.device, bool], Batch]
    samples: int
    about: str
    needs: str = "transformers"


def _images(samples: int, size: int) -> Callable[[torch.Generator, torch.device, bool], Batch]:
    def batch(generator: torch.Generator, device: torch.device, tiny: bool) -> Batch:
        count, side, classes = (4, 32, 16) if tiny else (samples, size, 1000)
        return {
            "pixel_values": torch.randn(count, 3, side, side, generator=generator, device=device),
            "labels": torch.randint(classes, (count,), generator=generator, device=device),
        }

    return batch


def _tokens(samples: int, length: int, vocab_size: int) -> Callable[[torch.Generator, torch.device, bool], Batch]:
    def batch(generator: torch.Generator, device: torch.device, tiny: bool) -> Batch:
        count, tokens, vocab = (2, 64, 256) if tiny else (samples, length, vocab_size)
        ids = torch.randint(vocab, (count, tokens), generator=generator, device=device)
        return {"input_ids": ids, "labels": ids}

    return batch


def _swin(tiny: bool) -> nn.Module:
    from transformers import SwinConfig, SwinForImageClassification

    shape: dict[str, Any] = {"embed_dim": 448, "depths": [2, 2, 18, 2], "num_heads": [14, 28, 56, 112]}
    if tiny:
        shape = {"image_size": 32, "embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4}
    config = SwinConfig(**shape, num_labels=16 if tiny else 1000, drop_path_rate=0.0)
    return SwinForImageClassification(config)


def _vit(tiny: bool, *, width: int, heads: int) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    layers = 24
    if tiny:
        width, heads, layers = 64, 4, 2
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            image_size=32 if tiny else 224,
            num_labels=16 if tiny else 1000,
        )
    )


def _gpt2(tiny: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256} if tiny else _GPT2_XL
    return GPT2LMHeadModel(GPT2Config(**shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False))


_GPT2_XL = {"n_embd": 1600, "n_layer": 48, "n_head": 25}


def _decoder(tiny: bool, *, kind: str, **shape: Any) -> nn.Module:
    """A model by transformers' name of its kind and the fields of its configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **{**shape, **(_TINY_DECODER if tiny else {})}, use_cache=False)
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def _decoder_shape(width: int, ffn: int, layers: int, heads: int, groups: int, head_dim: int) -> dict[str, int]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return dict(zip((*names, "head_dim"), (width, ffn, layers, heads, groups, head_dim), strict=True))


_TINY_DECODER = {**_decoder_shape(64, 128, 2, 4, 2, 16), "vocab_size": 256, "pad_token_id": 0}
_LLAMA = {"kind": "llama", "vocab_size": 128_256}


def _bert(tiny: bool) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    width, layers = (64, 2) if tiny else (1024, 24)
    return BertForMaskedLM(
        BertConfig(
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=4 if tiny else 16,
            intermediate_size=4 * width,
            vocab_size=256 if tiny else 30_522,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


class _TEGPT(nn.Module):
    """A GPT of ``te.TransformerLayer``."""

    def __init__(self, width: int, layers: int, vocab: int) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(
            te.TransformerLayer(
                width,
                4 * width,
                width // 128,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                self_attn_mask_type="causal",
                attn_input_format="bshd",
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = nn.functional.linear(self.norm(hidden), self.embedding.weight)
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits.flatten(0, 1)[:-1], labels.flatten()[1:]))


def _te_gpt(tiny: bool) -> nn.Module:
    return _TEGPT(256, 2, 256) if tiny else _TEGPT(2048, 24, 32_000)


WORKS = {
    "swin-1b": Work(_swin, _images(32, 224), 32, "Swin, 448 wide, depths 2 2 18 2, 32 images of 224 × 224"),
    "vit-l": Work(
        partial(_vit, width=1024, heads=16), _images(128, 224), 128, "ViT-L, 24 layers of 1024, 128 images of 224 × 224"
    ),
    "vit-1.2b": Work(
        partial(_vit, width=2048, heads=32), _images(64, 224), 64, "ViT, 24 layers of 2048, 64 images of 224 × 224"
    ),
    "gpt2-xl": Work(_gpt2, _tokens(8, 1024, 50_257), 8, "GPT-2-XL, 8 sequences of 1,024 tokens"),
    "llama-1b": Work(
        partial(_decoder, **_LLAMA, **_decoder_shape(2048, 8192, 16, 32, 8, 64), tie_word_embeddings=True),
        _tokens(4, 2048, 128_256),
        4,
        "Llama-3.2-1B's shape, 4 sequences of 2,048 tokens",
    ),
    "llama-8b-4-layers": Work(
        partial(_decoder, **_LLAMA, **_decoder_shape(4096, 14336, 4, 32, 8, 128)),
        _tokens(4, 2048, 128_256),
        4,
        "Llama-3-8B's shape with 4 of 32 layers and a head of its own, 4 sequences of 2,048 tokens",
    ),
    "qwen3-1.7b": Work(
        partial(
            _decoder,
            kind="qwen3",
            vocab_size=151_936,
            tie_word_embeddings=True,
            **_decoder_shape(2048, 6144, 28, 16, 8, 128),
        ),
        _tokens(4, 4096, 151_936),
        4,
        "Qwen3-1.7B, 4 sequences of 4,096 tokens",
    ),
    "gemma3-1b": Work(
        partial(
            _decoder,
            kind="gemma3_text",
            vocab_size=262_144,
            sliding_window=512,
            **_decoder_shape(1152, 6912, 26, 4, 1, 256),
        ),
        _tokens(4, 2048, 262_144),
        4,
        "Gemma-3-1B, 4 sequences of 2,048 tokens",
    ),
    "bert-large": Work(_bert, _tokens(32, 512, 30_522), 32, "BERT-large, 32 sequences of 512 tokens"),
    "te-gpt": Work(
        _te_gpt,
        _tokens(8, 1024, 32_000),
        8,
        "GPT of te.TransformerLayer, 24 layers of 2048, 8 sequences of 1,024 tokens",
        needs="transformer_engine",
    ),
}


@dataclass(frozen=True)
class Trainee:
    """A model under one rival's precision, with its optimizer and the context of its forward."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    context: Callable[[], AbstractContextManager[Any]]


def build(work: Work, run: str, device: torch.device, *, tiny: bool) -> Trainee:
    """A new model and optimizer of one run.

    All runs start from the same weights. Weights are FP32 and layers that are not in FP8 run in BF16 by autocast.
    """
    torch.manual_seed(1234)
    with torch.device(device):
        model = work.build(tiny)
    model.train()
    if run == "te-delayed":
        import transformer_engine.pytorch as te

        _swap_linears(model, te.Linear)
    elif run == "torchao-tensorwise":
        from torchao.float8 import convert_to_float8_training

        _swap_linears(model, nn.Linear)  # torchao converts nn.Linear alone: GPT-2 is made of Conv1D
        convert_to_float8_training(model, module_filter_fn=_may_be_float8)
    elif run == "bf16-unmasked":
        from fp8_megatron.any_model.left_out_masks import leave_out_masks

        leave_out_masks(model)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, weight_decay=0.05, fused=device.type == "cuda" and not run.startswith("O")
    )
    if run.startswith("O"):
        import fp8_megatron

        level, _, more = run.partition("-")
        model, optimizer = fp8_megatron.initialize(
            model,
            optimizer,
            opt_level=level,
            recipe="tensorwise" if more == "tensorwise" else "delayed",
            recompute_activations=more == "recompute",
        )
    return Trainee(model, optimizer, lambda: _context(run, device))


@contextlib.contextmanager
def _context(run: str, device: torch.device) -> Iterator[None]:
    with torch.autocast(device.type, torch.bfloat16):
        if run != "te-delayed":
            yield
            return
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import DelayedScaling

        with te.fp8_autocast(enabled=True, fp8_recipe=DelayedScaling()):
            yield


def _takes_fp8(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and all(size % _MULTIPLE == 0 for size in module.weight.shape)


def _may_be_float8(module: nn.Module, name: str) -> bool:
    return _takes_fp8(module) and "head" not in name


def _swap_linears(model: nn.Module, make: Callable[..., nn.Module]) -> None:
    """Put another class of layer in the place of untied linear layers, and of ``Conv1D``, with their values."""
    tied = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            is_conv = type(child).__name__ == "Conv1D"
            if not (is_conv or _takes_fp8(child)) or id(child.weight) in tied:
                continue
            weight = child.weight.detach().t() if is_conv else child.weight.detach()
            linear = make(weight.shape[1], weight.shape[0], bias=child.bias is not None).to(weight.device)
            with torch.no_grad():
                linear.weight.copy_(weight)
                if child.bias is not None:
                    linear.bias.copy_(child.bias)
            setattr(parent, name, linear)
