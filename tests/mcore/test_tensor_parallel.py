"""FP8 column- and row-parallel layers on two ranks against the unsharded layer.

With the weight's scale shared and power-of-two scales for x and grad_output, quantising a shard is exact quantising of
the whole: what remains is the order of FP32 sums, and for partial results (row-parallel output, column-parallel
grad_input) the rounding of each rank's part and of their sum to BF16. Otherwise shards have scales of their own, and
each layout is held to float64 (bounds: test_linear.py).
"""

from __future__ import annotations

import itertools
from typing import Literal

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from fp8_megatron.config.schema import ParallelConfig
from fp8_megatron.formats.recipes import RecipeName
from fp8_megatron.mcore.runtime import runtime
from fp8_megatron.mcore.tensor_parallel import FP8ColumnParallelLinear, FP8RowParallelLinear
from fp8_megatron.mcore.topology import initialized
from fp8_megatron.quantization.recipe import Recipe
from fp8_megatron.quantization.scaled_tensor import ScaledTensor
from fp8_megatron.quantization.stats import snr_db
from tests.harness.main_grad import KeptGrads
from tests.harness.ranks import RankPool
from tests.harness.traffic import counted_traffic
from tests.mcore.parallel_layer import layer_config

SEQ, BATCH, IN, OUT = 16, 4, 128, 64
#: Half of the tokens and of each dimension is a whole number of blocks.
SIZES = {"tensorwise": (SEQ, BATCH, IN, OUT), "blockwise": (64, BATCH, 256, 512)}
Layer = Literal["column", "row"]
CPU = torch.device("cpu")
#: 28.5 and 24.5 dB (test_linear.py) less 1 dB: halves of fixed size ratios fill the binades less evenly.
E4M3_E4M3_DB, E5M2_E4M3_DB = 27.5, 23.5
#: Three roundings to BF16 (two parts and their sum) against one: 55.6 dB − 10·log10(4) ≈ 49.6, less 1 dB.
BF16_PARTIALS_DB = 48.5


