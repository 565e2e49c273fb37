"""Precision of FP8 weight gradients in a real run: pretrain_gpt.py, with a sample of its gradients measured.

python -m tools.gradient_snr runs/snr.json --config configs/gpt_345m.yaml --fp8-recipe delayed \
    --fp8-weight-grad-scaling delayed --mock-data --train-iters 100

The first argument is the file that rank 0 writes; the others go to pretrain_gpt.py. Every 97th gradient is measured, so
that all layers have their turn. Its reference is the FP32 product of the same FP8 operands. Two roundings are compared
with it: the gradient as the run sends it, and blocks of 128 with one scale each. The figures are signal-to-noise ratio
in dB, and the share of elements that saturate. Python does the measuring, so steps are not recorded (--cuda-graph-impl
none).
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

if importlib.util.find_spec("fp8_megatron") is None:  # a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


from fp8_megatron.commands import pretrain_gpt
from fp8_megatron.commands.program import exit_status
from fp8_megatron.dtypes import E4M3, GRAD_BLOCK, MAX_FINITE
from fp8_megatron.kernels import ops
from fp8_megatron.outputs import check_output_file, write_output
from fp8_megatron.quantization.stats import snr_db
from fp8_megatron.quantization.weight_grad import WeightGrad

_EVERY = 97


@dataclass
class Sample:
    """Figures of the gradients measured, in the order of training."""

    num_seen: int = 0
    delayed_db: list[float] = field(default_factory=list)
    block_db: list[float] = field(default_factory=list)
    saturated: list[float] = field(default_factory=list)

    def take(self, grad: WeightGrad, payload: Tensor, scales: Tensor) -> None:
        """If its turn has come, measure a gradient [N, K] that was written as flat `payload` with `scales`."""
        self.num_seen += 1
        if self.num_seen % _EVERY:
            return
        exact = grad.g_t.multiply(grad.x_t, torch.float32).view(-1)
        numel = exact.numel()
        written = ops.dequantize_blockwise(payload, scales)[:numel]
        blocks = torch.empty(payload.numel(), dtype=E4M3, device=payload.device)
        block_scales = torch.empty(payload.numel() // GRAD_BLOCK, device=payload.device)
        ops.quantize_blockwise_(grad.wide().view(-1), blocks, block_scales)
        self.delayed_db.append(snr_db(written, exact))
        self.block_db.append(snr_db(ops.dequantize_blockwise(blocks, block_scales)[:numel], exact))
        largest = MAX_FINITE[E4M3] * scales[0]
        self.saturated.append((exact.abs() > largest).float().mean().item())

    def summary(self) -> dict[str, object]:
        """The figures for the file."""
        if not self.delayed_db:
            return {"gradients": 0}
        return {
            "gradients": len(self.delayed_db),
            "delayed_db": _spread(self.delayed_db),
            "block_db": _spread(self.block_db),
            "gradients_that_saturate": sum(share > 0 for share in self.saturated),
            "largest_share_saturated": max(self.saturated),
        }


def _spread(values: list[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def main() -> int:
    """Train and write; returns the run's exit status."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print("the first argument is the file to write: python -m tools.gradient_snr FILE --config …")
        return 2
    output, sample = Path(sys.argv.pop(1)), Sample()
    check_output_file(output, "FILE")
    sys.argv += ["--cuda-graph-impl", "none"]
    write = WeightGrad.write_fp8_

    def write_and_measure(grad: WeightGrad, payload: Tensor, scales: Tensor) -> None:
        write(grad, payload, scales)
        sample.take(grad, payload, scales)

    WeightGrad.write_fp8_ = write_and_measure  # type: ignore[method-assign]
    try:
        status = pretrain_gpt.main()
    finally:
        WeightGrad.write_fp8_ = write  # type: ignore[method-assign]
    if status == 0 and os.environ.get("RANK", "0") == "0":
        summary = {"flags": sys.argv[1:], "torch": torch.__version__, **sample.summary()}
        write_output(output, (json.dumps(summary, indent=1) + "\n").encode())
        print(json.dumps(summary))
    return status


if __name__ == "__main__":
    sys.exit(exit_status(main))
