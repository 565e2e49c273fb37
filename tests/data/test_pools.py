"""Pools of processes: none of them outlives the process that made it."""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from typing import Literal

import psutil
import pytest

from fp8_megatron.data.pools import process_pool


def process_of(_: int) -> int:
    time.sleep(0.2)  # so that each process takes one
    return os.getpid()


def use_a_pool(method: Literal["fork", "spawn"], writer: Connection) -> None:
    with process_pool(2, method=method) as pool:
        writer.send(set(pool.map(process_of, range(8))))
        time.sleep(600)


def runs(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_end_with_one_that_is_killed(method: Literal["fork", "spawn"]) -> None:
    reader, writer = multiprocessing.Pipe(duplex=False)
    user = multiprocessing.get_context("fork").Process(target=use_a_pool, args=(method, writer))
    user.start()
    assert reader.poll(60)
    processes = reader.recv()
    assert len(processes) == 2 and all(map(runs, processes))
    user.kill()
    user.join(timeout=60)
    until = time.monotonic() + 30
    while any(map(runs, processes)) and time.monotonic() < until:
        time.sleep(0.02)
    left = [process for process in processes if runs(process)]
    for process in left:
        psutil.Process(process).kill()
    assert left == []
