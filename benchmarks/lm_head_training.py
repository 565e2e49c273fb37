"""Train a small language model with forms of the LM head side by side, on a CPU.

python benchmarks/lm_head_training.py --token-file tokens.npy --output benchmarks/results/lm_head_training_cpu.json

The model predicts a token from the four before it, by one MLP, a norm and a head that is tied to the embedding. It is
small, so that batches can be large: what all tokens of a batch do alike is not hidden by what they do by chance. All
forms start from the same weights and see the same batches.

| form | logits | gradient of the logits |
| --- | --- | --- |
| 16 bits | BF16 | exact |
| FP8 logits | FP8 | exact |
| one scale | FP8 | E5M2, one scale for all tokens |
| a scale a token | FP8 | E5M2, a scale for each token (`fp8_megatron.nn.lm_head`) |

Writes the losses of each form beside those of 16 bits, per cent, after every --interval steps: in training, the mean of
the last --interval steps; in validation, with the head in 16 bits, and with the form's own. Also the norm of what all
rows of the head's weight have in common.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Run as a script from a clone, installed or not.
sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.provenance import versions
from fp8_megatron.commands.arguments import Parser, output_file, path, whole
from fp8_megatron.commands.program import exit_status
from fp8_megatron.errors import UserError
from fp8_megatron.formats import E4M3, E5M2, MAX_FINITE
from fp8_megatron.outputs import write_output

FORMS = ("16 bits", "FP8 logits", "one scale", "a scale a token")
#: Tokens that a prediction reads, the model's width, tokens of a batch, batches of a validation.
_CONTEXT, _WIDTH, _BATCH, _VALIDATION = 4, 96, 4096, 4
_LR, _WARMUP = 2e-3, 40
#: Tokens at the start of the file that are for validation.
_HELD_OUT = 200_000


@dataclass(frozen=True)
class Figures:
    """Losses of one form after some steps, per cent above those of 16 bits; see the module.

    Attributes:
        common_norm: of the mean row of the head's weight.
    """

    training: float
    validation: float
    validation_in_own_form: float
    common_norm: float


class Head(torch.autograd.Function):
    """Cross-entropy of h·Wᵀ in one of `FORMS`: h FP32 [T, K], weight FP32 [V, K], labels int64 [T] → FP32 []."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, labels: Tensor, form: str) -> Tensor:
        h, weight = h.bfloat16().float(), weight.bfloat16().float()
        operands = (h, weight) if form == "16 bits" else (_rounded(h, E4M3), _rounded(weight, E4M3))
        logits = (operands[0] @ operands[1].t()).bfloat16().float()
        ctx.save_for_backward(h, weight, labels, logits)
        ctx.form = form
        return torch.nn.functional.cross_entropy(logits, labels)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        h, weight, labels, logits = ctx.saved_tensors
        rows, mean = torch.arange(len(labels)), 1 / len(labels)
        grad = torch.softmax(logits, dim=1)
        label = 1 - grad[rows, labels]
        grad[rows, labels] = -label
        if ctx.form in ("16 bits", "FP8 logits"):
            return (grad @ weight) * mean, (grad.t() @ h) * mean, None, None
        if ctx.form == "one scale":
            cast = _rounded(grad, E5M2, amax=1.0)
            return cast @ _rounded(weight, E4M3) * mean, cast.t() @ _rounded(h, E4M3) * mean, None, None
        inverse = 1 / (0.99722 * label.clamp_min(2.0**-20))
        cast = _rounded(grad.mul_(inverse[:, None]), E5M2, amax=MAX_FINITE[E5M2] * 2.0**-15)
        scales = (label * mean)[:, None]
        return (cast @ _rounded(weight, E4M3)) * scales, cast.t() @ _rounded(h * scales, E4M3), None, None


