"""A whole FP8 layer: where the residual branch is added moves roundings only, and dropout keeps it outside."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fp8_megatron.collectives.row_exchange import RowSum
from fp8_megatron.config.schema import Config, ParallelConfig
from fp8_megatron.kernels import ops
from fp8_megatron.mcore.tensor_parallel import FP8RowParallelLinear
from tests.harness.ranks import RankPool
from tests.harness.tiny_gpt import GPT3_STYLE, LLAMA_STYLE, random_batches, tiny_config, train_tiny_gpt

NUM_MICRO_BATCHES = 2
#: Branches of the tiny model in one step.
NUM_ADDITIONS = 2 * GPT3_STYLE.num_layers * NUM_MICRO_BATCHES


def _first_step(config: Config, keeps_outside: bool = False) -> tuple[float, float, int]:
    """Loss and gradient norm of one step, and how often a GEMM or a sum over ranks added a residual branch."""
    num_added = 0

    def counts(function: Any) -> Any:
        def call(*args: Any, addend: Any = None, **kwargs: Any) -> Any:
            nonlocal num_added
            num_added += addend is not None
            return function(*args, addend=addend, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "scaled_mm_into_", counts(ops.scaled_mm_into_))
        wait = RowSum.wait
        patch.setattr(RowSum, "wait", lambda self, addend=None: counts(wait)(self, addend=addend))
        if keeps_outside:
            patch.setattr(FP8RowParallelLinear, "adds_residual", False)
        run = train_tiny_gpt(config, random_batches(1, NUM_MICRO_BATCHES))
    return run.losses[0], run.grad_norms[0], num_added


@pytest.mark.parametrize("style", ["gpt3", "llama"])
@pytest.mark.parametrize("parallel", [ParallelConfig(), ParallelConfig(2, sequence_parallel=True)], ids=["tp1", "tp2"])
def test_the_residual_branch_is_added_on_the_way(ranks: RankPool, style: str, parallel: ParallelConfig) -> None:
    config = tiny_config(GPT3_STYLE if style == "gpt3" else LLAMA_STYLE, parallel=parallel)
    num_ranks = parallel.tensor_model_parallel_size
    for inside, outside in zip(
        ranks.run(_first_step, config, num_ranks=num_ranks),
        ranks.run(_first_step, config, True, num_ranks=num_ranks),
        strict=True,
    ):
        assert inside[2] == NUM_ADDITIONS and outside[2] == 0
        # Over ranks the sum is rounded before the addition either way.
        tolerance = 5e-3 if num_ranks == 1 else 0.0
        assert inside[:2] == pytest.approx(outside[:2], rel=tolerance, abs=0.0)
        assert num_ranks > 1 or inside[:2] != outside[:2]


@pytest.mark.parametrize(
    ("dropout", "parallel"), [(0.1, ParallelConfig()), (0.0, ParallelConfig(2))], ids=["dropout", "sum_over_ranks"]
)
def test_what_stands_between_keeps_it_outside(ranks: RankPool, dropout: float, parallel: ParallelConfig) -> None:
    config = tiny_config(replace(GPT3_STYLE, hidden_dropout=dropout), parallel=parallel)
    for _, _, num_added in ranks.run(_first_step, config, num_ranks=parallel.tensor_model_parallel_size):
        assert num_added == 0
