"""Experts made of the MLPs of a dense model: megatron-core's values, and the dense model's loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.moe.upcycling_utils import upcycle_state_dict
from torch import Tensor

from fp8_megatron.checkpoint.loading import LoadOptions
from fp8_megatron.config.checks import ConfigError, check_config
from fp8_megatron.config.io import parse_config
from fp8_megatron.config.precision import PrecisionConfig
from fp8_megatron.config.schema import Config, ModelConfig, ParallelConfig
from fp8_megatron.moe.upcycling import Upcycling
from tests.harness.megatron_run import config_of, megatron_run
from tests.harness.ranks import RankError, RankPool
from tests.harness.tiny_checkpoint import TinyRun, run_tiny_on_a_rank
from tests.harness.tiny_gpt import LLAMA_STYLE, tiny_config

WIDTH, EXPERTS = 64, 8
ACTIVATIONS = {
    "swiglu": torch.nn.functional.silu,
    "squared_relu": SimpleNamespace(__name__="squared_relu"),
    "gelu": torch.nn.functional.gelu,
}


def config_for(model: ModelConfig) -> Config:
    return tiny_config(model, precision=PrecisionConfig(precision="bf16"))


def models(granularity: int, activation: str = "swiglu", **settings: Any) -> tuple[Config, Config]:
    """The dense model and that with experts."""
    kind = {"swiglu": activation == "swiglu", "squared_relu": activation == "squared_relu"}
    dense = replace(LLAMA_STYLE, ffn_hidden_size=granularity * WIDTH, **kind)  # type: ignore[arg-type]
    own = {"num_experts": EXPERTS, "moe_ffn_hidden_size": WIDTH, "moe_router_topk": 2 * granularity, **settings}
    return config_for(dense), config_for(replace(dense, **own))  # type: ignore[arg-type]


def upcycled(
    ranks: RankPool, config: Config, load: Path, granularity: int, *, num_ranks: int = 1, num_steps: int = 0
) -> TinyRun:
    options = LoadOptions(finetune=True, first_weights=Upcycling(granularity))
    return ranks.run(run_tiny_on_a_rank, config, num_steps, load, None, options, num_ranks=num_ranks)[0]


class _Model(torch.nn.Module):
    """What megatron-core's `upcycle_state_dict` asks of a model."""

    def __init__(self, mlp: torch.nn.Module, state: dict[str, Tensor]) -> None:
        super().__init__()
        self.mlp, self._values = mlp, state

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._values


class _Mixture(BaseMoELayer):
    def __init__(self, config: SimpleNamespace) -> None:
        torch.nn.Module.__init__(self)
        self.config, self.num_local_experts = config, config.num_moe_experts  # type: ignore[assignment]
        self.ep_group = SimpleNamespace(rank=lambda: 0)
        self.experts = SequentialMLP.__new__(SequentialMLP)
        torch.nn.Module.__init__(self.experts)

    def forward(self, hidden_states: Tensor) -> None:
        raise NotImplementedError


def by_megatron_core(dense: dict[str, Tensor], routers: dict[str, Tensor], model: ModelConfig, activation: str) -> Any:
    settings = SimpleNamespace(
        num_moe_experts=EXPERTS,
        gated_linear_unit=model.is_gated,
        moe_router_topk=model.moe_router_topk,
        moe_router_pre_softmax=model.moe_router_pre_softmax,
        moe_ffn_hidden_size=WIDTH,
        activation_func=ACTIVATIONS[activation],
    )
    mlp = torch.nn.Module()
    mlp.config = SimpleNamespace(ffn_hidden_size=model.padded_ffn_hidden_size)  # type: ignore[assignment]
    made = upcycle_state_dict([_Model(_Mixture(settings), routers)], [_Model(mlp, dense)])["model"]
    name = "decoder.layers.{}.mlp.experts.local_experts.{}.{}.weight"
    for layer in range(model.num_layers):
        for linear in ("linear_fc1", "linear_fc2"):
            of_experts = [made[name.format(layer, expert, linear)] for expert in range(EXPERTS)]
            made[f"decoder.layers.{layer}.mlp.experts.{linear}.weight"] = torch.stack(of_experts)
    return made


