"""The optimizer on the shards of torch's fully_shard: any number of ranks trains what one rank trains, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.multiprocessing.reductions import StorageWeakRef

import fp8_megatron
from fp8_megatron.any_model import replace_linears
from fp8_megatron.any_model.fsdp import build_sharded_optimizer
from fp8_megatron.any_model.fsdp_reduce import reduce_in_own_dtype
from fp8_megatron.dtypes import LEVELS, STATE_BLOCK, StorageDtype
from fp8_megatron.errors import UserError
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from tests.harness.fp8_models import cpu_mesh, shard
from tests.harness.ranks import RankPool, on_default_group

Group = torch.distributed.ProcessGroup
OptimizerOf = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
VOCABULARY = 50  # uneven over 4 ranks


class TinyModel(torch.nn.Module):
    """An embedding, two blocks of a norm and linear layers with biases, and a head that stays in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, 64)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.LayerNorm(64), torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64)
            )
            for _ in range(2)
        )
        self.head = torch.nn.Linear(64, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def adamw(params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def build(
    opt_level: str,
    dtype: torch.dtype,
    *,
    exact: bool = True,
    recomputes: bool = False,
    optimizer_of: OptimizerOf = adamw,
    **options: Any,
) -> tuple[TinyModel, Any]:
    """A sharded model and its optimizer.

    Args:
        exact: gradients travel in their own dtype.
        recomputes: layers behind GELU compute their inputs again in backward.
    """
    torch.manual_seed(0)
    model = TinyModel().to(dtype)
    replace_linears(model, weight=LEVELS[opt_level].weight, recompute_activations=recomputes)
    shard(*model.blocks, model, **options)
    optimizer = build_sharded_optimizer(model, optimizer_of(model.parameters()), opt_level)
    if exact:
        reduce_in_own_dtype(model)
    return model, optimizer


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step % 3)
    tokens = torch.randint(VOCABULARY, (4, 17), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def train_step(model: TinyModel, optimizer: Any, step: int) -> float:
    inputs, targets = batch(step)
    loss = torch.nn.functional.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def whole_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """The values that every rank computes with, gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    weights = {
        name: (param.dequantize() if isinstance(param, ScaledTensor) else param.detach().clone())
        for name, param in model.named_parameters()
    }
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return weights


def train(
    group: Group, opt_level: str, dtype: torch.dtype, mesh_shape: tuple[int, ...] = ()
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of six steps, all ranks with the same batches, and the weights after them."""
    shape = mesh_shape or (group.size(),)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model, optimizer = build(opt_level, dtype, mesh=mesh)
    losses = [train_step(model, optimizer, step) for step in range(6)]
    return losses, whole_weights(model)


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool) -> Any:
    """What one rank trains, by level and dtype."""
    known: dict[Any, Any] = {}

    def result(opt_level: str, dtype: torch.dtype) -> Any:
        if (opt_level, dtype) not in known:
            known[opt_level, dtype] = ranks.run(on_default_group, train, opt_level, dtype, num_ranks=1)[0]
        return known[opt_level, dtype]

    return result


@pytest.mark.parametrize(
    "opt_level, dtype, num_ranks",
    [
        ("O3", torch.bfloat16, 2),
        ("O3", torch.bfloat16, 4),
        ("O3", torch.float32, 2),
        ("O2", torch.bfloat16, 2),
        ("O1", torch.float32, 4),
    ],
)
def test_equals_one_rank(ranks: RankPool, one_rank: Any, opt_level: str, dtype: torch.dtype, num_ranks: int) -> None:
    """Means of two or four equal BF16 gradients are exact, so nothing may differ. Matrices of which a rank has no whole
    blocks are rounded in other blocks: an FP32 weight by less than its last bit a step."""
    losses, weights = one_rank(opt_level, dtype)
    assert losses[3] < 0.75 * losses[0], losses  # the first batch once more
    for other_losses, other_weights in ranks.run(on_default_group, train, opt_level, dtype, num_ranks=num_ranks):
        assert other_losses == losses
        for name, weight in weights.items():
            is_cut = weight.ndim > 1 and weight.numel() // num_ranks % STATE_BLOCK and dtype == torch.float32
            differences = (other_weights[name] - weight).abs()
            assert differences.max() <= (6 * 2.0**-24 if is_cut else 0.0), name


def test_hsdp_equals_one_rank(ranks: RankPool, one_rank: Any) -> None:
    losses, weights = one_rank("O3", torch.bfloat16)
    results = ranks.run(on_default_group, train, "O3", torch.bfloat16, (2, 2), num_ranks=4)
    assert all(
        result[0] == losses and all(map(torch.equal, result[1].values(), weights.values())) for result in results
    )


def not_finite_on_one_rank(group: Group) -> tuple[int, bool]:
    """Skipped steps of a step in which one rank's rows have a NaN, and whether any weight changed."""
    model, optimizer = build("O3", torch.bfloat16)
    before = whole_weights(model)
    inputs, targets = batch(0)
    torch.nn.functional.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten()).backward()
    if group.rank() == 1:
        model.blocks[0][1].weight.grad.to_local()[0, 0] = torch.nan
    optimizer.step()
    after = whole_weights(model)
    return optimizer.num_skipped_steps, all(torch.equal(after[name], before[name]) for name in before)


