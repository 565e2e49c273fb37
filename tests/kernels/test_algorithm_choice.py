"""The choice among a GEMM's algorithms: the fastest that writes the same bits."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch

from fp8_megatron.dtypes import E4M3
from fp8_megatron.kernels.gemm import algorithm_choice, cublaslt
from fp8_megatron.kernels.gemm.algorithm_choice import chosen, fastest


def test_rounds_are_compared_one_by_one() -> None:
    """The second is faster in every round, though its times lie above some of the first's."""
    assert chosen([[1.0, 2.0, 1.5], [0.9, 1.8, 1.4], [1.0, 2.1, 1.5]]) == 1


def test_a_small_gain_may_be_noise() -> None:
    assert chosen([[1.0, 1.0, 1.0], [0.99, 0.99, 0.99]]) == 0
    assert chosen([[1.0, 1.0, 1.0], [0.5, 1.0, 1.0]]) == 0, "in one round of three"


@pytest.mark.parametrize("fastest_of_all", range(5))
def test_other_bits_and_failures_are_left_out(monkeypatch: pytest.MonkeyPatch, fastest_of_all: int) -> None:
    generator = torch.Generator().manual_seed(0)
    right = torch.randn(32, 16, generator=generator).bfloat16()
    swapped = right.clone()
    swapped[[3, 4]] = right[[4, 3]]
    results = [right, None, swapped, right, right.neg()]
    out = torch.empty(32, 16, dtype=torch.bfloat16)

    def launch(index: int) -> bool:
        result = results[index]
        if result is not None:
            out.copy_(result)
        return result is not None

    def timed(candidates: list[int], _: object) -> list[list[float]]:
        return [[0.5 if index == fastest_of_all else 1.0] * 5 for index in candidates]

    monkeypatch.setattr(algorithm_choice, "_timed", timed)
    assert fastest(len(results), launch, out) == (3 if fastest_of_all == 3 else 0)


def test_without_the_first_nothing_is_chosen() -> None:
    assert fastest(2, lambda index: index > 0, torch.zeros(4, 4)) == 0


@pytest.mark.parametrize("bias", [0.0, 1.0])
def test_a_sum_of_zeros_tells_nothing(monkeypatch: pytest.MonkeyPatch, bias: float) -> None:
    """A weight that begins as zeros: its algorithms may add up in any order."""
    out = torch.empty(32, 16, dtype=torch.bfloat16)

    def launch(index: int) -> bool:
        out.copy_(torch.arange(16) * bias)
        return True

    monkeypatch.setattr(algorithm_choice, "_timed", lambda candidates, _: [[1.0] * 5, [0.5] * 5])
    assert fastest(2, launch, out) == 0


@pytest.mark.parametrize("product", [0.0, 1.0])
def test_a_product_of_zeros_behind_an_addend_tells_nothing(monkeypatch: pytest.MonkeyPatch, product: float) -> None:
    addend = torch.randn(32, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = torch.empty_like(addend)

    def launch(index: int) -> bool:
        out.copy_(addend + product)
        return True

    monkeypatch.setattr(algorithm_choice, "_timed", lambda candidates, _: [[1.0] * 5, [0.5] * 5])
    assert fastest(2, launch, out, addend) == int(product)


@pytest.mark.gpu
@pytest.mark.parametrize("has_addend", [False, True])
def test_the_choice_is_fast_and_changes_no_bit(monkeypatch: pytest.MonkeyPatch, has_addend: bool) -> None:
    """GPT-345M's fc1, where the heuristic's first algorithm is slow."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (32768, 4096, 1024)
    a, b = (torch.randn(rows, shape[2], device="cuda", generator=generator).to(E4M3) for rows in shape[:2])
    addend = torch.randn(shape[:2], device="cuda", generator=generator).bfloat16() if has_addend else None
    scale = torch.full((4,), 0.5, device="cuda")[:1]
    out = torch.empty(shape[:2], device="cuda", dtype=torch.bfloat16)

    def run() -> None:
        cublaslt.matmul(a, b, scale, scale, None, out, use_fast_accum=True, addend=addend)

    def milliseconds() -> float:
        torch.cuda._sleep(10_000_000)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(10):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    plans: dict[int, dict[Any, Any]] = {0: {}, 64: {}}
    results = []
    for most in plans:
        monkeypatch.setattr(cublaslt, "_MOST_TIMED", most)
        monkeypatch.setattr(cublaslt, "_plans", plans[most])
        monkeypatch.setattr(cublaslt, "_chosen", {})
        out.fill_(torch.nan)
        torch.cuda.set_sync_debug_mode("error")  # a step that is to be recorded may not seem to wait
        with torch.device("cuda"):
            run()
        torch.cuda.set_sync_debug_mode("default")
        assert len(cublaslt._chosen) == bool(most)
        results.append(out.clone())
    assert torch.equal(*results)
    ratios = []
    for _ in range(11):  # in turn, because clocks change
        times = {}
        for most, own in plans.items():
            monkeypatch.setattr(cublaslt, "_plans", own)
            times[most] = milliseconds()
        ratios.append(times[64] / times[0])
    assert statistics.median(ratios) < 1.01, ratios


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(512, 1536, 256), (32768, 3072, 1024), (8192, 4096, 16384)], ids=str)
def test_the_heuristic_names_the_same_first_algorithm_alone(shape: tuple[int, int, int]) -> None:
    """Graphs and lists that are made before a shape is timed take it."""
    m, n, k = shape
    scale = torch.ones(4, device="cuda")[:1]
    sizes, mode = (torch.Size((m, k)), torch.Size((n, k))), cublaslt.TENSOR_SCALE
    problem = cublaslt._Problem(*sizes, E4M3, E4M3, torch.bfloat16, None, False, True, 256, 0, mode, mode)
    plan = cublaslt._GemmPlan(problem)
    plan.point_at(cublaslt._A_SCALE, scale)
    plan.point_at(cublaslt._B_SCALE, scale)
    assert bytes(plan._heuristic(1)[0]) == bytes(plan._heuristic(8)[0])


@pytest.mark.gpu
def test_a_recorded_launch_is_timed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "_plans", {})
    monkeypatch.setattr(cublaslt, "_chosen", {})
    a = torch.ones(512, 512, device="cuda").to(E4M3)
    scale = torch.ones(4, device="cuda")[:1]
    out = torch.empty(512, 512, device="cuda", dtype=torch.bfloat16)
    cublaslt.workspace(0, torch.cuda.current_stream().cuda_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cublaslt.matmul(a, a, scale, scale, None, out, use_fast_accum=True)
    assert not cublaslt._chosen
    cublaslt.matmul(a, a, scale, scale, None, out, use_fast_accum=True)
    assert len(cublaslt._chosen) == 1 and (out == 512).all()
