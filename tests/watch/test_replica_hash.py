"""Ranks that hold the same tensors notice one flipped bit, and name the rank and the tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8_megatron.config.schema import Config, ModelConfig, ParallelConfig, PrecisionConfig
from fp8_megatron.dtypes import StorageDtype
from fp8_megatron.mcore.runtime import runtime
from fp8_megatron.mcore.topology import initialized
from fp8_megatron.sharding.partition import StorageClass
from fp8_megatron.watch.replica_hash import PendingCheck, ReplicaCheck, ReplicasDiffer, hash_bits
from tests.harness.ranks import RankPool
from tests.harness.tiny_gpt import GPT3_STYLE, TinyGPT, build_tiny_gpt, forward_backward, random_batches, tiny_config

CPU = torch.device("cpu")
NAMES = ["weight", "scale", "swapped", "step count", "amax", "moment of a norm"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.int64])
def test_every_bit_and_every_place_counts(dtype: torch.dtype) -> None:
    """Random bits: NaNs too. 7 × 3 elements of one byte are no whole words."""
    bits = torch.randint(256, (7, 3 * dtype.itemsize), dtype=torch.uint8)
    whole = hash_bits(bits.view(dtype))
    assert torch.equal(whole, hash_bits(bits.clone().view(dtype)))
    for place in range(bits.numel()):
        changed = bits.clone()
        changed.view(-1)[place] ^= 1 << place % 8
        assert not torch.equal(whole, hash_bits(changed.view(dtype)))
    assert not torch.equal(whole, hash_bits(bits.flip(0).contiguous().view(dtype)))


@pytest.mark.parametrize("count", [1, 3])
def test_bits_count_wherever_they_lie(count: int) -> None:
    """Scales are four floats apart; a stage may have a single one."""
    apart = torch.randn(3, 4)[3 - count :, 0]
    assert torch.equal(hash_bits(apart), hash_bits(torch.tensor(apart.tolist())))


def test_pieces_are_one_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(5000)
    whole = hash_bits(values)
    monkeypatch.setattr("fp8_megatron.watch.replica_hash._PIECE", 999)
    assert torch.equal(whole, hash_bits(values))


def _check(check: ReplicaCheck) -> tuple[str, dict[int, str]]:
    pending = PendingCheck(check)
    pending.start()
    try:
        pending.examine()
    except ReplicasDiffer as error:
        return str(error), error.hosts
    return "", {}


def _tensors(gpt: TinyGPT) -> dict[str, Tensor]:
    """Something to corrupt, by name; of what this layout holds alike."""
    of_class = {state.space.storage: state for state in reversed(gpt.optimizer.states)}
    linear = of_class[StorageClass.LINEAR]
    found = {"step count": gpt.optimizer.step_count}
    history = gpt.chunks[0].recipe.history
    if history is not None and history.history is not None:
        found["amax"] = history.history
    if gpt.topology.dp.size() > 1:
        found["weight"] = found["swapped"] = linear.weight.payload[:8]
        assert linear.weight_scales is not None
        found["scale"] = linear.weight_scales[1, :1]
    if gpt.topology.tp.size() > 1:
        found["moment of a norm"] = of_class[StorageClass.VECTOR].states["exp_avg"].payload
    return found


def _trained(config: Config, num_steps: int, corrupt_rank: int) -> list[tuple[str, str, dict[int, str]]]:
    """What the check says after training, and after each corruption on one rank: (what, text, hosts)."""
    parallel = config.parallel
    with runtime(CPU), initialized(parallel, config.model.num_layers, CPU) as topology:
        gpt = build_tiny_gpt(config, topology, CPU, 2)
        histories = [chunk.recipe.history for chunk in gpt.chunks]
        group = topology.world
        assert group is not None
        check = ReplicaCheck(gpt.optimizer, histories, stage_group=topology.stage_group, world=group, device=CPU)
        batches = random_batches(num_steps, 2 * topology.dp.size())[:, topology.dp.rank() :: topology.dp.size()]
        for state in gpt.optimizer.states:
            if state.gather is not None:
                state.gather.wait()  # the initial weights are on their way
        found = [("before the first step", *_check(check))]
        for micro_batches in batches:
            forward_backward(gpt, config, micro_batches)
            found.append(("training", *_check(check)))
            gpt.optimizer.step()
            for history in histories:
                if history is not None:
                    history.update(topology.stage_group)
        forward_backward(gpt, config, batches[0])  # every gather has arrived
        for what, tensor in _tensors(gpt).items():
            bits = tensor.view(-1).view(torch.uint8)
            before = bits.clone()
            if topology.rank == corrupt_rank:
                if what == "swapped":
                    bits[0], bits[1] = before[1] ^ 3, before[0] ^ 3  # not swapped bits alone: these may be equal
                else:
                    bits[-1] ^= 4
            found.append((what, *_check(check)))
            bits.copy_(before)
        return [*found, ("mended", *_check(check))]


LAYOUTS = {
    "dp2": (ParallelConfig(), 2),
    "dp4": (ParallelConfig(ddp_bucket_size=50_000), 4),
    "tp2": (ParallelConfig(tensor_model_parallel_size=2), 2),
    "sp2 dp2": (ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True), 4),
    "pp2 dp2": (ParallelConfig(pipeline_model_parallel_size=2), 4),
}
PRECISIONS = {
    "delayed": PrecisionConfig(fp8_recipe="delayed"),
    "O1": PrecisionConfig(opt_level="O1"),
    "split": PrecisionConfig(
        main_params_dtype=StorageDtype.SPLIT, exp_avg_dtype=StorageDtype.INT8, exp_avg_sq_dtype=StorageDtype.UINT8
    ),
}


@pytest.mark.parametrize(
    # Two replicas that disagree without a majority are in "pp2 dp2" too.
    "layout",
    [pytest.param(layout, marks=pytest.mark.slow) if layout == "dp2" else layout for layout in LAYOUTS],
)
def test_a_flipped_bit_is_found_and_named(ranks: RankPool, layout: str) -> None:
    parallel, num_ranks = LAYOUTS[layout]
    bad = num_ranks - 1
    config = tiny_config(parallel=parallel, precision=PRECISIONS["delayed"])
    everyones = ranks.run(_trained, config, 2, bad, num_ranks=num_ranks)
    assert everyones[1:] == everyones[:-1], "ranks disagree"
    for what, text, hosts in everyones[0]:
        if what in ("before the first step", "training", "mended"):
            assert text == "", what
            continue
        group_size = {"step count": num_ranks, "moment of a norm": 2}.get(what)
        if group_size is None:
            group_size = {"dp2": 2, "dp4": 4, "tp2": 2, "sp2 dp2": 4 if what == "amax" else 2, "pp2 dp2": 2}[layout]
        if group_size > 2:
            assert text.startswith(f"rank {bad} (host ") and f"than {group_size - 1} ranks that agree" in text, what
            assert list(hosts) == [bad]
        else:
            assert "no majority tells which of them is wrong" in text and len(hosts) == 2 and bad in hosts, what
        expected = {"weight": "of weight decoder", "swapped": "of weight decoder", "scale": "scale of decoder"}
        expected |= {"amax": "amax histories", "moment of a norm": "of exp_avg of", "step count": "step count"}
        assert expected[what] in text, text


@pytest.mark.parametrize("precision", ["O1", "split"])
def test_every_storage_is_alike_on_replicas(ranks: RankPool, precision: str) -> None:
    parallel = ParallelConfig(tensor_model_parallel_size=2)
    model: ModelConfig = GPT3_STYLE
    config = tiny_config(model, parallel=parallel, precision=PRECISIONS[precision])
    for found in ranks.run(_clean, config, num_ranks=4):
        assert found == ["", "", ""]


def _clean(config: Config) -> list[str]:
    with runtime(CPU), initialized(config.parallel, config.model.num_layers, CPU) as topology:
        gpt = build_tiny_gpt(config, topology, CPU, 2)
        assert topology.world is not None
        check = ReplicaCheck(gpt.optimizer, [], stage_group=topology.stage_group, world=topology.world, device=CPU)
        found = []
        for micro_batches in random_batches(3, 4)[:, topology.dp.rank() :: 2]:
            forward_backward(gpt, config, micro_batches)
            found.append(_check(check)[0])
            gpt.optimizer.step()
        return found
