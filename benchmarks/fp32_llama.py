"""A Llama of transformers in FP32 on token files, trained by torch's AdamW. A benchmark adds the rounding."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fp8_megatron.config.schema import Config
from fp8_megatron.conversion.hugging_face_config import json_from_model

#: The part of the tokens that is validated on: the last.
_VALIDATED = 0.05


@dataclass(frozen=True)
class Trained:
    """A model after training.

    Attributes:
        training: the loss of every step, nats a token.
        crops: to validate on, int64 [b, s + 1] each.
        casts: layers whose output goes through the function that was given; may be changed.
    """

    model: torch.nn.Module
    training: list[float]
    crops: list[Tensor]
    casts: set[int]

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Nats a token."""
        return sum(_loss(self.model, crop).item() for crop in self.crops) / len(self.crops)

    def gradient(self) -> Tensor:
        """Of the loss of the first crops, by all weights of layers, flat."""
        self.model.zero_grad()
        _loss(self.model, self.crops[0]).backward()
        params = [param for name, param in self.model.named_parameters() if ".layers." in name and param.ndim == 2]
        return torch.cat([param.grad.flatten() for param in params if param.grad is not None])


def train(config: Config, layers: list[int], pass_on: Callable[[Tensor], Tensor]) -> Trained:
    """Train on random crops of the token file. One seed has the same weights and the same crops in every run.

    Args:
        config: its model is of Llama's kind, with ``vocab_size``; its data is one prefix of uint16 tokens. Batch, steps
            and AdamW's settings are taken from it. The rate warms up over ``lr_warmup_fraction`` of the steps and falls
            as a cosine.
        layers: whose output [b, s, h] goes through `pass_on`.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    vocab_size = config.model.vocab_size
    if vocab_size is None:
        raise ValueError("--fp32 reads no tokenizer; give --vocab-size")
    batch, steps, options = config.training.micro_batch_size, config.train_iters(1), config.optimizer
    torch.manual_seed(config.training.seed)
    model = LlamaForCausalLM(LlamaConfig(**json_from_model(config.model, vocab_size, "float32"))).float()
    casts = set(layers)
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(
            lambda layer, inputs, output, index=index: pass_on(output) if index in casts else output
        )
    betas = (options.adam_beta1, options.adam_beta2)
    adam = torch.optim.AdamW(
        model.parameters(), lr=options.lr, betas=betas, eps=options.adam_eps, weight_decay=options.weight_decay
    )
    (prefix,) = config.data.data_path
    tokens = np.memmap(f"{prefix}.bin", dtype=np.uint16, mode="r")
    cut = int(len(tokens) * (1 - _VALIDATED))
    draws = np.random.default_rng(config.training.seed)
    losses = []
    for step in range(steps):
        for group in adam.param_groups:
            group["lr"] = _rate(step, steps, options.lr, options.min_lr, options.lr_warmup_fraction or 0.0)
        loss = _loss(model, _crops(tokens[:cut], draws, batch, config.model.seq_length))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_grad)
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    held_out = np.random.default_rng(0)
    crops = [_crops(tokens[cut:], held_out, batch, config.model.seq_length) for _ in range(config.training.eval_iters)]
    return Trained(model, losses, crops, casts)


def _loss(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _crops(tokens: np.ndarray, draws: np.random.Generator, count: int, length: int) -> Tensor:
    """int64 [count, length + 1]."""
    starts = draws.integers(0, len(tokens) - length - 1, count)
    return torch.stack([torch.from_numpy(tokens[at : at + length + 1].astype(np.int64)) for at in starts])


def _rate(step: int, steps: int, most: float, least: float, warm_up: float) -> float:
    begun = (step + 1) / max(1.0, warm_up * steps)
    if begun < 1.0:
        return most * begun
    share = (step - warm_up * steps) / max(1.0, steps - warm_up * steps)
    return least + (most - least) * 0.5 * (1 + math.cos(math.pi * share))