class Model(torch.nn.Module):
    """Tokens [T, 4] and the next ones [T] → their loss."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, _WIDTH)
        self.fc1 = torch.nn.Linear(_CONTEXT * _WIDTH, 4 * _WIDTH)
        self.fc2 = torch.nn.Linear(4 * _WIDTH, _WIDTH)
        self.norm = torch.nn.LayerNorm(_WIDTH)
        torch.nn.init.normal_(self.embedding.weight, 0, 0.02)

    def forward(self, tokens: Tensor, labels: Tensor, form: str) -> Tensor:
        embedded = self.embedding(tokens)
        hidden = self.fc2(torch.nn.functional.gelu(self.fc1(embedded.flatten(1))))
        return Head.apply(self.norm(embedded[:, -1] + hidden), self.embedding.weight, labels, form)


def train(tokens: Tensor, *, steps: int, interval: int, seed: int) -> dict[str, dict[str, Figures]]:
    """Figures by step and form."""
    vocabulary = int(tokens.max()) + 1
    models, optimizers = {}, {}
    for form in FORMS:
        torch.manual_seed(seed)
        models[form] = Model(vocabulary)
        optimizers[form] = torch.optim.AdamW(models[form].parameters(), lr=_LR, betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(seed)
    held_out = torch.randint(
        _CONTEXT, _HELD_OUT, (_VALIDATION * _BATCH,), generator=torch.Generator().manual_seed(9)
    ).split(_BATCH)
    losses: dict[str, list[float]] = {form: [] for form in FORMS}
    found: dict[str, dict[str, Figures]] = {}
    for step in range(steps):
        batch = _batch(tokens, torch.randint(_HELD_OUT, len(tokens), (_BATCH,), generator=generator))
        for form in FORMS:
            for group in optimizers[form].param_groups:
                group["lr"] = _LR * min(1, (step + 1) / _WARMUP) * (0.505 + 0.495 * math.cos(math.pi * step / steps))
            optimizers[form].zero_grad()
            loss = models[form](*batch, form)
            loss.backward()
            optimizers[form].step()
            losses[form].append(loss.item())
        if (step + 1) % interval == 0:
            found[str(step + 1)] = _figures(models, losses, [_batch(tokens, at) for at in held_out], interval)
            print(step + 1, {form: asdict(figures) for form, figures in found[str(step + 1)].items()}, flush=True)
    return found


@torch.no_grad()
def _figures(
    models: dict[str, Model], losses: dict[str, list[float]], batches: list[tuple[Tensor, Tensor]], interval: int
) -> dict[str, Figures]:
    def validation(form: str, head: str) -> float:
        return sum(models[form](*batch, head).item() for batch in batches) / len(batches)

    training = {form: sum(losses[form][-interval:]) for form in FORMS}
    reference = validation("16 bits", "16 bits")
    return {
        form: Figures(
            training=100 * (training[form] / training["16 bits"] - 1),
            validation=100 * (validation(form, "16 bits") / reference - 1),
            validation_in_own_form=100 * (validation(form, form) / reference - 1),
            common_norm=model.embedding.weight.mean(dim=0).norm().item(),
        )
        for form, model in models.items()
    }


def _batch(tokens: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    return tokens[at[:, None] + torch.arange(-_CONTEXT, 0)], tokens[at]


def _rounded(value: Tensor, dtype: torch.dtype, amax: float | None = None) -> Tensor:
    """`value` cast with one scale from `amax`, or from its own, and decoded."""
    most = MAX_FINITE[dtype]
    scale = (value.abs().amax() if amax is None else torch.tensor(amax)) / most
    return (value / scale).clamp(-most, most).to(dtype).float() * scale


def main(argv: Sequence[str] | None = None) -> int:
    """Train, print, write; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(description=__doc__)
    parser.add_argument("--token-file", type=path, required=True, help="numpy file of token ids, int64 [n]")
    parser.add_argument("--steps", type=whole(most=1 << 20), default=900)
    parser.add_argument("--interval", type=whole(most=1 << 20), default=100)
    parser.add_argument("--seed", type=whole(least=0, most=1 << 31), default=1)
    parser.add_argument("--output", type=output_file, help="JSON file to write")
    args = parser.parse_args(words)
    try:
        tokens = torch.from_numpy(np.load(args.token_file))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"--token-file {args.token_file}: {error}; give a numpy file") from error
    if tokens.dtype != torch.int64 or tokens.dim() != 1 or len(tokens) <= _HELD_OUT + _BATCH:
        raise UserError(
            f"--token-file {args.token_file}: {tokens.dtype} {list(tokens.shape)} is not int64 [n] with n above "
            f"{_HELD_OUT + _BATCH}; give more tokens"
        )
    found = train(tokens, steps=args.steps, interval=args.interval, seed=args.seed)
    if args.output is not None:
        report = {
            "command": shlex.join(["python", "benchmarks/lm_head_training.py", *words]),
            "device": "cpu",
            "versions": versions(["torch"]),
            "steps": {
                step: {form: asdict(figures) for form, figures in forms.items()} for step, forms in found.items()
            },
        }
        write_output(args.output, (json.dumps(report, indent=1) + "\n").encode(), "--output")
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
