"""Ways to cast the gradient of the logits for an FP8 LM head (`fp8_megatron/nn/lm_head.py`), against float64, on a CPU.

python benchmarks/lm_head.py --output benchmarks/results/lm_head_cpu.json

A gradient of logits is p − onehot for each token. It is rounded to 16 bits; to E5M2 or E4M3 with one scale for all
tokens; or to E5M2 with a scale for each token, which makes the label's element −1 (`--fp8-lm-head`). The last way runs
the project's own function. All FP8 ways have the other operands of the GEMMs and of the logits in E4M3.

For each: the signal-to-noise ratio of the gradients of the norm's input and of the weight; what a token's gradient
sums to over the vocabulary, as a share of its label's element, in the mean over tokens (exact: 0); the share of
elements that become zero.

Numbers are drawn like those of a trained model: half of the power of the weight's rows is common to all rows, 8% of
the norm's output is common to all tokens, and labels are drawn from the model's probabilities.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

# Run as a script from a clone, installed or not.
sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.provenance import versions
from fp8_megatron.commands.arguments import Parser, output_file, whole
from fp8_megatron.commands.program import exit_status
from fp8_megatron.formats import E4M3, E5M2, MAX_FINITE
from fp8_megatron.kernels import ops
from fp8_megatron.nn.lm_head import fp8_norm_head_loss
from fp8_megatron.nn.normed import NormParams
from fp8_megatron.nn.parallelism import LOCAL
from fp8_megatron.outputs import write_output
from fp8_megatron.quantization.recipe import HeadQuantizers, Recipe
from fp8_megatron.quantization.stats import snr_db

#: The norm's output: its rms, and the share of its power that all tokens have in common. The weight: the share of its
#: power that its rows have in common. The standard deviation of a token's logits, which gives a loss of 4.8.
_INPUT_RMS, _COMMON_INPUT, _COMMON_WEIGHT, _LOGITS_STD = 1.25, 0.08, 0.5, 3.0


@dataclass(frozen=True)
class GradientFigures:
    """What one way of casting the gradient of the logits gives.

    Attributes:
        input_db, weight_db: SNR of the gradients of the norm's input and of the weight.
        sum_percent: the mean sum of a token's gradient over the vocabulary, per cent of its label's element.
        zeros: the share of elements that become zero.
    """

    input_db: float
    weight_db: float
    sum_percent: float
    zeros: float


class Problem:
    """A trained model's last hidden states, head and labels; exact values in float64.

    Attributes:
        x: BF16 [T, 1, h], in front of the norm. norm: RMSNorm with the common part of its output as a bias.
        weight: BF16 [V, h]. labels: int64 [T, 1], drawn from `shares` float64 [T, V].
    """

    def __init__(self, tokens: int, vocabulary: int, width: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.x = normal(tokens, 1, width).bfloat16().requires_grad_()
        own = _INPUT_RMS * math.sqrt(1.0 - _COMMON_INPUT)
        bias = _INPUT_RMS * math.sqrt(_COMMON_INPUT) * normal(width)
        self.norm = NormParams(torch.full((width,), own).bfloat16(), bias.bfloat16(), 1e-5, True)
        own_std = _LOGITS_STD / (_INPUT_RMS * math.sqrt(width))
        common = own_std * math.sqrt(_COMMON_WEIGHT / (1.0 - _COMMON_WEIGHT)) * normal(width)
        self.weight = (own_std * normal(vocabulary, width) + common).bfloat16().requires_grad_()
        x = self.x.detach().double().view(tokens, width).requires_grad_()
        normed = torch.nn.functional.rms_norm(x, (width,), self.norm.weight.double(), self.norm.eps) + bias.bfloat16()
        self._x, self._normed = x, normed
        self.logits = normed.detach() @ self.weight.detach().double().t()
        self.shares = torch.softmax(self.logits, dim=1)
        self.labels = torch.multinomial(self.shares.float(), 1, generator=generator)

    def operands(self) -> tuple[Tensor, Tensor]:
        """The norm's output [T, h] and the weight [V, h], float64."""
        return self._normed.detach(), self.weight.detach().double()

    def grad_x(self, grad_normed: Tensor) -> Tensor:
        """The gradient of x [T, h] from that of the norm's output."""
        return torch.autograd.grad(self._normed, self._x, grad_normed, retain_graph=True)[0]

    def grad_logits(self, logits: Tensor) -> Tensor:
        """p − onehot of each token, [T, V]."""
        return torch.softmax(logits, dim=1).scatter_add(1, self.labels, -torch.ones_like(logits[:, :1]))


