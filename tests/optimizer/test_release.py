"""Gradients released into the optimizer during backward: the same step, without gradients of linear weights.

Stochastic rounding draws by an element's place in the whole model, so both ways give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fp8_megatron.config.schema import Config, OptimizerConfig, ParallelConfig, PrecisionConfig, TrainingConfig
from fp8_megatron.dtypes import StorageDtype
from fp8_megatron.formats.format import Format, Quantized
from fp8_megatron.kernels import ops
from fp8_megatron.mcore.runtime import runtime
from fp8_megatron.mcore.topology import initialized
from fp8_megatron.optimizer.state import SpaceState
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from fp8_megatron.sharding.released_grads import ReleasedGradBuffer
from tests.harness.ranks import RankPool
from tests.harness.tiny_gpt import (
    GPT3_STYLE,
    LLAMA_STYLE,
    TinyGPT,
    TinyRun,
    build_tiny_gpt,
    forward_backward,
    random_batches,
    tiny_config,
    tiny_optimizer,
    train_tiny_gpt,
)

CPU = torch.device("cpu")
F = StorageDtype
UNCLIPPED = tiny_optimizer(lr=1e-3, clip_grad=0.0)
COMPANDED = PrecisionConfig(exp_avg_dtype=F.INT8, exp_avg_sq_dtype=F.UINT8)
STRETCH = replace(COMPANDED, main_params_dtype=F.SPLIT)
FORMS = {
    "O1": PrecisionConfig(opt_level="O1"),
    "O2": PrecisionConfig(opt_level="O2"),
    "O3": PrecisionConfig(),
    "O3-delayed": PrecisionConfig(fp8_recipe="delayed"),
    "bf16-gradients": PrecisionConfig(main_grads_dtype=F.BF16),
    "bf16-weights": PrecisionConfig(params_dtype=F.BF16, main_params_dtype=F.FP32),
    "companded": COMPANDED,
    "stretch": STRETCH,
}


def released(precision: PrecisionConfig) -> PrecisionConfig:
    return replace(precision, release_gradients=True)


def config_of(precision: PrecisionConfig, optimizer: OptimizerConfig = UNCLIPPED, **settings: Any) -> Config:
    config = tiny_config(precision=precision, optimizer=optimizer)
    return replace(config, **settings)


def _run(config: Config, num_steps: int) -> TinyRun:
    return train_tiny_gpt(config, random_batches(num_steps, 1))


def assert_same_bits(run: TinyRun, expected: TinyRun) -> None:
    assert run.losses == expected.losses
    # FP32 sums of 400,000 squares, added up in another order.
    assert run.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5)
    for name, value in expected.weights.items():
        assert torch.equal(run.weights[name], value), name


@pytest.mark.parametrize("form", list(FORMS))
def test_a_released_step_is_the_step(ranks: RankPool, form: str) -> None:
    precision = FORMS[form]
    (expected,) = ranks.run(_run, config_of(precision), 4, num_ranks=1)
    (run,) = ranks.run(_run, config_of(released(precision)), 4, num_ranks=1)
    assert_same_bits(run, expected)
    assert len(set(expected.losses)) == 4  # the steps moved something


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": replace(UNCLIPPED, decoupled_weight_decay=False)},
        {"model": LLAMA_STYLE},
        {"model": LLAMA_STYLE, "optimizer": replace(UNCLIPPED, optimizer="muon"), "precision": STRETCH},
        {
            "optimizer": replace(UNCLIPPED, optimizer="muon"),
            "parallel": ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True),
        },
        {
            "training": TrainingConfig(
                seed=1, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2
            )
        },
        {"parallel": ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)},
        {"parallel": ParallelConfig(pipeline_model_parallel_size=2)},
        {
            "parallel": ParallelConfig(pipeline_model_parallel_size=2),
            "model": replace(GPT3_STYLE, num_layers=4),
            "precision": PrecisionConfig(first_last_layers_bf16=True, num_layers_at_start_in_bf16=2),
        },
    ],
    ids=[
        "adam",
        "llama",
        "muon-split",
        "muon-tensor-parallel",
        "recompute",
        "tensor-parallel",
        "pipeline",
        "stage-without-fp8",
    ],
)
def test_a_released_step_is_the_step_in_any_layout(ranks: RankPool, settings: dict[str, Any]) -> None:
    config = config_of(**{"precision": PrecisionConfig(), **settings})
    parallel = config.parallel
    num_ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    expected = ranks.run(_run, config, 3, num_ranks=num_ranks)
    runs = ranks.run(_run, replace(config, precision=released(config.precision)), 3, num_ranks=num_ranks)
    for run, other in zip(runs, expected, strict=True):
        assert_same_bits(run, other)


def linear_part(gpt: TinyGPT) -> tuple[ReleasedGradBuffer, SpaceState]:
    """The released buffer and its state."""
    for buffer, state in zip(gpt.optimizer.buffers, gpt.optimizer.states, strict=True):
        if isinstance(buffer, ReleasedGradBuffer):
            return buffer, state
    raise AssertionError("nothing is released")


def in_one_rank(work: Callable[[TinyGPT, Config], Any], config: Config) -> Any:
    """Called by the rank of a pool."""
    with runtime(CPU), initialized(ParallelConfig(), 2, CPU) as topology:
        return work(build_tiny_gpt(config, topology, CPU, 1), config)


def _reads_and_writes(config: Config) -> list[tuple[str, int]]:
    """In order: which weights were read for a GEMM in a step, and which gradients written."""
    events: list[tuple[str, int]] = []

    def work(gpt: TinyGPT, config: Config) -> None:
        read, write = ScaledTensor.gemm_operand, ReleasedGradBuffer.add

        def recorded_read(self: ScaledTensor, format: Format, *, transposed: bool = False) -> Quantized:
            events.append(("read", self.payload.data_ptr()))
            return read(self, format, transposed=transposed)

        def recorded_write(self: ReleasedGradBuffer, gradient: Any, grad: Tensor) -> None:
            events.append(("write", gradient.param.payload.data_ptr()))
            write(self, gradient, grad)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ScaledTensor, "gemm_operand", recorded_read)
            patch.setattr(ReleasedGradBuffer, "add", recorded_write)
            forward_backward(gpt, config, random_batches(1, 1)[0])

    in_one_rank(work, config)
    return events


@pytest.mark.parametrize("recompute", [False, True])
def test_no_weight_is_read_after_its_update(ranks: RankPool, recompute: bool) -> None:
    """Under a split master the update changes the weight itself, inside backward: dgrad and a recomputed forward must
    come before wgrad, in every layer."""
    training = TrainingConfig(seed=1)
    if recompute:
        training = replace(training, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    (events,) = ranks.run(_reads_and_writes, config_of(released(STRETCH), training=training), num_ranks=1)
    written = [weight for kind, weight in events if kind == "write"]
    assert len(written) == len(set(written)) == 4 * 2  # four weights in each of two layers
    for weight in written:
        kinds = [kind for kind, other in events if other == weight]
        assert kinds == ["read"] * (3 if recompute else 2) + ["write"]


def _state_of(gpt: TinyGPT) -> dict[str, bytes]:
    """Master and moments of every parameter of one replica."""
    held = {}
    for state, slot in gpt.optimizer.slots():
        (fragment,) = state.space.fragments(slot)
        parts = [state.part(kind, slot, fragment).load() for kind in ("master", "exp_avg", "exp_avg_sq")]
        held[slot.name] = torch.stack(parts).numpy().tobytes()
    return held


def _with_bad_gradients(config: Config, all_bad: bool) -> tuple[list[str], float, float, list[str], list[str]]:
    """(names of bad gradients, norm, step count, linear weights that moved, other parameters that moved)."""

    def work(gpt: TinyGPT, config: Config) -> tuple[list[str], float, float, list[str], list[str]]:
        buffer, _ = linear_part(gpt)
        bad = {slot.offset for slot in buffer.space.slots[2:3]}
        if all_bad:
            bad = {slot.offset for slot in buffer.space.slots}
        write = ReleasedGradBuffer.add

        def spoilt(self: ReleasedGradBuffer, gradient: Any, grad: Tensor) -> None:
            if gradient.slot.offset in bad:
                grad = grad.clone()
                grad[-1] = torch.nan
            write(self, gradient, grad)

        before = _state_of(gpt)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ReleasedGradBuffer, "add", spoilt)
            forward_backward(gpt, config, random_batches(1, 1)[0])
            norm = gpt.optimizer.step().item()
        moved = {name for name, value in _state_of(gpt).items() if value != before[name]}
        linear = {slot.name for slot in buffer.space.slots}
        return (
            buffer.non_finite_slots(),
            norm,
            gpt.optimizer.step_count.item(),
            sorted(linear & moved),
            sorted(moved - linear),
        )

    return in_one_rank(work, config)


@pytest.mark.parametrize("precision", [PrecisionConfig(), STRETCH], ids=["O3", "stretch"])
def test_a_bad_gradient_skips_its_own_parameter_and_the_16_bit_rest(
    ranks: RankPool, precision: PrecisionConfig
) -> None:
    config = config_of(released(precision))
    ((bad, norm, count, linear, rest),) = ranks.run(_with_bad_gradients, config, False, num_ranks=1)
    assert norm != norm and count == 1.0
    assert len(bad) == 1 and len(linear) == 7 and bad[0] not in linear
    assert rest == []


def test_a_step_with_nothing_but_bad_gradients_changes_nothing(ranks: RankPool) -> None:
    ((bad, norm, count, linear, rest),) = ranks.run(
        _with_bad_gradients, config_of(released(STRETCH)), True, num_ranks=1
    )
    assert norm != norm and count == 0.0 and len(bad) == 8 and linear == rest == []


def _with_a_bad_cast(config: Config) -> tuple[float, float, bool]:
    """(norm, step count, whether anything moved) of a step in which a cast saw inf, which its delayed scale clamps."""

    def work(gpt: TinyGPT, config: Config) -> tuple[float, float, bool]:
        before, history = _state_of(gpt), gpt.chunks[0].recipe.history
        assert history is not None
        history.amax_of(0).fill_(torch.inf)
        forward_backward(gpt, config, random_batches(1, 1)[0])
        norm = gpt.optimizer.step().item()
        return norm, gpt.optimizer.step_count.item(), _state_of(gpt) != before

    return in_one_rank(work, config)


def test_a_step_that_a_cast_skips_is_not_counted(ranks: RankPool) -> None:
    """Its gradients are finite."""
    config = config_of(released(FORMS["O3-delayed"]))
    ((norm, count, moved),) = ranks.run(_with_a_bad_cast, config, num_ranks=1)
    assert norm != norm and count == 0.0 and not moved


def _second_gradient(config: Config) -> str:
    def work(gpt: TinyGPT, config: Config) -> str:
        buffer, _ = linear_part(gpt)
        own = buffer.gradients[0]
        own.accumulate_(torch.ones(own.param.shape))
        with pytest.raises(AssertionError) as caught:
            own.accumulate_(torch.ones(own.param.shape))
        return str(caught.value)

    return in_one_rank(work, config)


def test_a_second_gradient_is_refused(ranks: RankPool) -> None:
    (message,) = ranks.run(_second_gradient, config_of(released(PrecisionConfig())), num_ranks=1)
    assert "a second gradient in one step" in message


def _unreached(config: Config) -> list[bool]:
    """Per linear weight: whether a step that no gradient reached decayed it."""

    def work(gpt: TinyGPT, config: Config) -> list[bool]:
        _, state = linear_part(gpt)
        before = [state.get_master(slot).clone() for slot in state.space.slots]
        for chunk in gpt.model:
            chunk.zero_grad_buffer()
            chunk.finish_grad_sync()
        gpt.optimizer.step()
        after = [state.get_master(slot) for slot in state.space.slots]
        return [bool((new.abs().sum() < old.abs().sum()).item()) for new, old in zip(after, before, strict=True)]

    return in_one_rank(work, config)


def test_a_parameter_without_a_gradient_takes_its_step(ranks: RankPool) -> None:
    """Its gradient is zero, as without release: weight decay goes on."""
    optimizer = replace(UNCLIPPED, lr=0.1, weight_decay=0.5)
    (decayed,) = ranks.run(_unreached, config_of(released(PrecisionConfig()), optimizer), num_ranks=1)
    assert decayed == [True] * 8


def _layouts_of_operands(config: Config) -> list[str]:
    """Operands of the optimizer's operators that a kernel, which reads them as flat memory, would read wrongly."""
    wrong = []

    def work(gpt: TinyGPT, config: Config) -> None:
        forward_backward(gpt, config, random_batches(1, 1)[0])
        gpt.optimizer.step()

    with pytest.MonkeyPatch.context() as patch:
        for name in ("adamw_step_", "adamw_split_step_", "derive_fp8_weights_"):
            operator = getattr(ops, name)

            def checked(*args: Any, operator: Any = operator, name: str = name, **kwargs: Any) -> None:
                tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
                wrong.extend(f"{name}: {value.stride()}" for value in tensors if not value.is_contiguous())
                operator(*args, **kwargs)

            patch.setattr(ops, name, checked)
        in_one_rank(work, config)
    return wrong


@pytest.mark.parametrize("precision", [PrecisionConfig(), STRETCH, released(STRETCH)], ids=["O3", "split", "released"])
def test_operators_are_given_flat_memory(ranks: RankPool, precision: PrecisionConfig) -> None:
    """The scales of FP8 weights lie four floats apart, which Triton kernels know nothing of (and PyTorch hides)."""
    (wrong,) = ranks.run(_layouts_of_operands, config_of(precision), num_ranks=1)
    assert wrong == []
