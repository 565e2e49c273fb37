"""A rank that gathers and sums rows over copy engines, beside other copies, and ends with 1 if a byte was wrong."""

from __future__ import annotations

import sys

import torch

from fp8_megatron.collectives.row_exchange import gather_rows, share_memory, sum_rows
from fp8_megatron.collectives.transport import copy_engine
from fp8_megatron.device.device import distributed_backend, select_device
from fp8_megatron.mcore.runtime import runtime

Group = torch.distributed.ProcessGroup
#: Rows of each rank, gathered beside the checked rows.
_LOAD_BYTES = 64 * 2**20


def main() -> int:
    """Check as many exchanges as the argument says."""
    device = select_device()
    torch.distributed.init_process_group(
        distributed_backend(device), device_id=device if device.type == "cuda" else None
    )
    group = torch.distributed.group.WORLD
    assert group is not None
    with runtime(device):
        if device.type == "cuda":
            share_memory(group, device)
        wrong = _wrong_exchanges(int(sys.argv[1]), group, device)
    torch.distributed.destroy_process_group()
    return int(wrong > 0)


def _wrong_exchanges(count: int, group: Group, device: torch.device) -> int:
    """How many of `count` gathers and sums of fresh values are wrong on some rank.

    Concurrent copies keep the engines busy. As soon as the interface allows, an exchange's operands are released and
    their memory is overwritten.
    """
    rank, size = group.rank(), group.size()
    n, k = 64 * size, 4096
    wrong = torch.zeros(1, device=device)
    generator = torch.Generator(device).manual_seed(5)
    load = None
    if device.type == "cuda":
        full = copy_engine.allocate(size * _LOAD_BYTES, group, device)
        memory = copy_engine.memory_of(full, group)
        assert memory is not None
        load = (memory, full, full.view(size, -1)[rank])
    for exchange in range(count):
        if load is not None and exchange % 4 == 0:
            copy_engine.start_all_gathers([load])
        values = torch.randint(0, 256, (size, n // size, k), generator=generator, device=device, dtype=torch.uint8)
        taken = torch.empty(size, n // size, k, device=device, dtype=torch.uint8)
        shard = values[rank].clone()
        for rows, part in gather_rows(shard, group).parts():
            taken.view(n, k)[rows] = part
        del shard, part
        junk = torch.full((n // size, k), 255, device=device, dtype=torch.uint8)
        matrices = torch.randint(-64, 64, (size, n, k), generator=generator, device=device).bfloat16()
        summing = sum_rows(
            lambda rows, out, _, mine=matrices[rank]: out.copy_(mine[rows]),  # type: ignore[misc]
            (n, k),
            torch.bfloat16,
            device,
            group,
        )
        total = summing.wait()
        del summing
        junk = torch.full((n // size, k), torch.nan, device=device, dtype=torch.bfloat16)
        expected = matrices.view(size, size, n // size, k)[:, rank].float().sum(dim=0).bfloat16()
        wrong += ((taken != values).any() | (total != expected).any()).float()
        del junk
    torch.distributed.all_reduce(wrong, op=torch.distributed.ReduceOp.MAX, group=group)
    return int(wrong.item())


if __name__ == "__main__":
    sys.exit(main())
