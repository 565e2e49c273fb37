"""`msamp.initialize`, `LinearReplacer` and the optimizers that a user builds."""

from __future__ import annotations

import copy
import io
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fp8_megatron
from fp8_megatron.dtypes import E4M3
from tests.compat import small_training as small
from tests.harness.ranks import RankPool, on_default_group


@pytest.fixture(autouse=True)
def names(msamp: ModuleType) -> None:
    """The module is importable."""


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_initialize_is_ours(level: str, kind: type) -> None:
    """The same losses as `fp8_megatron.initialize`, under MS-AMP's class names."""
    import msamp
    from msamp.optim import LBAdam, LBAdamW

    def start() -> tuple[Any, Any]:
        model, _ = small.build()
        return model, kind(model.parameters(), lr=3e-2, weight_decay=0.1)

    ours = small.train(*fp8_megatron.initialize(*start(), opt_level=level), small.batches(6))
    model, optimizer = msamp.initialize(*start(), opt_level=level)
    assert type(optimizer) is (LBAdamW if kind is torch.optim.AdamW else LBAdam)
    assert small.train(model, optimizer, small.batches(6)) == ours


def test_initialize_without_an_optimizer_takes_adamw() -> None:
    import msamp
    from msamp.optim import LBAdamW

    _, optimizer = msamp.initialize(small.SmallNet())
    assert type(optimizer) is LBAdamW and optimizer.param_groups[0]["lr"] == 1e-3


def test_a_learning_rate_schedule_of_the_old_optimizer_sets_the_new_ones() -> None:
    import msamp

    model, optimizer = small.build()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    _, fp8_optimizer = msamp.initialize(model, optimizer)
    scheduler.step()
    assert fp8_optimizer.param_groups[0]["lr"] == 0.5 * 3e-2


@pytest.mark.parametrize(
    ("name", "moments", "level"),
    [("LBAdamW", (torch.float32, torch.float32), "O1"), ("LBAdamW", (torch.uint8, torch.float16), "O2")],
)
def test_a_built_optimizer_is_the_level(name: str, moments: tuple, level: str) -> None:
    """After `LinearReplacer.replace`, the optimizer of the level's dtypes takes the level's steps.

    Its masters start from the rounded weights, which FP16 weights in blocks are not changed by.
    """
    import msamp
    from msamp import optim
    from msamp.nn import LinearReplacer

    model, optimizer = small.build()
    expected = small.train(*msamp.initialize(model, optimizer, opt_level=level), small.batches(6))
    model = LinearReplacer.replace(small.build()[0])
    built = getattr(optim, name)(
        model.parameters(), lr=3e-2, exp_avg_dtype=moments[0], exp_avg_sq_dtype=moments[1], weight_decay=1e-2
    )
    assert small.train(model, built, small.batches(6)) == expected


@pytest.mark.parametrize("name", ["LBAdam", "LBAdamW", "LBAdamWBase", "DSAdam"])
def test_optimizers_follow_torchs(name: str) -> None:
    """With FP32 moments and plain parameters a step is torch's: Adam's L2 term or AdamW's decay."""
    from msamp import optim

    def weights_after(make: Any) -> torch.Tensor:
        torch.manual_seed(3)
        layer = torch.nn.Linear(4, 4)  # no size of an FP8 GEMM
        optimizer = make([{"params": [layer.weight], "weight_decay": 0.3}, {"params": layer.bias, "lr": 0.1}])
        for _ in range(3):
            layer(torch.randn(5, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([layer.weight.detach().flatten(), layer.bias.detach()])

    torchs = torch.optim.Adam if name == "LBAdam" else torch.optim.AdamW
    fp32 = {"exp_avg_dtype": torch.float32, "exp_avg_sq_dtype": torch.float32}
    mine = weights_after(lambda groups: getattr(optim, name)(groups, lr=1e-2, **fp32))
    decay = {} if name in ("LBAdamW", "LBAdamWBase") else {"weight_decay": 0.0}
    exact = weights_after(lambda groups: torchs(groups, lr=1e-2, **decay))
    # A step changes a weight by at most about lr, in FP32: a few roundings of the weight and of the ratio of moments.
    assert (mine - exact).abs().max() <= 3 * (4 * 2**-24 * exact.abs().max() + 16 * 2**-24 * 0.1)


def test_replaced_weights() -> None:
    from msamp.common.dtype import Dtypes
    from msamp.nn import FP8Linear, LinearReplacer

    model = small.SmallNet()
    model.head.use_fp32_linear = True
    before = model.up.weight.detach().clone()
    assert LinearReplacer.replace(model, Dtypes.kfloat8_e4m3) is model
    assert type(model.up) is FP8Linear and type(model.head) is torch.nn.Linear
    assert model.up.weight.payload.dtype == E4M3 and model.up.weight._param_name == "up.weight"
    assert (model.up.weight.dequantize() - before).abs().max() <= before.abs().max() * 2**-4
    with pytest.raises(ValueError, match=r"weight_qtype\(kFloat32\) is not kfloat16 or kfloat8_e4m3"):
        LinearReplacer.replace(small.SmallNet(), Dtypes.kfloat32)
    with pytest.raises(ValueError, match=r"src_rank\(1\) is not 0"):
        LinearReplacer.replace(small.SmallNet(), src_rank=1)


def test_what_initialize_refuses() -> None:
    import msamp

    model, optimizer = small.build()
    with pytest.raises(ValueError, match=r"opt_level\('O0'\) is not one of O1, O2, O3"):
        msamp.initialize(model, optimizer, "O0")
    with pytest.raises(ValueError, match=r"not a torch\.nn\.Module"):
        msamp.initialize([model], optimizer)
    with pytest.raises(ValueError, match="Rprop"):
        msamp.initialize(model, torch.optim.Rprop(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"the model has no te\.Linear"):
        msamp.initialize(model, optimizer, use_te=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"amsgrad": True}, r"amsgrad=True"),
        ({"maximize": True}, r"maximize=True"),
        ({"bias_correction": False}, r"bias_correction=False"),
        ({"exp_avg_dtype": torch.int8}, r"exp_avg_dtype=torch.int8"),
    ],
)
def test_what_optimizers_refuse(options: dict[str, Any], message: str) -> None:
    from msamp.optim import LBAdamW

    with pytest.raises(ValueError, match=rf"LBAdamW\({message}\)"):
        LBAdamW(torch.nn.Linear(4, 4).parameters(), **options)