def test_a_gradient_that_is_not_finite_skips_the_step_on_all_ranks(ranks: RankPool) -> None:
    assert ranks.run(on_default_group, not_finite_on_one_rank, num_ranks=2) == [(1, True)] * 2


def clipped(group: Group) -> list[float]:
    """The norm before and after clipping: torch's function, and ours."""
    norms = []
    for clip in (torch.nn.utils.clip_grad_norm_, fp8_megatron.clip_grad_norm_):
        model, _ = build("O3", torch.bfloat16)
        inputs, targets = batch(0)
        torch.nn.functional.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten()).backward()
        squares = [param.grad.full_tensor().float().square().sum() for param in model.parameters()]
        norm = clip(model.parameters(), 0.1)
        after = [param.grad.full_tensor().float().square().sum() for param in model.parameters()]
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        norms += [float(norm) / float(sum(squares).sqrt()), float(sum(after).sqrt())]
    return norms


def test_clipping(ranks: RankPool) -> None:
    for norms in ranks.run(on_default_group, clipped, num_ranks=2):
        # The norm in BF16 (torch's, of BF16 gradients), and gradients rounded once more to BF16.
        assert norms == pytest.approx([1.0, 0.1, 1.0, 0.1], rel=2 * 2**-8)


def errors(group: Group) -> list[str]:
    """What is said about calls in the wrong order, and about shards that cannot be used."""
    found = []

    def try_(
        model: torch.nn.Module, opt_level: str = "O3", optimizer_of: OptimizerOf = torch.optim.AdamW, **options: Any
    ) -> None:
        try:
            fp8_megatron.initialize(model, optimizer_of(model.parameters()), opt_level, **options)
        except UserError as error:
            found.append(str(error))

    plain = torch.nn.Sequential(torch.nn.Linear(64, 64))
    shard(plain)
    try_(plain)
    uneven = torch.nn.Sequential(torch.nn.Linear(64, 16, bias=False))
    replace_linears(uneven)
    shard(uneven)
    try_(uneven)
    even = torch.nn.Sequential(torch.nn.Linear(64, 48, bias=False))
    replace_linears(even)
    shard(even)
    try_(even, "O2")
    try_(even, recipe="delayed")
    try_(even)
    try_(even)
    half = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.Linear(48, 48))
    replace_linears(half)
    fully_shard(half[0], mesh=cpu_mesh())
    try_(half)
    short = torch.nn.Sequential(torch.nn.Linear(64, 48, bias=False), torch.nn.Linear(48, 2, bias=False))
    replace_linears(short)
    shard(short)
    try_(short, optimizer_of=torch.optim.Muon)
    return found


def test_errors_name_the_fix(ranks: RankPool) -> None:
    wanted = [
        "no layer is in FP8: call fp8_megatron.replace_linears",
        "0.weight has 16 rows, which 3 ranks do not share evenly",
        "0.weight is stored in torch.float8_e4m3fn, and this opt_level stores weights in torch.float16",
        "recipe: fully_shard has sharded the model already",
        "0.weight has an FP8 optimizer already",
        "1.weight is not sharded",
        "1.weight (2, 48) has fewer rows than there are ranks (3)",
    ]
    for found in ranks.run(on_default_group, errors, num_ranks=3):
        assert len(found) == len(wanted), found
        for message, part in zip(found, wanted, strict=True):
            assert part in message


