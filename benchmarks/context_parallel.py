"""Time attention over sequences that ranks share, forward and backward of one layer:

torchrun --nproc-per-node 4 benchmarks/context_parallel.py --output runs/context_parallel.json

Every exchange (--cp-comm-type) at each length, beside the whole sequence on one rank. The floor is the latter's time
divided by the ranks: no exchange, no sum of blocks. Errors are those against the whole sequence.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

# Run as a script from a clone, installed or not.
sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.provenance import commit
from fp8_megatron.commands.arguments import Parser, output_file, whole
from fp8_megatron.commands.program import exit_status
from fp8_megatron.data.sequence_parts import SequencePart
from fp8_megatron.device.device import distributed_backend, select_device
from fp8_megatron.kernels.ops import BlockKernel, attention_block, attention_block_backward
from fp8_megatron.mcore.runtime import runtime
from fp8_megatron.nn.context_attention import CommType, ContextParallel, context_attention
from fp8_megatron.outputs import write_output

Group = torch.distributed.ProcessGroup
_WARM_UP_SECONDS, _SECONDS = 0.3, 1.0
_LEAST_CALLS, _MOST_CALLS = 3, 30


@dataclass
class Row:
    """One length and exchange; microseconds of the slowest rank.

    Attributes:
        name: tokens and exchange.
        whole_forward, whole_both: the sequence on one rank.
        floor_forward, floor_both: those divided by the ranks.
        tflop_per_s: of forward and backward, on a rank; pairs of tokens that attend count.
        received_bytes: of a rank in forward, on average.
        peak_bytes: what forward and backward take beside operands and result, on the largest rank; 0 on a CPU.
        snr_db: of the output and of the gradients of query, key and value against the whole sequence's.
    """

    tokens: int
    comm_type: CommType
    forward: float
    both: float
    whole_forward: float
    whole_both: float
    floor_forward: float
    floor_both: float
    tflop_per_s: float
    received_bytes: int
    peak_bytes: int
    snr_db: list[float]
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = f"{self.tokens} {self.comm_type}"


def main() -> int:
    """Measure, print and write; returns the exit status."""
    args = _parse()
    device = select_device()
    torch.distributed.init_process_group(
        distributed_backend(device), device_id=device if device.type == "cuda" else None
    )
    group = torch.distributed.group.WORLD
    assert group is not None
    with runtime(device):
        rows = [row for tokens in args.tokens for row in _rows(args, tokens, group, device)]
    if group.rank() == 0:
        _report(args, rows, device)
    torch.distributed.destroy_process_group()
    return 0


def _parse() -> argparse.Namespace:
    parser = Parser(description="Time attention over sequences that ranks share.")
    parser.add_argument("--tokens", type=whole(), nargs="+", default=[8192, 16384, 32768, 65536, 131072])
    parser.add_argument("--heads", type=whole(), default=32)
    parser.add_argument("--groups", type=whole(), default=8, help="heads of key and value")
    parser.add_argument("--width", type=whole(), default=128, help="columns of a head")
    parser.add_argument("--kernel", choices=get_args(BlockKernel), help="default: cudnn on a GPU, dense on a CPU")
    parser.add_argument("--output", type=output_file, help="JSON of every figure")
    return parser.parse_args()


def _rows(args: argparse.Namespace, tokens: int, group: Group, device: torch.device) -> list[Row]:
    kernel: BlockKernel = args.kernel or ("cudnn" if device.type == "cuda" else "dense")
    scale = args.width**-0.5
    generator = torch.Generator(device).manual_seed(tokens)
    widths = (args.heads, args.groups, args.groups, args.heads)
    query, key, value, grad = (
        torch.randn(tokens, 1, n, args.width, generator=generator, device=device).bfloat16() for n in widths
    )

    def forward_of_whole() -> tuple[Tensor, Tensor]:
        return attention_block(query, key, value, causal=True, scale=scale, kernel=kernel)

    def both_of_whole() -> list[Tensor]:
        out, log_sum_exp = (x.contiguous() for x in forward_of_whole())
        operands = grad, query, key, value, out, log_sum_exp
        return [out, *attention_block_backward(*operands, causal=True, scale=scale, kernel=kernel)]

    part = SequencePart(group.rank(), group.size())
    expected = [part.of(x, dim=0) for x in both_of_whole()]
    whole_forward, whole_both = (_time(call, group, device) for call in (forward_of_whole, both_of_whole))
    own, own_grad = [part.of(x, dim=0) for x in (query, key, value)], part.of(grad, dim=0).flatten(2)
    rows = []
    for comm_type in get_args(CommType):
        context = ContextParallel(group, comm_type, scale, kernel)

        def forward(context: ContextParallel = context) -> Tensor:
            with torch.no_grad():
                return context_attention(*own, context)

        def both(context: ContextParallel = context) -> list[Tensor]:
            leaves = [x.detach().requires_grad_() for x in own]
            out = context_attention(*leaves, context)
            return [out.detach().view(own[0].shape), *torch.autograd.grad(out, leaves, own_grad)]

        found = both()
        times = _time(forward, group, device), _time(both, group, device)
        flops = 3.5 * 2 * 2 * tokens**2 / 2 * args.heads * args.width / group.size()
        rows.append(
            Row(
                tokens,
                comm_type,
                *times,
                whole_forward,
                whole_both,
                whole_forward / group.size(),
                whole_both / group.size(),
                flops / times[1] / 1e6,
                _received_bytes(args, tokens, comm_type, group.size()),
                _peak_bytes(both, group, device),
                _least_snr(found, expected, group),
            )
        )
    return rows


def _received_bytes(args: argparse.Namespace, tokens: int, comm_type: CommType, size: int) -> int:
    """Keys and values of a rank, on average. all_gather leaves out the second chunks of the ranks below."""
    others = 2 * 2 * tokens // size * args.groups * args.width * (size - 1)
    return others if comm_type == "p2p" else others * 3 // 4


def _time(call: Callable[[], object], group: Group, device: torch.device) -> float:
    """Microseconds of a call on the slowest rank."""
    num_calls = _calls_in(_WARM_UP_SECONDS, call, group, device)
    num_calls = max(_LEAST_CALLS, min(_MOST_CALLS, round(num_calls * _SECONDS / _WARM_UP_SECONDS)))
    _meet(group, device)
    start = time.perf_counter()
    for _ in range(num_calls):
        call()
    _synchronize(device)
    seconds = torch.tensor([time.perf_counter() - start], device=device)
    torch.distributed.all_reduce(seconds, op=torch.distributed.ReduceOp.MAX, group=group)
    return 1e6 * seconds.item() / num_calls


def _calls_in(seconds: float, call: Callable[[], object], group: Group, device: torch.device) -> int:
    """About how many calls take `seconds`; the same on all ranks. The first call does not count."""
    call()
    _meet(group, device)
    start = time.perf_counter()
    call()
    _synchronize(device)
    slowest = torch.tensor([time.perf_counter() - start], device=device)
    torch.distributed.all_reduce(slowest, op=torch.distributed.ReduceOp.MAX, group=group)
    num_calls = max(1, round(seconds / slowest.item()))
    for _ in range(min(num_calls, _MOST_CALLS)):
        call()
    return num_calls


def _peak_bytes(call: Callable[[], object], group: Group, device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    taken = torch.tensor([torch.cuda.max_memory_allocated(device) - before], device=device)
    torch.distributed.all_reduce(taken, op=torch.distributed.ReduceOp.MAX, group=group)
    return int(taken.item())


def _least_snr(found: list[Tensor], expected: list[Tensor], group: Group) -> list[float]:
    """dB of each result on the rank where it is least."""
    pairs = zip(found, expected, strict=True)
    powers = torch.stack(
        [torch.stack([y.float().square().sum(), (x.float() - y.float()).square().sum()]) for x, y in pairs]
    )
    snr = 10 * torch.log10(powers[:, 0] / powers[:, 1])
    torch.distributed.all_reduce(snr, op=torch.distributed.ReduceOp.MIN, group=group)
    return [round(value, 2) for value in snr.tolist()]


def _meet(group: Group, device: torch.device) -> None:
    _synchronize(device)
    torch.distributed.barrier(group)
    _synchronize(device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _report(args: argparse.Namespace, rows: list[Row], device: torch.device) -> None:
    print(f"{'tokens':>8} {'exchange':12} {'forward':>9} {'floor':>9} {'both':>10} {'floor':>10} {'TFLOP/s':>8}  dB")
    for row in rows:
        print(
            f"{row.tokens:8} {row.comm_type:12} {row.forward:9.0f} {row.floor_forward:9.0f} {row.both:10.0f} "
            f"{row.floor_both:10.0f} {row.tflop_per_s:8.1f}  {row.snr_db}"
        )
    if args.output is None:
        return
    report = {
        "command": shlex.join(["torchrun", *sys.argv]),
        "commit": commit(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "ranks": int(os.environ["WORLD_SIZE"]),
        "torch": torch.__version__,
        "heads": args.heads,
        "groups": args.groups,
        "width": args.width,
        "rows": [asdict(row) for row in rows],
    }
    write_output(args.output, (json.dumps(report, indent=1) + "\n").encode(), "--output")


if __name__ == "__main__":
    sys.exit(exit_status(main))