def _problem(recipe: RecipeName = "tensorwise") -> dict[str, Tensor]:
    seq, batch, columns, rows = SIZES[recipe]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(seq, batch, columns, generator=generator)
    cotangent = torch.randn(seq, batch, rows, generator=generator) * 1e-3
    # Halves of different size, so that a scale taken from one shard alone would be another.
    x[: seq // 2] *= 5.0
    x[..., columns // 2 :] *= 3.0
    cotangent[..., rows // 2 :] *= 7.0
    return {
        "x": x.bfloat16(),
        "weight": torch.randn(rows, columns, generator=generator) * 0.02,
        "bias": (torch.randn(rows, generator=generator) * 0.1).bfloat16(),
        "cotangent": cotangent.bfloat16(),
    }


def _run_layer(
    kind: Layer, tp: int, sequence_parallel: bool, power_of_two: bool, recipe: RecipeName = "tensorwise"
) -> dict[str, Tensor]:
    """This rank's y, grad_input, grad_weight and grad_bias of the one problem."""
    p = _problem(recipe)
    _, _, columns, rows = SIZES[recipe]
    config = layer_config(columns, tp, sequence_parallel=sequence_parallel)
    parallel = ParallelConfig(tensor_model_parallel_size=tp, sequence_parallel=sequence_parallel)
    with runtime(CPU), initialized(parallel, 1, CPU) as topology:
        rank = topology.tp.rank()
        common = {
            "config": config,
            "init_method": torch.nn.init.zeros_,
            "bias": True,
            "skip_bias_add": False,
            "tp_group": topology.tp,
            "recipe": Recipe(recipe, power_of_two),
        }
        layer: torch.nn.Module
        if kind == "column":
            layer = FP8ColumnParallelLinear(columns, rows, gather_output=False, **common)
        else:
            layer = FP8RowParallelLinear(columns, rows, input_is_parallel=True, **common)

        def mine(whole: Tensor, dim: int | None) -> Tensor:
            return whole if dim is None else whole.chunk(tp, dim=dim)[rank].contiguous()

        sequence = 0 if sequence_parallel else None
        x_dim, weight_dim, y_dim = (sequence, 0, -1) if kind == "column" else (-1, 1, sequence)
        whole = ScaledTensor.quantize(p["weight"])
        layer.weight.set_storage(mine(whole.payload, weight_dim), whole.scale)
        layer.weight.main_grad = KeptGrads()
        with torch.no_grad():
            layer.bias.copy_(mine(p["bias"], 0 if kind == "column" else None))
        x = mine(p["x"], x_dim).requires_grad_()
        y, bias = layer(x)
        assert bias is None
        with counted_traffic() as traffic:
            y.backward(mine(p["cotangent"], y_dim))
        gathered_bytes = traffic["all_gather"]
        return {
            "gathered_bytes": torch.tensor(gathered_bytes),
            "y": y.detach(),
            "grad_input": x.grad,
            "grad_weight": layer.weight.main_grad.grads[0],
            "grad_bias": layer.bias.grad,
        }


def _whole(kind: Layer, sequence_parallel: bool, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The unsharded tensors from both ranks' parts."""
    sequence = 0 if sequence_parallel else None
    dims = {
        "column": {"y": -1, "grad_input": sequence, "grad_weight": 0, "grad_bias": 0},
        "row": {"y": sequence, "grad_input": -1, "grad_weight": 1, "grad_bias": None},
    }[kind]
    whole = {}
    for name, dim in dims.items():
        tensors = [part[name] for part in parts]
        if dim is not None:
            whole[name] = torch.cat(tensors, dim=dim)
        elif name == "grad_bias" and sequence_parallel:
            # Each rank saw its part of the sequence; `finalize_model_grads` sums such parameters.
            whole[name] = tensors[0].double() + tensors[1].double()
        else:
            assert torch.equal(tensors[0], tensors[1]), f"{name} differs between ranks"
            whole[name] = tensors[0]
    return whole


CASES = list(itertools.product(("column", "row"), (True, False)))


@pytest.mark.parametrize(("kind", "sequence_parallel"), CASES)
@pytest.mark.parametrize("power_of_two", [True, False])
def test_two_ranks_compute_the_unsharded_layer(
    ranks: RankPool, kind: Layer, sequence_parallel: bool, power_of_two: bool
) -> None:
    (single,) = ranks.run(_run_layer, kind, 1, False, power_of_two, num_ranks=1)
    parts = ranks.run(_run_layer, kind, 2, sequence_parallel, power_of_two, num_ranks=2)
    double = _whole(kind, sequence_parallel, parts)
    p = {name: value.double() for name, value in _problem().items()}
    x, g = p["x"].view(-1, IN), p["cotangent"].view(-1, OUT)
    truth = {
        "y": (x @ p["weight"].t() + p["bias"], E4M3_E4M3_DB),
        "grad_input": (g @ p["weight"], E5M2_E4M3_DB),
        "grad_weight": (g.t() @ x, E5M2_E4M3_DB),
        "grad_bias": (g.sum(dim=0), BF16_PARTIALS_DB),
    }
    for name, (exact, least_db) in truth.items():
        assert snr_db(double[name].view(exact.shape), exact) > least_db, name
        assert snr_db(single[name].view(exact.shape), exact) > least_db, name
        if power_of_two:
            assert snr_db(double[name], single[name]) > BF16_PARTIALS_DB, name


@pytest.mark.parametrize(("kind", "sequence_parallel"), CASES)
def test_blocks_do_not_see_how_they_are_shared(ranks: RankPool, kind: Layer, sequence_parallel: bool) -> None:
    """Blocks end where shards do, so that with any scales two ranks cast what one does."""
    (single,) = ranks.run(_run_layer, kind, 1, False, False, "blockwise", num_ranks=1)
    parts = ranks.run(_run_layer, kind, 2, sequence_parallel, False, "blockwise", num_ranks=2)
    double = _whole(kind, sequence_parallel, parts)
    p = {name: value.double() for name, value in _problem("blockwise").items()}
    x, g = (p[name].view(-1, p[name].shape[-1]) for name in ("x", "cotangent"))
    truth = {
        "y": (x @ p["weight"].t() + p["bias"], E4M3_E4M3_DB),
        "grad_input": (g @ p["weight"], E4M3_E4M3_DB),
        "grad_weight": (g.t() @ x, E4M3_E4M3_DB),
        "grad_bias": (g.sum(dim=0), BF16_PARTIALS_DB),
    }
    for name, (exact, least_db) in truth.items():
        assert snr_db(double[name].view(exact.shape), exact) > least_db, name
        assert snr_db(double[name], single[name]) > BF16_PARTIALS_DB, name


def assert_same_gemm(value: Tensor, expected: Tensor, *, atol: float) -> None:
    """The same payloads in the same GEMM: FP32 summation order, then at most one flip of a BF16 rounding."""
    torch.testing.assert_close(value, expected, rtol=2**-7, atol=atol)
    assert (value != expected).float().mean() < 0.01


def test_column_layer_gathers_fp8_with_one_scale(ranks: RankPool) -> None:
    """Under sequence parallelism with any scale the forward is the unsharded layer's: the amax is shared first."""
    (single,) = ranks.run(_run_layer, "column", 1, False, False, num_ranks=1)
    parts = ranks.run(_run_layer, "column", 2, True, False, num_ranks=2)
    y = torch.cat([part["y"] for part in parts], dim=-1)
    assert_same_gemm(y, single["y"], atol=1e-6)


def test_row_layer_gathers_its_gradient_in_fp8_with_one_scale(ranks: RankPool) -> None:
    """Under sequence parallelism with any scale grad_input is the unsharded layer's; a byte an element is sent."""
    (single,) = ranks.run(_run_layer, "row", 1, False, False, num_ranks=1)
    parts = ranks.run(_run_layer, "row", 2, True, False, num_ranks=2)
    grad_input = torch.cat([part["grad_input"] for part in parts], dim=-1)
    assert_same_gemm(grad_input, single["grad_input"], atol=1e-9)
    assert [part["gathered_bytes"].item() for part in parts] == [SEQ * BATCH * OUT // 2] * 2


def test_weight_keeps_megatron_attributes() -> None:
    config = TransformerConfig(num_layers=1, hidden_size=IN, num_attention_heads=4, params_dtype=torch.bfloat16)
    config.use_cpu_initialization, config.perform_initialization = True, True
    config.gradient_accumulation_fusion = False
    with runtime(CPU):
        layer = FP8ColumnParallelLinear(
            IN,
            OUT,
            config=config,
            init_method=torch.nn.init.normal_,
            recipe=Recipe("tensorwise", False),
            stride=2,
            tp_group=_GroupOfOne(),
        )
    assert isinstance(layer.weight, ScaledTensor) and isinstance(layer.weight, torch.nn.Parameter)
    assert layer.weight.tensor_model_parallel and layer.weight.partition_dim == 0
    assert layer.weight.partition_stride == 2 and layer.weight.allreduce
    assert 0.5 < layer.weight.dequantize().std() < 1.5  # initialised values are kept, quantised
    casts = "input=(E4M3 per tensor, current), weight=(E4M3 per tensor), grad_output=(E5M2 per tensor, current)"
    assert casts in repr(layer)


class _GroupOfOne:
    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0
