"""--calculate-per-token-loss: the loss and its gradient are means over the tokens of the global batch that count."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8_megatron.config.io import parse_config
from fp8_megatron.data.loader import part_of
from fp8_megatron.mcore.runtime import runtime, seed_everything
from fp8_megatron.mcore.topology import initialized
from fp8_megatron.sharding.replicas import Replicas
from fp8_megatron.training.batches import Batch, masked_mean_loss
from fp8_megatron.training.build import TrainingState, build_training_state
from fp8_megatron.training.train_step import _mean_tokens, compute_gradients, evaluate
from tests.harness.ranks import RankPool
from tests.harness.runs import tiny_flags

CPU = torch.device("cpu")
#: Shares of tokens that count in each micro-batch. A mean of means gives all of them one weight.
SHARES = (1.0, 0.1, 0.6, 0.02)


def micro_batch(index: int) -> Batch:
    generator = torch.Generator().manual_seed(index)
    text = torch.randint(64, (2, 17), generator=generator)
    mask = (torch.rand(2, 16, generator=generator) < SHARES[index]).float()
    return {
        "tokens": text[:, :-1],
        "labels": text[:, 1:],
        "loss_mask": mask,
        "position_ids": torch.arange(16).expand(2, -1),
    }


def gradient(state: TrainingState) -> dict[str, Tensor]:
    """The mean gradient by name, FP32: what every replica's shard holds together."""
    found = {}
    for buffer in state.optimizer.buffers:
        assert buffer.scales is None
        for slot in buffer.space.slots:

            def owned(part: Any, buffer: Any = buffer) -> Tensor:
                return buffer.payload[part.shard_start : part.shard_start + part.length].float()

            found[slot.name] = buffer.space.assemble(slot, owned)
    return found


def _step(
    micro_batches: list[int], per_token: bool, precision: str, context: int = 1
) -> tuple[float, float, dict[str, Tensor]]:
    """(loss over all ranks, validation loss, gradient) of a step whose micro-batches the ranks share.

    Args:
        context: ranks that share each sequence.
    """
    flags = tiny_flags(
        Path("unused"),
        precision=precision,
        global_batch_size=2 * len(micro_batches),
        calculate_per_token_loss=per_token,
        context_parallel_size=context,
    )
    config = parse_config(flags)
    with runtime(CPU), initialized(config.parallel, config.model.num_layers, CPU) as topology:
        seed_everything(1, CPU, tensor_parallel_rank=0, pipeline_rank=0)
        state = build_training_state(config, 64, topology, CPU)
        own = [micro_batch(index) for index in micro_batches[topology.dp.rank() :: topology.dp.size()]]
        if context > 1:
            own = [part_of(batch, topology.sequence_part) for batch in own]
        validation, _ = evaluate(state, iter(own * 2), 2)
        part = compute_gradients(state, own, measures_underflow=False)[:1]
        if topology.world_size > 1:
            torch.distributed.all_reduce(part)
        return part.item(), validation, gradient(state)


def expected(precision: str) -> tuple[float, dict[str, Tensor]]:
    """The mean over tokens, from steps of single micro-batches weighted by their tokens, in float64."""
    counts = [micro_batch(index)["loss_mask"].double().sum() for index in range(len(SHARES))]
    weights = [count / sum(counts) for count in counts]
    # Two of the same: the same mean, without gradients stored in FP8.
    steps = [_step([index, index], False, precision) for index in range(len(SHARES))]
    loss = sum(weight * loss for weight, (loss, _, _) in zip(weights, steps, strict=True))
    names = steps[0][2]
    grads = {
        name: sum(weight * step[2][name].double() for weight, step in zip(weights, steps, strict=True))
        for name in names
    }
    return float(loss), grads


def snr_db(value: Tensor, exact: Tensor) -> float:
    return float(10 * torch.log10(exact.pow(2).sum() / (value.double() - exact).pow(2).sum()))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_token_has_one_weight(ranks: RankPool, num_ranks: int) -> None:
    """In BF16, whatever the ranks hold. A mean of means is far away.

    Weights that are no powers of two round other values: by 2^-9 / √3 each, 59 dB. About 24 roundings in a row, in two
    layers, cost 14 dB, and both sides have them: 3 dB. Sums over tokens, in norms, cancel: some 10 dB more.
    """
    loss, grads = expected("bf16")
    everyone = list(range(len(SHARES)))
    for measured, validation, found in ranks.run(_step, everyone, True, "bf16", num_ranks=num_ranks):
        assert measured == pytest.approx(loss, rel=1e-5) and validation == pytest.approx(loss, rel=1e-5)
        assert min(snr_db(found[name], grads[name]) for name in grads) > 30.0
    (measured, validation, found), *_ = ranks.run(_step, everyone, False, "bf16", num_ranks=num_ranks)
    assert abs(measured - loss) > 1e-3 and abs(validation - loss) > 1e-3
    assert max(snr_db(found[name], grads[name]) for name in grads) < 20.0


@pytest.mark.parametrize(("num_ranks", "context"), [(2, 2), (4, 2)])
def test_ranks_that_share_sequences_share_their_tokens(ranks: RankPool, num_ranks: int, context: int) -> None:
    """With --calculate-per-token-loss and without, whatever each rank's part of a mask has.

    Rounding is that of `test_every_token_has_one_weight`, and attention's blocks are rounded to BF16 before they are
    merged: as much as one of its 24 roundings.
    """
    everyone = list(range(len(SHARES)))
    for per_token in (True, False):
        ((loss, validation, grads),) = ranks.run(_step, everyone, per_token, "bf16", num_ranks=1)
        for measured, checked, found in ranks.run(_step, everyone, per_token, "bf16", context, num_ranks=num_ranks):
            assert measured == pytest.approx(loss, rel=1e-4) and checked == pytest.approx(validation, rel=1e-4)
            assert min(snr_db(found[name], grads[name].double()) for name in grads) > 28.0


def test_fp8_gradients_follow(ranks: RankPool) -> None:
    """Casts to FP8 scale with the gradient, so weights of tokens cost no precision.

    E5M2 output gradients have two mantissa bits: errors up to 2^-3, 2^-3 / √12 = 29 dB on average, of each side in two
    layers with four linear weights: 9 dB less, and sums in norms cancel.
    """
    loss, grads = expected("fp8")
    ((measured, _, found),) = ranks.run(_step, list(range(len(SHARES))), True, "fp8", num_ranks=1)
    assert measured == pytest.approx(loss, rel=1e-4)
    assert min(snr_db(found[name], grads[name]) for name in grads) > 12.0


def test_a_batch_without_a_token_is_zero() -> None:
    """Not 0 / 0."""
    config = parse_config(tiny_flags(Path("unused"), calculate_per_token_loss=True))
    topology = SimpleNamespace(dp=SimpleNamespace(size=lambda: 1), replicas=Replicas.of(None, CPU))
    state: Any = SimpleNamespace(config=config, topology=topology)
    mean_tokens = _mean_tokens([{"loss_mask": torch.zeros(2, 16)}] * 2, state)
    loss, _ = masked_mean_loss(torch.zeros(2, 16), torch.ones(2, 16), mean_tokens=mean_tokens)
    assert loss.item() == 0.0
