"""What a training loop holds, how long a step takes, and the table."""

from __future__ import annotations

import math

import pytest
import torch

import fp8_megatron
from fp8_megatron.any_model.meter import Bytes, Meter, Row, table

SIZE = 256


def trained(level: str | None) -> tuple[torch.nn.Module, torch.optim.Optimizer, Meter]:
    """A layer of 256 × 256 with a bias after five steps; its last gradient is there."""
    model = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    if level is not None:
        model, optimizer = fp8_megatron.initialize(model, optimizer, opt_level=level)
    meter = Meter(level or "plain", model, optimizer)
    for step in range(5):
        optimizer.zero_grad()
        loss = (model(torch.randn(16, SIZE)) * torch.randn(16, SIZE)).sum() + step
        loss.backward()
        optimizer.step()
        meter.step(loss)
    return model, optimizer, meter


def test_torchs_adamw_has_sixteen_bytes_a_parameter() -> None:
    model, optimizer, _ = trained(None)
    count = SIZE * SIZE + SIZE
    found = Bytes.of(model, optimizer)
    # Two step numbers of 4 bytes beside the moments.
    assert (found.weights, found.gradients, found.optimizer) == (4 * count, 4 * count, 8 * count + 8)
    assert found.total == 16 * count + 8
    assert Bytes.of(model, None) == Bytes(4 * count, 4 * count, 0)


@pytest.mark.parametrize(("level", "weight", "state"), [("O1", 2, 8), ("O2", 2, 3), ("O3", 1, 5)])
def test_levels_have_their_bytes(level: str, weight: int, state: int) -> None:
    """The weight as the level says; the bias and its moments FP32.

    A scale of 4 bytes stands for 128 values of a gradient and for 256 of other blocks; an FP8 weight has one. Beside
    the moments are small tables, up to 1% here.
    """
    model, optimizer, _ = trained(level)
    found, matrix = Bytes.of(model, optimizer), SIZE * SIZE
    scales = 4 if level == "O3" else matrix // 256 * 4
    assert found.weights == weight * matrix + scales + 4 * SIZE
    assert found.gradients == matrix + matrix // 128 * 4 + 4 * SIZE
    blocks = {"O1": 0, "O2": 2, "O3": 3}[level]
    expected = (state + blocks / 64) * matrix + 8 * SIZE
    assert expected <= found.optimizer < 1.01 * expected
    frozen = torch.nn.Linear(SIZE, SIZE, bias=False).requires_grad_(False)
    fp8_megatron.replace_linears(frozen)
    assert Bytes.of(frozen, None) == Bytes(matrix + 4, 0, 0)


def test_a_row_has_the_last_losses_and_a_time() -> None:
    _, _, meter = trained(None)
    losses = [float(loss) for loss in meter.losses]
    row = meter.finish()
    assert row.loss == pytest.approx(sum(losses) / 5) and row.peak is None and 0 < row.step_seconds < 10
    _, _, other = trained(None)
    assert other.finish(loss=2.5).loss == 2.5
    silent = Meter("none", torch.nn.Linear(2, 2), torch.optim.SGD([torch.zeros(1)]))
    silent.step()
    assert math.isnan(silent.finish().loss)


def test_the_table_compares_with_its_first_row() -> None:
    rows = [
        Row("plain", Bytes(4_000_000, 4_000_000, 8_000_000), None, 0.5, 1.25),
        Row("O2", Bytes(2_000_000, 1_000_000, 3_000_000), 250_000_000, 0.25, 1.5),
    ]
    assert table(rows).splitlines() == [
        "            weights     gradients     optimizer         total  GPU peak  ms/step    loss",
        "plain       4.00 MB       4.00 MB       8.00 MB      16.00 MB         -    500.0  1.2500",
        "O2     2.00 MB -50%  1.00 MB -75%  3.00 MB -62%  6.00 MB -62%   0.25 GB    250.0  1.5000",
    ]
