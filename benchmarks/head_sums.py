"""How a GPU adds up the products of the FP8 LM head's backward GEMMs, against float64 sums of the same operands.

python benchmarks/head_sums.py --output runs/head_sums.json

Tensor cores add FP8 products with fewer bits than FP32 has. In a column of the logits' gradient the label's element is
−1, and the others are probabilities, which can be thousands of times smaller. What a short sum cuts off is then not
noise: it always makes the sum of the others smaller. This measures it for both forms of the operand:

- `p − onehot`, with a scale for each token, as `--fp8-lm-head` casts it;
- `p`, with one scale: the labels' part would be added apart, in 16 bits.

For dgrad and wgrad: the SNR of the sums, and their bias. The bias is that of the sum along the mean of the other
operand's rows, in % of what the elements without labels contribute. wgrad's is listed by how many labels a row has.

Numbers are drawn like those of a trained model: frequencies of tokens follow Zipf's law, and labels are drawn from the
model's probabilities. Without a GPU the sums are emulated: 32 products at a time are cut off at 2^-BITS of their
largest (--sum-bits), and every 128 products the sum goes to FP32.
"""

from __future__ import annotations

import json
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
from benchmarks.lm_head import with_sizes
from benchmarks.provenance import commit, versions
from fp8_megatron.commands.arguments import Parser, output_file, whole
from fp8_megatron.commands.program import exit_status
from fp8_megatron.formats import E4M3, E5M2, MAX_FINITE
from fp8_megatron.kernels import ops
from fp8_megatron.outputs import write_output
from fp8_megatron.quantization.stats import snr_db

#: The spread of logits beside their tokens' frequency, and of the first column of the norm's output, which carries it.
_OWN_STD, _CONSTANT = 1.6, 3.0
#: Products that a tensor core adds at once, and those between two additions in FP32.
_GROUP, _TILE = 32, 128
#: How many labels a row has: from the first number up to below the second.
_CLASSES = {
    "0 labels": (0, 1),
    "1 to 3 labels": (1, 4),
    "4 to 15 labels": (4, 16),
    "16 to 63 labels": (16, 64),
    "64 to 255 labels": (64, 256),
    "256 labels or more": (256, 1 << 30),
}
#: Rows of a class and tokens that are measured.
_MOST_ROWS, _MOST_TOKENS = 24, 64


@dataclass(frozen=True)
class Sums:
    """What one GEMM's sums lose.

    Attributes:
        db: SNR against float64 sums of the same operands.
        bias_percent: see the module.
    """

    db: float
    bias_percent: float


