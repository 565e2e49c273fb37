"""Time every kernel on the GPU against the fewest bytes it must move: `python benchmarks/kernels.py`.

A row's floor is its bytes over the bandwidth of a large device-to-device copy, measured in the same run. A GEMM is
compared with the same GEMM in BF16, a linear layer with BF16's and Transformer Engine's. The time is that of one call
in a CUDA graph of several calls, which excludes the gaps between launches. Inputs rotate through more memory than L2
holds. Host time per call is measured separately. A failed case becomes a row with its error; the others are still
measured.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import attention_cases
import block_cases
import fused_cases
import grouped_cases
import kernel_cases
import linear_cases
import torch
from kernel_timing import Bench, Case, Row
from linear_cases import LinearRow, Shape
from provenance import commit

from fp8_megatron.commands.arguments import Parser, output_file, whole
from fp8_megatron.commands.program import exit_status
from fp8_megatron.outputs import write_output

TOKENS, HIDDEN, FFN, LLAMA_FFN, VOCAB_SIZE = 8192, 4096, 16384, 11008, 50304
#: [tokens, hidden] and [tokens, 4 · hidden] of GPT-7B with micro-batch 8 and 2 of 2048 tokens.
CAST_SHAPES = ((16384, 4096), (4096, 16384))
#: M, N, K of GPT-7B's four forward GEMMs at 8192 tokens: QKV, projection, FC1, FC2.
GEMMS = ((TOKENS, 3 * HIDDEN, HIDDEN), (TOKENS, HIDDEN, HIDDEN), (TOKENS, FFN, HIDDEN), (TOKENS, HIDDEN, FFN))
#: Outputs and inputs of Llama-3-8B's QKV, FC1 and FC2; its projection is GPT-7B's.
LLAMA_LAYERS = ((6144, HIDDEN), (28672, HIDDEN), (HIDDEN, 14336))
#: Tokens, hidden size, width of an expert, experts, and experts of a token: Qwen3-30B-A3B and Mixtral-8x7B.
EXPERTS = ((TOKENS, 2048, 768, 128, 8), (TOKENS, HIDDEN, 14336, 8, 2))
#: Rows of tokens, experts, K and N of `docs/moe.md`.
GROUPED_GEMMS = (
    (65536, 128, 2048, 1536),
    (65536, 128, 768, 2048),
    (196608, 128, 2048, 1536),
    (196608, 128, 768, 2048),
    (65536, 32, 2048, 1536),
    (16384, 8, 4096, 28672),
    (32768, 8, 7168, 4096),
)
#: Sequences of a micro-batch, and tokens of each.
ATTENTION_SHAPES = ((4, 2048), (1, 8192))
#: Llama-3-8B's head.
HEAD_SHAPE = (TOKENS, 128256, HIDDEN)
#: modded-nanogpt's MLP and head: tokens, outputs and inputs.
NANOGPT_SHAPES = ((49152, 3072, 768), (49152, 768, 3072), (49152, VOCAB_SIZE, 768))
LINEAR, HEAD, NANOGPT = "linear", "head", "nanogpt"
SECTIONS = (
    *(
        "quantization",
        "norms",
        "gradients",
        "activations",
        "experts",
        "attention",
        "loss",
        "blockwise",
        "optimizer",
        "gemms",
    ),
    *("grouped_gemms", "block_casts", "block_fused", "block_gemms", LINEAR, HEAD, NANOGPT),
)


def cases(section: str, device: torch.device, log2_elements: int) -> Iterator[Case]:
    """The cases of a section, each made when it is its turn."""
    match section:
        case "quantization":
            for m, k in CAST_SHAPES:
                yield from kernel_cases.quantization(device, m, k)
        case "norms":
            yield from fused_cases.norms(device, TOKENS, HIDDEN)
        case "gradients":
            yield from fused_cases.gradients(device, TOKENS, HIDDEN)
            yield from fused_cases.qkv_gradients(device, TOKENS, HIDDEN)
            yield from fused_cases.rotations(device, TOKENS, HIDDEN)
            yield from fused_cases.grouped_rotations(device, TOKENS, HIDDEN)
            for heads_per_group in (1, 4):
                yield from fused_cases.attention_casts(device, TOKENS, HIDDEN // 128, heads_per_group)
        case "activations":
            yield from fused_cases.activations(device, TOKENS, FFN, "gelu")
            yield from fused_cases.activations(device, TOKENS, LLAMA_FFN, "swiglu")
            yield from fused_cases.activations(device, TOKENS, FFN, "squared_relu")
        case "experts":
            for tokens, hidden, width, num_experts, top_k in EXPERTS:
                yield from grouped_cases.rows(device, tokens, hidden, num_experts, top_k)
                yield from grouped_cases.activations(device, tokens, width, num_experts, top_k)
        case "attention":
            for batch, seq in ATTENTION_SHAPES:
                yield from attention_cases.attention(device, batch, seq)
                yield from attention_cases.sums(device, batch, seq)
        case "loss":
            yield from fused_cases.cross_entropy(device, TOKENS, VOCAB_SIZE)
        case "blockwise":
            yield from kernel_cases.blockwise(device, 2**log2_elements)
        case "optimizer":
            yield from kernel_cases.optimizer(device, 2**log2_elements)
        case "gemms":
            for m, n, k in GEMMS:
                yield from kernel_cases.gemms(device, m, n, k)
        case "grouped_gemms":
            for shape in GROUPED_GEMMS:
                yield from grouped_cases.gemms(device, *shape)
        case "block_casts":
            for m, k in CAST_SHAPES:
                yield from block_cases.casts(device, m, k)
        case "block_fused":
            yield from block_cases.fused(device, TOKENS, HIDDEN, 14336, "swiglu")
            yield from block_cases.fused(device, TOKENS, HIDDEN, FFN, "gelu")
        case "block_gemms":
            for outputs, inputs in (*((n, k) for _, n, k in GEMMS), *LLAMA_LAYERS):
                yield from block_cases.gemms(device, TOKENS, outputs, inputs)
        case _:
            raise ValueError(f"no section {section}; there are {', '.join(SECTIONS)}")


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    width = max([54, *(len(row.name) for row in rows)])
    lines = [f"{'':{width}} {'µs':>9} {'floor':>9} {'× floor':>8} {'GB/s':>6} {'TFLOP/s':>8} {'host µs':>8}"]
    for row in rows:
        if row.microseconds is None:
            lines.append(f"{row.name:{width}} {row.error}")
            continue
        cells = [f"{row.name:{width}} {row.microseconds:9.1f}"]
        if row.floor_microseconds is None:
            cells.append(f"{'':9} {'':8} {'':6}")
        else:
            ratio = row.microseconds / row.floor_microseconds
            cells.append(f"{row.floor_microseconds:9.1f} {ratio:8.2f} {row.gb_per_s:6.0f}")
        cells.append(f"{row.tflop_per_s:8.0f}" if row.tflop_per_s else f"{'':8}")
        cells.append(f"{row.host_microseconds:8.1f}" if row.host_microseconds else "")
        lines.append(" ".join(cells).rstrip())
    return "\n".join(lines)


def versions() -> dict[str, str | None]:
    """Versions that the figures depend on, beside the commit."""
    found: dict[str, str | None] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    for name in ("triton", "transformer_engine"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__.split("\n\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--output", type=output_file, help="write the rows as JSON")
    parser.add_argument("--log2-elements", type=whole(most=40), default=28, help="size of the optimizer's flat storage")
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION", help=", ".join(SECTIONS)
    )
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Exit status: 1 if a row failed. Rows of Transformer Engine do not count if it is not installed."""
    arguments = parse(words)
    if not torch.cuda.is_available():
        print("benchmarks/kernels.py times GPU kernels, and there is no GPU here", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device())
    bench = Bench()
    linears: list[LinearRow] = []
    seconds: dict[str, float] = {}
    for section in arguments.only:
        started = time.perf_counter()
        if section == LINEAR:
            linears += linear_cases.measure([Shape(*shape) for shape in GEMMS], device)
        elif section == HEAD:
            linears += linear_cases.measure([Shape(*HEAD_SHAPE)], device, steps=linear_cases.HEAD_STEPS)
        elif section == NANOGPT:
            linears += linear_cases.measure(
                [Shape(*shape) for shape in NANOGPT_SHAPES], device, steps=linear_cases.WGRAD_STEPS
            )
        else:
            bench.measure(section, cases(section, device, arguments.log2_elements))
        seconds[section] = time.perf_counter() - started
    print(table(bench.rows))
    if linears:
        print()
        print(linear_cases.table(linears))
    print(f"\n{sum(seconds.values()):.0f} s: " + ", ".join(f"{name} {value:.1f}" for name, value in seconds.items()))
    if arguments.output:
        result = {
            "command": shlex.join(["python", "benchmarks/kernels.py", *(sys.argv[1:] if words is None else words)]),
            "commit": commit(),
            "device": torch.cuda.get_device_name(),
            **versions(),
            "copy_gb_per_s": bench.copy_bytes_per_second / 1e9,
            "seconds": seconds,
            "rows": [asdict(row) for row in bench.rows],
            "linears": [asdict(row) for row in linears],
            "linear_targets": linear_cases.TARGETS,
        }
        write_output(arguments.output, (json.dumps(result, indent=1, ensure_ascii=False) + "\n").encode(), "--output")
    failed = [row.name for row in bench.rows if row.error is not None]
    failed += [row.name for row in linears if row.error is not None and not row.error.startswith("ModuleNotFoundError")]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
