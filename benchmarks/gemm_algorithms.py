"""Time cuBLASLt's algorithms for the FP8 GEMMs of models, on one GPU:

python benchmarks/gemm_algorithms.py --output runs/gemm_algorithms.json

For each GEMM of a layer: the time of the heuristic's first algorithm and of the fastest that writes the same bits, and
how many write other bits. Forward accumulates fast, backward does not. Training chooses among forward's
(`kernels.gemm.algorithm_choice`).
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

# Run as a script from a clone, installed or not.
sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.provenance import commit
from fp8_megatron.commands.arguments import Parser, output_file
from fp8_megatron.commands.program import exit_status
from fp8_megatron.formats import E4M3, E5M2
from fp8_megatron.kernels.gemm import cublaslt
from fp8_megatron.kernels.gemm.algorithm_choice import _LAUNCHES, _digest, _timed
from fp8_megatron.outputs import write_output

_CANDIDATES = 8


@dataclass(frozen=True)
class Layer:
    """Sizes of a layer's GEMMs on one rank.

    Attributes:
        tokens: of a micro-batch. parts: in which forward and the input's gradient take them.
    """

    tokens: int
    hidden: int
    qkv: int
    proj_input: int
    fc1: int
    fc2_input: int
    parts: int = 1


#: By model.
LAYERS = {
    "gpt-345m": Layer(32768, 1024, 3072, 1024, 4096, 4096),
    "gpt-7b": Layer(8192, 4096, 12288, 4096, 16384, 16384),
    "llama-1b": Layer(8192, 2048, 3072, 2048, 16384, 8192),
    "llama-3-8b": Layer(8192, 4096, 6144, 4096, 28672, 14336),
    "gpt-30b-tp4": Layer(4096, 7168, 5376, 1792, 7168, 7168, parts=4),
    "llama-3-70b-tp4": Layer(8192, 8192, 2560, 2048, 14336, 7168, parts=4),
}


@dataclass(frozen=True)
class Row:
    """A GEMM a [M, K] · b [N, K]ᵀ; microseconds a launch.

    Attributes:
        fastest: of those that write the first one's bits. others: algorithms that write other bits.
    """

    model: str
    gemm: str
    m: int
    n: int
    k: int
    first: float
    fastest: float
    algorithms: int
    others: int


def main() -> int:
    """Measure, print and write; returns the exit status."""
    args = _parse()
    if not torch.cuda.is_available() or not cublaslt.is_available():
        print("error: cuBLASLt needs a GPU, and there is none; run this on a machine with one", file=sys.stderr)
        return 2
    rows = [_measure(*problem) for name in args.models for problem in _problems(name, LAYERS[name])]
    print(f"{'µs':42} {'first':>9} {'fastest':>9} {'gain':>6}  other bits")
    for row in rows:
        name = f"{row.model} {row.gemm} [{row.m}, {row.n}, {row.k}]"
        gain = row.first / row.fastest
        print(f"{name:42} {row.first:9.1f} {row.fastest:9.1f} {gain:6.3f}  {row.others} of {row.algorithms}")
    if args.output is not None:
        report = {
            "command": shlex.join(["python", *sys.argv]),
            "commit": commit(),
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "rows": [asdict(row) for row in rows],
            "sums": {model: _sums([row for row in rows if row.model == model]) for model in args.models},
        }
        write_output(args.output, (json.dumps(report, indent=1) + "\n").encode(), "--output")
    return 0


def _parse() -> argparse.Namespace:
    parser = Parser(description="Time cuBLASLt's algorithms for the FP8 GEMMs of models.")
    parser.add_argument("--models", nargs="+", choices=list(LAYERS), default=list(LAYERS))
    parser.add_argument("--output", type=output_file, help="JSON of every figure")
    return parser.parse_args()


def _problems(model: str, layer: Layer) -> Iterator[tuple[str, str, int, int, int]]:
    """(model, GEMM, M, N, K) of a layer's forward, input gradients and weight gradients."""
    rows = layer.tokens // layer.parts
    for name, n, k in (
        ("qkv", layer.qkv, layer.hidden),
        ("proj", layer.hidden, layer.proj_input),
        ("fc1", layer.fc1, layer.hidden),
        ("fc2", layer.hidden, layer.fc2_input),
    ):
        yield model, f"{name} forward", rows, n, k
        yield model, f"{name} dgrad", rows, k, n
        yield model, f"{name} wgrad", n, k, layer.tokens


def _measure(model: str, gemm: str, m: int, n: int, k: int) -> Row:
    is_forward = gemm.endswith("forward")
    generator = torch.Generator("cuda").manual_seed(0)
    a = torch.randn(m, k, device="cuda", generator=generator).to(E4M3 if is_forward else E5M2)
    b = torch.randn(n, k, device="cuda", generator=generator).to(E4M3)
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    scale = torch.ones(4, device="cuda")[:1]
    mode = cublaslt.TENSOR_SCALE
    problem = cublaslt._Problem(
        a.shape, b.shape, a.dtype, b.dtype, out.dtype, None, False, is_forward, 256, a.get_device(), mode, mode
    )
    plan = cublaslt._Plan(problem)
    for pointer in (cublaslt._A_SCALE, cublaslt._B_SCALE):
        plan.point_at(pointer, scale)
    launches = [plan._prepare_launch(algorithm) for algorithm in plan._heuristic(_CANDIDATES)]

    def launch(index: int) -> bool:
        plan._launch = launches[index]
        plan.run(a.data_ptr(), b.data_ptr(), 0, out.data_ptr())
        return True

    digests = []
    for index in range(len(launches)):
        launch(index)
        digests.append(_digest(out))
    equal = [index for index, digest in enumerate(digests) if torch.equal(digest, digests[0])]
    times = _timed(range(len(launches)), launch)
    first, fastest = _microseconds(times[0]), min(_microseconds(times[index]) for index in equal)
    return Row(model, gemm, m, n, k, first, fastest, len(launches), len(launches) - len(equal))


def _sums(rows: Sequence[Row]) -> dict[str, float]:
    """Microseconds of a layer: all GEMMs with their first algorithms; forward with the first and with the fastest."""
    forward = [row for row in rows if row.gemm.endswith("forward")]
    sums = {
        "first": sum(row.first for row in rows),
        "forward_first": sum(row.first for row in forward),
        "forward_fastest": sum(row.fastest for row in forward),
    }
    return {name: round(us, 1) for name, us in sums.items()}


def _microseconds(milliseconds: Sequence[float]) -> float:
    """Of one launch."""
    return round(1e3 * median(milliseconds) / _LAUNCHES, 1)


if __name__ == "__main__":
    sys.exit(exit_status(main))