class Problem:
    """A trained model's norm(x) [T, h], head [V, h], labels [T] and probabilities [T, V]."""

    def __init__(self, tokens: int, vocabulary: int, width: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        normal = {"generator": generator, "device": device}
        frequency = -torch.log(torch.arange(vocabulary, device=device) + 2.7)
        self.x = torch.randn(tokens, width, **normal)
        self.x[:, 0] = _CONSTANT
        self.weight = torch.randn(vocabulary, width, **normal) * (_OWN_STD / width**0.5)
        self.weight[:, 0] = (frequency - frequency.mean()) / _CONSTANT
        logits = (self.x @ self.weight.t()).bfloat16()
        self.log_sum_exp = torch.logsumexp(logits.float(), dim=1)
        self.shares = (logits.float() - self.log_sum_exp[:, None]).exp()
        self.labels = torch.multinomial(self.shares, 1, generator=generator)[:, 0]
        self.logits = logits

    def operands(self, form: str) -> tuple[Tensor, Tensor, Tensor]:
        """The logits' gradient [T, V] in E5M2, and the other operands of dgrad [V, h] and wgrad [T, h] in E4M3."""
        if form == "p":
            return (self.shares * 2.0**15).to(E5M2), _cast(self.weight), _cast(self.x)
        target = self.logits.float().gather(1, self.labels[:, None])[:, 0]
        upstream = torch.full_like(target, 1.0 / len(target))
        factors, scales, scale = ops.token_scales(self.log_sum_exp, target, upstream)
        payload, _ = ops.cross_entropy_backward_quantize(
            self.logits, self.labels, self.log_sum_exp, factors, scale, E5M2, first=0, num_columns=len(self.weight)
        )
        return payload, _cast(self.weight), _cast(self.x * scales[:, None])


def measure(problem: Problem, sum_bits: int) -> dict[str, Sums]:
    """Figures by form, GEMM and class of rows."""
    found = {}
    counts = torch.bincount(problem.labels, minlength=len(problem.weight))
    tokens = torch.arange(0, len(problem.x), max(1, len(problem.x) // _MOST_TOKENS), device=problem.x.device)
    for form in ("p − onehot", "p"):
        payload, weight, x = problem.operands(form)
        grad = payload.float()
        others = grad if form == "p" else grad.scatter(1, problem.labels[:, None], 0.0)
        found[f"{form}, dgrad"] = _sums(grad[tokens], weight, others[tokens], sum_bits)
        for labels, (low, high) in _CLASSES.items():
            rows = ((counts >= low) & (counts < high)).nonzero()[:, 0]
            if len(rows):
                rows = rows[:: max(1, len(rows) // _MOST_ROWS)]
                found[f"{form}, wgrad, {labels}"] = _sums(grad[:, rows].t(), x, others[:, rows].t(), sum_bits)
    return found


def _sums(a: Tensor, b: Tensor, others: Tensor, sum_bits: int) -> Sums:
    """Figures of a [M, K] · b [K, h]: E5M2 numbers in FP32, and E4M3. `others` [M, K] is `a` without labels."""
    exact = a.double() @ b.double()
    if a.is_cuda:
        one, count = torch.ones(1, device=a.device), len(a)
        padded = torch.zeros(-(-count // 16) * 16, a.shape[1], dtype=E5M2, device=a.device)
        padded[:count] = a
        product = ops.scaled_mm(padded, b.t().contiguous(), one, one, out_dtype=torch.float32)[:count]
    else:
        product = _emulated(a, b.float(), sum_bits)
    direction = b.double().mean(dim=0)
    bias = ((product.double() - exact) @ direction).sum() / (others.double() @ b.double() @ direction).sum()
    return Sums(db=snr_db(product, exact), bias_percent=100 * bias.item())


def _emulated(a: Tensor, b: Tensor, bits: int) -> Tensor:
    """a [M, K] · b [K, h] with short sums."""
    length = -(-a.shape[1] // _TILE) * _TILE
    a, b = (torch.nn.functional.pad(x, (0, 0, 0, length - len(x))) for x in (a.t(), b))
    total = []
    for column in a.t():
        products = (column[:, None] * b).view(-1, _TILE // _GROUP, _GROUP, b.shape[1])
        inner = torch.zeros(len(products), b.shape[1])
        for group in products.unbind(1):
            largest = torch.maximum(group.abs().amax(dim=1), inner.abs())
            inner = _cut(_cut(group, largest[:, None], bits).sum(dim=1) + _cut(inner, largest, bits), None, bits)
        total.append(inner.sum(dim=0))
    return torch.stack(total)


def _cut(x: Tensor, largest: Tensor | None, bits: int) -> Tensor:
    """`x` towards zero to multiples of 2^-bits of the power of two in `largest`, or in itself."""
    exponent = torch.frexp((x.abs() if largest is None else largest).clamp_min(1e-38))[1] - 1
    unit = torch.ldexp(torch.ones_like(x), exponent - bits)
    return torch.trunc(x / unit) * unit


def _cast(x: Tensor) -> Tensor:
    return (x * (MAX_FINITE[E4M3] / x.abs().max())).to(E4M3)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(description=__doc__)
    parser.add_argument("--output", type=output_file, help="JSON file to write")
    parser.add_argument("--sum-bits", type=whole(least=4, most=23), default=13, help="of an emulated sum, on a CPU")
    args = with_sizes(parser, words, tokens=8192, vocabulary=32000, width=1024)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = measure(Problem(args.tokens, args.vocabulary, args.width, device), args.sum_bits)
    table = Table(title="" if device.type == "cuda" else f"emulated, {args.sum_bits} bits")
    for column in ("operand and GEMM", "SNR, dB", "bias, %"):
        table.add_column(column)
    for name, sums in found.items():
        table.add_row(name, f"{sums.db:.1f}", f"{sums.bias_percent:+.3f}")
    Console(width=110).print(table)
    if args.output is not None:
        report = {
            "command": shlex.join(["python", "benchmarks/head_sums.py", *words]),
            "commit": commit(),
            "device": torch.cuda.get_device_name() if device.type == "cuda" else f"cpu, {args.sum_bits} bits emulated",
            "versions": versions(["torch"]),
            "sums": {name: asdict(sums) for name, sums in found.items()},
        }
        write_output(args.output, (json.dumps(report, indent=1, ensure_ascii=False) + "\n").encode(), "--output")
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
