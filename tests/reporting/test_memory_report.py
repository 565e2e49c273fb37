"""The memory table shows what was measured, against the bytes that BF16 mixed precision holds."""

from __future__ import annotations

from dataclasses import replace

from fp8_megatron.dtypes import LEVELS
from fp8_megatron.optimizer.rules.adamw import AdamW
from fp8_megatron.reporting.memory_report import MemoryByKind, StorageBytes, bf16_bytes, memory_table

STATES = AdamW.states
NUM_LINEAR, NUM_REST = 1_000_000_000, 100_000_000
O3 = StorageBytes(
    num_params=NUM_LINEAR,
    weights=NUM_LINEAR,
    gradients=NUM_LINEAR,
    master_weights=2 * NUM_LINEAR,
    states={"exp_avg": NUM_LINEAR, "exp_avg_sq": 2 * NUM_LINEAR},
    scales=NUM_LINEAR // 32,
)


def row(table: str, name: str) -> list[str]:
    line = next(line for line in table.splitlines() if line.startswith(f"│ {name} "))
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_bf16_holds_18_bytes_and_shares_only_the_optimizer() -> None:
    assert bf16_bytes(NUM_LINEAR, dict.fromkeys(STATES, NUM_LINEAR)).total == 18 * NUM_LINEAR
    assert (
        bf16_bytes(NUM_LINEAR, dict.fromkeys(STATES, NUM_LINEAR), num_optimizer_shards=4).total
        == (6 + 12 // 4) * NUM_LINEAR
    )


def test_rows_of_o3() -> None:
    table = memory_table(MemoryByKind(O3, bf16_bytes(NUM_REST, dict.fromkeys(STATES, NUM_REST))), LEVELS["O3"], STATES)
    # all: (1·1e9 + 2·1e8) / 1.1e9 = 1.091 bytes; GB 1.2 against 2.2
    assert row(table, "weights") == ["weights", "FP8", "1.000", "2.000", "1.091", "2.000", "1.200", "2.200", "1.83x"]
    assert row(table, "master weights")[1:4] == ["FP16", "2.000", "4.000"]
    # linear 7 bytes + 1/32 of scales; all (7.03125·1e9 + 1.8e9) / 1.1e9; BF16 19.8 GB
    assert row(table, "total")[2:] == ["7.031", "18.000", "8.028", "18.000", "8.831", "19.800", "2.24x"]
    assert "1,000,000,000 parameters in linear weights, 100,000,000 in the 16-bit rest" in table


def test_sharded_state_is_compared_with_sharded_bf16() -> None:
    moments = {"exp_avg": NUM_LINEAR // 4, "exp_avg_sq": NUM_LINEAR // 2}
    quarter = StorageBytes(NUM_LINEAR, NUM_LINEAR, NUM_LINEAR, NUM_LINEAR // 2, moments, 0)
    table = memory_table(
        MemoryByKind(quarter, bf16_bytes(0, dict.fromkeys(STATES, 0))), LEVELS["O3"], STATES, num_optimizer_shards=4
    )
    assert row(table, "total")[2:] == ["3.250", "-", "3.250", "9.000", "3.250", "9.000", "2.77x"]
    assert "over 4 ranks" in table


def test_level_without_master_and_stage_without_linear_weights() -> None:
    table = memory_table(
        MemoryByKind(bf16_bytes(0, dict.fromkeys(STATES, 0)), bf16_bytes(NUM_REST, dict.fromkeys(STATES, NUM_REST))),
        LEVELS["O2"],
        STATES,
    )
    assert row(table, "master weights")[1:3] == ["= weight", "-"]


def test_released_gradients_are_called_so() -> None:
    table = memory_table(
        MemoryByKind(replace(O3, gradients=0), bf16_bytes(NUM_REST, dict.fromkeys(STATES, NUM_REST))),
        LEVELS["O3"],
        STATES,
    )
    assert row(table, "gradients")[1:4] == ["released", "0.000", "4.000"]
    assert row(table, "total")[2] == "6.031"
