"""What one outlier channel of SwiGLU's output costs the second projection's GEMMs, in dB, and what Smooth-SwiGLU would
gain (arXiv 2409.12517, section 4.4).

    python benchmarks/outlier_casts.py --output FILE

Smooth-SwiGLU casts h / s instead of h [T, K], with a power of two s for each channel, from its amax in this
micro-batch. The GEMMs of a weight W [N, K] that rests in FP8 with one scale would take s up so:

- fprop: y = (h / s) · (W · s)ᵀ. W · s is W with other exponents. With s = amax of the channel / amax of the tensor, at
  most 1, nothing overflows, and columns of small channels move towards E4M3's smallest numbers: `LEAST` bounds s. It
  is a copy of W for each micro-batch, N · K bytes read and written.
- dgrad does not see h, and takes W as it rests.
- wgrad: gᵀ · h = (gᵀ · (h / s)) · s, on columns of the result. So the GEMM can neither add to a gradient nor write FP8:
  it writes N · K in 16 bits, which a pass over them multiplies and adds.
- s needs all tokens of a channel, so the activation is computed twice, once for the amaxes.

The weights are normal, aligned as in outliers.py; exact is float64 with W as it rests.
"""

# the path to the package comes before its import
from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.outliers import align_mlp_
from benchmarks.provenance import write_rows
from fp8_megatron.commands.program import exit_status
from fp8_megatron.formats.format import Quantized
from fp8_megatron.formats.recipes import roles_of
from fp8_megatron.kernels import ops
from fp8_megatron.quantization.stats import snr_db

NUM_TOKENS, HIDDEN, FFN, CHANNEL = 2048, 256, 1024, 7
#: Of a channel's scale: 10 of the 14.8 powers of two that E4M3's normal numbers span.
LEAST = 2.0**-10
FACTORS = (0.0, 1e2, 1e3, 1e4, 1e5, 1e6)
#: How much larger an amax is than its delayed scale expects.
JUMPS = (4, 16)
#: The outlier's column of the second projection: divided by as much (its share of the output stays), or as before.
Column = Literal["divided", "ordinary"]


@dataclass(frozen=True)
class Row:
    """A cast of SwiGLU's output behind an outlier.

    Attributes:
        factor: largest output over the median of all; 0: no outlier.
        underflowed: fraction of the input that became 0.
        output_db, wgrad_db: SNR of fprop and of the weight gradient. others_db: of the gradient's other columns.
    """

    factor: float
    column: Column
    cast: str
    underflowed: float
    output_db: float
    wgrad_db: float
    others_db: float


@dataclass(frozen=True)
class Case:
    """SwiGLU's output h [T, K], the weight at rest [N, K] with its scale [1], and y's gradient [T, N], all FP32."""

    h: Tensor
    weight: Tensor
    scale: Tensor
    grad: Tensor

    @classmethod
    def of(cls, factor: float, column: Column) -> Case:
        """One MLP of normal weights with an outlier; tokens' gradients differ by powers of two."""
        generator = torch.Generator().manual_seed(0)
        sizes = {"gate": (FFN, HIDDEN), "up": (FFN, HIDDEN), "down": (HIDDEN, FFN)}
        weights = {
            f"mlp.{name}_proj.weight": torch.randn(size, generator=generator) / HIDDEN**0.5
            for name, size in sizes.items()
        }
        weights["post_attention_layernorm.weight"] = torch.ones(HIDDEN)
        before = weights["mlp.down_proj.weight"].clone()
        if factor:
            align_mlp_(weights, "", factor, CHANNEL)
        gate, up, down = (weights[f"mlp.{name}_proj.weight"] for name in sizes)
        x = torch.randn(NUM_TOKENS, HIDDEN, generator=generator)
        grad = torch.randn(NUM_TOKENS, HIDDEN, generator=generator)
        grad *= torch.randn(NUM_TOKENS, 1, generator=generator).exp2()
        at_rest = roles_of("tensorwise", False).weight.cast(before if column == "ordinary" else down)
        return cls(torch.nn.functional.silu(x @ gate.T) * (x @ up.T), at_rest.payload, at_rest.scale, grad)


def smooth_scales(h: Tensor) -> Tensor:
    """A power of two for each channel of h [T, K], FP32 [K]: its amax / the tensor's, rounded up, at least `LEAST`."""
    amax = h.abs().amax(0)
    return (amax / amax.amax()).log2().ceil().exp2().clamp(min=LEAST)


def products(case: Case, name: str) -> tuple[Quantized, Tensor, Tensor]:
    """The cast input, y [T, N] and the weight gradient [N, K], FP32, as the layers compute them."""
    roles = roles_of("blockwise" if name == "blockwise" else "tensorwise", False)
    h, payload, columns = case.h, case.weight, torch.ones(FFN)
    if name == "smooth":
        columns = smooth_scales(h)
        h, payload = h / columns, (payload.float() * columns).to(payload.dtype)
    scale = None
    if name.startswith("jump"):
        scale = h.abs().amax().view(1) / float(name.split()[1]) / torch.finfo(payload.dtype).max
    x = roles.input.cast(h, scale, transposed=True)
    g = roles.grad_output.cast(case.grad, transposed=True)
    weight = roles.weight.stored_weight(payload, case.scale)
    return x, x.multiply(weight, torch.float32), g.t.multiply(x.t, torch.float32) * columns


def rows() -> Iterator[Row]:
    """All casts behind all outliers."""
    for column in ("divided", "ordinary"):
        for factor in FACTORS:
            case = Case.of(factor, column)
            exact = case.h.double() @ ops.decode(case.weight, case.scale).double().T
            exact_wgrad = case.grad.double().T @ case.h.double()
            others = torch.arange(FFN) != CHANNEL
            for name in ("tensorwise", "smooth", "blockwise", *(f"jump {jump}" for jump in JUMPS)):
                x, y, wgrad = products(case, name)
                yield Row(
                    factor=factor,
                    column=column,
                    cast=name,
                    underflowed=float(((x.payload.float() == 0) & (case.h != 0)).double().mean()),
                    output_db=snr_db(y, exact),
                    wgrad_db=snr_db(wgrad, exact_wgrad),
                    others_db=snr_db(wgrad[:, others], exact_wgrad[:, others]),
                )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    options = parser.parse_args()
    found = list(rows())
    for row in found:
        print(row)
    write_rows(options.output, "benchmarks/outlier_casts.py", None, found, device="cpu")
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