@pytest.mark.parametrize(
    ("granularity", "activation", "pre_softmax"),
    [(1, "swiglu", False), (2, "swiglu", True), (2, "squared_relu", False), (4, "gelu", False)],
)
def test_values_are_megatron_cores(
    ranks: RankPool, tmp_path: Path, granularity: int, activation: str, pre_softmax: bool
) -> None:
    dense, config = models(granularity, activation, moe_router_pre_softmax=pre_softmax)
    saved = ranks.run(run_tiny_on_a_rank, dense, 1, None, tmp_path, num_ranks=1)[0]
    drawn = ranks.run(run_tiny_on_a_rank, config, 0, None, None, num_ranks=1)[0]
    weights = {key.removeprefix("master/"): value for key, value in saved.end.items() if key.startswith("master/")}
    routers = {key.removeprefix("master/"): value for key, value in drawn.start.items() if "router.weight" in key}
    expected = {**weights, **by_megatron_core(weights, routers, config.model, activation)}
    found = upcycled(ranks, config, tmp_path, granularity)
    assert found.progress.iteration == 0
    own = {key.removeprefix("master/"): value for key, value in found.start.items() if key.startswith("master/")}
    assert any("experts.linear_fc1" in name for name in own) and any("router" in name for name in own)
    for name, value in own.items():
        torch.testing.assert_close(value, expected[name].view(value.shape), rtol=1e-6, atol=0.0, msg=name)


def test_equal_experts_are_the_mlp(ranks: RankPool, tmp_path: Path) -> None:
    """Under every layout, and with layers that keep their MLP. BF16 rounds the sum of a token's experts once more."""
    dense, config = models(1, moe_router_dtype="fp32", moe_layer_freq="[0,1]")
    ranks.run(run_tiny_on_a_rank, dense, 2, None, tmp_path, num_ranks=1)
    expected = ranks.run(run_tiny_on_a_rank, dense, 1, tmp_path, None, LoadOptions(finetune=True), num_ranks=1)[0]
    for parallel in (ParallelConfig(), ParallelConfig(expert_model_parallel_size=2)):
        size = parallel.expert_model_parallel_size
        found = upcycled(ranks, replace(config, parallel=parallel), tmp_path, 1, num_ranks=size, num_steps=1)
        assert found.losses == pytest.approx(expected.losses, abs=2**-8)


def test_a_dense_model_of_megatron(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> None:
    run, dense = megatron_run("llama", tmp_path_factory), config_of("llama")
    width = dense.model.padded_ffn_hidden_size
    config = replace(dense, model=replace(dense.model, num_experts=4, moe_ffn_hidden_size=width))
    found = upcycled(ranks, config, run / "dp_reshardable", 1, num_steps=1)
    options = LoadOptions(finetune=True)
    expected = ranks.run(run_tiny_on_a_rank, dense, 1, run / "dp_reshardable", None, options, num_ranks=1)[0]
    assert found.losses == pytest.approx(expected.losses, abs=2**-8)
    other = replace(config, model=replace(config.model, moe_ffn_hidden_size=2 * width))
    said = rf"1 × moe_ffn_hidden_size\({2 * width}\) = {2 * width} is not ffn_hidden_size\({width}\) of .*; give --moe-"
    with pytest.raises(RankError, match=rf"{said}ffn-hidden-size {width}"):
        upcycled(ranks, other, run / "dp_reshardable", 1)


def test_a_run_goes_on_without_the_flag(ranks: RankPool, tmp_path: Path) -> None:
    _, config = models(1)
    ranks.run(run_tiny_on_a_rank, config, 1, None, tmp_path, num_ranks=1)
    (folder,) = tmp_path.glob("iter_*")
    problem = Upcycling(1).problem_of(folder, config.model)
    assert problem is not None and "has these experts; drop it to go on" in problem


def test_the_width_of_another_models_mlps(ranks: RankPool, tmp_path: Path) -> None:
    dense, config = models(1)
    ranks.run(run_tiny_on_a_rank, dense, 1, None, tmp_path, num_ranks=1)
    (folder,) = tmp_path.glob("iter_*")
    width = dense.model.padded_ffn_hidden_size
    problem = Upcycling(2).problem_of(folder, config.model)
    assert problem == (
        f"moe_use_upcycling: 2 × moe_ffn_hidden_size({width}) = {2 * width} is not ffn_hidden_size({width}) of "
        f"{folder}; give --moe-ffn-hidden-size {width // 2}"
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("", "moe_use_upcycling takes weights from a checkpoint; give --load, or --pretrained-checkpoint"),
        ("--load x --moe-upcycling-granularity 3", "num_experts(8) % moe_upcycling_granularity(3) = 2"),
        ("--load x --moe-shared-expert-intermediate-size 64", "without experts has no moe_shared_expert_interm"),
        ("--load x --moe-layer-freq 2 --moe-ffn-hidden-size 64", "1 × moe_ffn_hidden_size(64) = 64 is not ffn_hidden"),
    ],
)
def test_what_cannot_be_upcycled(flags: str, said: str) -> None:
    words = (
        "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2 --swiglu "
        f"--disable-bias-linear --mock-data --vocab-size 1024 --num-experts 8 --moe-use-upcycling {flags}"
    )
    with pytest.raises(ConfigError) as error:
        check_config(parse_config(words.split()), 1, on_this_machine=False)
    assert said in str(error.value)