def measure_gradients(problem: Problem) -> dict[str, GradientFigures]:
    """Figures of every way."""
    normed, weight = problem.operands()
    fp8 = _rounded(normed, E4M3), _rounded(weight, E4M3)
    logits8 = (fp8[0] @ fp8[1].t()).bfloat16().double()
    wide = problem.grad_logits(problem.logits.bfloat16().double())
    grad8 = problem.grad_logits(logits8)
    ways = {
        "16 bits": (wide.bfloat16().double(), wide, (normed, weight)),
        "E5M2, one scale": (_rounded(grad8, E5M2, amax=1.0), grad8, fp8),
        "E4M3, one scale": (_rounded(grad8, E4M3, amax=1.0), grad8, fp8),
    }
    exact = problem.grad_logits(problem.logits)
    expected = problem.grad_x(exact @ weight), exact.t() @ normed
    found = {}
    for way, (cast, value, (a, b)) in ways.items():
        labels = -value.gather(1, problem.labels)
        found[way] = GradientFigures(
            input_db=snr_db(problem.grad_x(cast @ b), expected[0]),
            weight_db=snr_db(cast.t() @ a, expected[1]),
            sum_percent=100 * (cast.sum(dim=1, keepdim=True) / labels).mean().item(),
            zeros=((cast == 0) & (value != 0)).double().mean().item(),
        )
    found["E5M2, a scale a token"] = _measure_ours(problem, expected)
    return found


def _measure_ours(problem: Problem, expected: tuple[Tensor, Tensor]) -> GradientFigures:
    """Figures of `fp8_norm_head_loss`. Its payloads are read where they are made."""
    payloads: list[Tensor] = []
    make = ops.cross_entropy_backward_quantize

    def record(*args: object, **settings: object) -> tuple[Tensor, Tensor]:
        made = make(*args, **settings)  # type: ignore[arg-type]
        payloads.append(made[0].double())
        return made

    loss = fp8_norm_head_loss(problem.x, problem.norm, problem.weight, problem.labels, _quantizers(), LOCAL)
    ops.cross_entropy_backward_quantize = record
    try:
        grad_x, grad_weight = torch.autograd.grad(loss, [problem.x, problem.weight], torch.ones_like(loss))
    finally:
        ops.cross_entropy_backward_quantize = make
    cast = torch.cat(payloads, dim=1)
    return GradientFigures(
        input_db=snr_db(grad_x.flatten(0, 1), expected[0]),
        weight_db=snr_db(grad_weight, expected[1]),
        sum_percent=100 * (cast.sum(dim=1, keepdim=True) / -cast.gather(1, problem.labels)).mean().item(),
        zeros=(cast == 0).double().mean().item(),
    )


def _quantizers() -> HeadQuantizers:
    return Recipe("tensorwise", False).head_quantizers()


def _rounded(value: Tensor, dtype: torch.dtype, amax: float | None = None) -> Tensor:
    """`value` cast with one scale from `amax`, or from its own, and decoded."""
    most = MAX_FINITE[dtype]
    scale = (value.abs().max() if amax is None else amax) / most
    return (value / scale).clamp(-most, most).float().to(dtype).double() * scale


def with_sizes(parser: Parser, words: Sequence[str], *, tokens: int, vocabulary: int, width: int) -> argparse.Namespace:
    """The command line with the sizes of a head, which have these defaults."""
    parser.add_argument("--tokens", type=whole(least=16, most=1 << 16), default=tokens)
    parser.add_argument("--vocabulary", type=whole(least=128, most=1 << 18), default=vocabulary)
    parser.add_argument("--width", type=whole(least=16, most=1 << 14), default=width)
    args = parser.parse_args(words)
    for name in ("tokens", "vocabulary", "width"):
        if getattr(args, name) % 16:
            parser.error(f"--{name} {getattr(args, name)} is not a multiple of 16, which FP8 GEMMs take")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(description=__doc__)
    parser.add_argument("--output", type=output_file, help="JSON file to write")
    args = with_sizes(parser, words, tokens=2048, vocabulary=8192, width=256)
    problem = Problem(args.tokens, args.vocabulary, args.width, seed=0)
    gradients = measure_gradients(problem)
    loss = -problem.shares.gather(1, problem.labels).log().mean().item()
    Console(width=110).print(_table(gradients))
    print(f"loss {loss:.2f}")
    if args.output is not None:
        report = {
            "command": shlex.join(["python", "benchmarks/lm_head.py", *words]),
            "device": "cpu",
            "versions": versions(["torch"]),
            "gradients": {way: asdict(found) for way, found in gradients.items()},
            "loss": loss,
        }
        write_output(args.output, (json.dumps(report, indent=1) + "\n").encode(), "--output")
    return 0


def _table(gradients: dict[str, GradientFigures]) -> Table:
    table = Table(title="Gradient of the logits")
    table.add_column("way")
    for heading in ("input, dB", "weight, dB", "sum, %", "zeros"):
        table.add_column(heading, justify="right")
    for way, found in gradients.items():
        numbers = (f"{found.input_db:.1f}", f"{found.weight_db:.1f}", f"{found.sum_percent:+.2f}", f"{found.zeros:.4%}")
        table.add_row(way, *numbers)
    return table


if __name__ == "__main__":
    sys.exit(exit_status(main))