def sharded_too_late(group: Group, part: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
    model, optimizer = fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters()), "O3")
    fully_shard(model[int(part)], mesh=cpu_mesh())
    model(torch.randn(16, 64)).square().mean().backward()
    with pytest.raises(UserError, match=rf"{part}.weight: fully_shard has sharded the model since initialize"):
        optimizer.step()


@pytest.mark.parametrize("part", ["0", "1"])
def test_fully_shard_behind_initialize_is_an_error(ranks: RankPool, part: str) -> None:
    """The shards are parameters of their own, which no optimizer would update."""
    ranks.run(on_default_group, sharded_too_late, part, num_ranks=2)


def flattened(group: Group) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    with pytest.raises(UserError, match=r"0 is a FullyShardedDataParallel: .* use torch's fully_shard instead"):
        wrapped = torch.nn.Sequential(FullyShardedDataParallel(torch.nn.Linear(64, 64), device_id=torch.device("cpu")))
        fp8_megatron.initialize(wrapped, torch.optim.AdamW(wrapped.parameters()))
    model, optimizer = fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters()), "O3")
    with pytest.raises(UserError, match=r"0: its weight is no parameter since initialize, .* use fully_shard"):
        FullyShardedDataParallel(model, device_id=torch.device("cpu"))(torch.randn(16, 64))
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
    model, optimizer = fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters()), "O3")
    model[1] = FullyShardedDataParallel(model[1], device_id=torch.device("cpu"))
    model(torch.randn(16, 64)).square().mean().backward()
    with pytest.raises(UserError, match="FullyShardedDataParallel has flattened the model since initialize"):
        optimizer.step()


def test_the_older_fsdp_is_an_error(ranks: RankPool) -> None:
    ranks.run(on_default_group, flattened, num_ranks=2)


def cut_blocks(group: Group) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False))
    replace_linears(model, weight=StorageDtype.FP16)
    shard(model)
    with pytest.raises(
        UserError, match=r"0.weight \(16, 16\) over 2 ranks leaves 128 elements for each, no whole blocks"
    ):
        fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters()), "O2")


def test_cut_blocks_are_an_error(ranks: RankPool) -> None:
    ranks.run(on_default_group, cut_blocks, num_ranks=2)


def trains_with(group: Group, recipe: str) -> list[float]:
    model = TinyModel().bfloat16()
    replace_linears(model, recipe=recipe)  # type: ignore[arg-type]
    for block in model.blocks:
        block.compile(backend="aot_eager")
    shard(*model.blocks, model)
    model, optimizer = fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), "O3")
    return [train_step(model, optimizer, step) for step in range(6)]


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_compiled_blocks_and_recipes(ranks: RankPool, recipe: str) -> None:
    first, second = ranks.run(on_default_group, trains_with, recipe, num_ranks=2)
    assert first == second and first[3] < 0.75 * first[0], first


def resharded_to_fewer(group: Group) -> str:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    replace_linears(model)
    fully_shard(model, mesh=cpu_mesh(), reshard_after_forward=2)
    with pytest.raises(UserError) as raised:
        fp8_megatron.initialize(model, torch.optim.AdamW(model.parameters()), "O3")
    return str(raised.value)


def test_resharding_to_fewer_ranks_is_refused(ranks: RankPool) -> None:
    for message in ranks.run(on_default_group, resharded_to_fewer, num_ranks=4):
        assert "reshard_after_forward=2: torch does not gather FP8 weights from fewer ranks" in message


def _gradients_left(group: Group) -> list[str]:
    """Parameters whose gradient is still in memory after ``zero_grad``."""
    model, optimizer = build("O3", torch.bfloat16)
    inputs, targets = batch(0)
    torch.nn.functional.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten()).backward()
    fp8_megatron.clip_grad_norm_(model, 1.0)
    optimizer.step()
    storages = {
        name: StorageWeakRef(param.grad.to_local().untyped_storage()) for name, param in model.named_parameters()
    }
    optimizer.zero_grad()
    return [name for name, storage in storages.items() if not storage.expired()]


def test_zero_grad_frees_gradients(ranks: RankPool) -> None:
    assert ranks.run(on_default_group, _gradients_left, num_ranks=2) == [[], []]