def test_clipping_through_their_name() -> None:
    import msamp

    def norms(clip: Any) -> list[float]:
        model, _ = msamp.initialize(*small.build(), opt_level="O2")
        small.loss_of(model, *next(small.batches(1))).backward()
        return [clip(model.parameters(), limit).item() for limit in (0.0, 0.5, 1e9)]

    before, clipped, after = norms(msamp.clip_grad_norm_)
    assert before == clipped > 0.5
    # FP8 gradients are clipped through their scales: only the factor and the norm are rounded.
    assert abs(after - 0.5) < 1e-5


def _on_a_rank(group: Any, site: str, builds: bool) -> dict[str, torch.Tensor]:
    """The weights after some steps of an optimizer that is built, or that `initialize` gives, under torch's DDP."""
    sys.path.insert(0, site)
    import msamp
    from msamp.nn import LinearReplacer
    from msamp.optim import LBAdamW

    model, optimizer = small.build(seed=1 + group.rank())
    if builds:
        optimizer = LBAdamW(LinearReplacer.replace(model).parameters(), lr=3e-2)
    else:
        model, optimizer = msamp.initialize(model, optimizer, opt_level="O2")
    data_parallel = torch.nn.parallel.DistributedDataParallel(model)
    for tokens, classes in small.batches(3, seed=group.rank()):
        small.loss_of(data_parallel, tokens, classes).backward()
        optimizer.all_reduce_grads(model)
        optimizer.step()
        optimizer.zero_grad()
    return small.weights_of(model)


def test_a_built_optimizer_on_two_ranks(ranks: RankPool, msamp_site: Path) -> None:
    built = ranks.run(on_default_group, _on_a_rank, str(msamp_site), True, num_ranks=2)
    given = ranks.run(on_default_group, _on_a_rank, str(msamp_site), False, num_ranks=2)
    for name, value in built[0].items():
        assert torch.equal(value, built[1][name]) and torch.equal(value, given[0][name]), name


def test_replaced_models_are_copied_and_pickled() -> None:
    from msamp.nn import LinearReplacer

    model = LinearReplacer.replace(small.SmallNet())
    copied = copy.deepcopy(model)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    tokens, _ = next(small.batches(1))
    assert torch.equal(copied(tokens), model(tokens)) and torch.equal(loaded(tokens), model(tokens))


def test_arguments_of_fsdp_that_are_not_taken() -> None:
    from msamp.fsdp import FP8FullyShardedDataParallel

    with pytest.raises(ValueError, match=r"FP8FullyShardedDataParallel\(cpu_offload\)"):
        FP8FullyShardedDataParallel(small.SmallNet(), cpu_offload=True)
    from msamp.optim import FSDPAdam

    with pytest.raises(ValueError, match=r"after FP8FullyShardedDataParallel\(model\)"):
        FSDPAdam(small.SmallNet().parameters())
