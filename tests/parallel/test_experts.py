"""Every layout of experts trains as one rank does, under bf16 and under FP8.

The bounds are those of `test_layouts`. Beside what they allow for, a token whose two best experts are nearly equal may
go to the other one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from fp8_megatron.collectives.row_exchange import Rows, RowSum
from fp8_megatron.config.schema import Config, ParallelConfig, PrecisionConfig
from fp8_megatron.moe.layers.token_exchange import AllGather, AllToAll
from fp8_megatron.moe.layers.token_flight import Flight
from fp8_megatron.moe.megatron.layer import Experts, SharedExpert
from fp8_megatron.moe.megatron.router import Router
from fp8_megatron.quantization.stats import snr_db
from tests.harness.pairs import EVERY_PAIR, by_turns
from tests.harness.ranks import RankPool
from tests.harness.tiny_gpt import LLAMA_STYLE, TinyRun, random_batches, tiny_optimizer, train_tiny_gpt
from tests.parallel.layouts import assert_same_bits, run
from tests.parallel.test_context_parallel import config_of, gradients

MODEL = replace(
    LLAMA_STYLE,
    num_experts=8,
    moe_ffn_hidden_size=64,
    moe_shared_expert_intermediate_size=64,
    moe_shared_expert_gate=True,
    moe_router_dtype="fp32",
    moe_router_load_balancing_type=("aux_loss", "seq_aux_loss", "global_aux_loss"),
    moe_aux_loss_coeff=("1e-2", "1e-2", "1e-2"),
    moe_z_loss_coeff=1e-3,
)
SIGMOID = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_layer_freq": "[0,1]",
}
#: Biases, clamped gates, sinks, windows in every second layer and YaRN, as in gpt-oss.
GPT_OSS = {
    "disable_bias_linear": False,
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
    "swiglu": False,
    "quick_geglu": True,
    "glu_linear_offset": 1.0,
    "activation_func_clamp_value": 0.05,
    "softmax_type": "learnable",
    "window_size": "7,0",
    "window_attn_skip_freq": "2",
    "position_embedding_type": "yarn",
    "rotary_scaling_factor": 8.0,
    "yarn_correction_range_round_to_int": False,
}
MODELS = {
    "softmax": MODEL,
    "sigmoid": replace(MODEL, **SIGMOID),  # type: ignore[arg-type]
    "gpt_oss": replace(MODEL, **GPT_OSS),  # type: ignore[arg-type]
}
_TP2 = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
LAYOUTS = {
    "ep2": (2, ParallelConfig(expert_model_parallel_size=2)),
    "dp4": (4, ParallelConfig()),
    "ep2_dp2": (4, ParallelConfig(expert_model_parallel_size=2)),
    "ep4": (4, ParallelConfig(expert_model_parallel_size=4)),
    "pp2": (2, ParallelConfig(pipeline_model_parallel_size=2)),
    "cp2_ep2": (2, ParallelConfig(context_parallel_size=2, expert_model_parallel_size=2)),
    "tp2": (2, _TP2),
    "tp2_ep2": (4, replace(_TP2, expert_model_parallel_size=2)),
    "tp2_whole_experts": (2, replace(_TP2, expert_tensor_parallel_size=1)),
    "tp2_experts_of_ranks": (2, replace(_TP2, expert_tensor_parallel_size=1, expert_model_parallel_size=2)),
}
#: With tokens sent to their experts alone, where there are several parts of experts.
SENDING = {
    name: f"{name}_alltoall" for name, (_, parallel) in LAYOUTS.items() if parallel.expert_model_parallel_size > 1
}
for name, sending in SENDING.items():
    LAYOUTS[sending] = (LAYOUTS[name][0], replace(LAYOUTS[name][1], moe_token_dispatcher_type="alltoall"))
PRECISIONS = {
    "bf16": PrecisionConfig(precision="bf16"),
    "O2": PrecisionConfig(opt_level="O2"),
    "O3": PrecisionConfig(fp8_recipe="tensorwise"),
    "delayed": PrecisionConfig(fp8_recipe="delayed"),
    "blockwise": PrecisionConfig(fp8_recipe="blockwise"),
    "blockwise_O2": PrecisionConfig(fp8_recipe="blockwise", opt_level="O2"),
}
BATCHES = random_batches(1, 4).expand(4, -1, -1, -1)


Trained = Callable[..., TinyRun]


@pytest.fixture(scope="module")
def trained(ranks: RankPool) -> Trained:
    """The run of a model and a precision in a layout, a name of `LAYOUTS` or "one"; each is trained once."""
    known: dict[tuple[object, ...], TinyRun] = {}

    def train(model: str, precision: str, layout: str, **training: object) -> TinyRun:
        key = (model, precision, layout, *training.items())
        if key not in known:
            num_ranks, parallel = LAYOUTS.get(layout, (1, ParallelConfig()))
            known[key] = run(
                ranks,
                MODELS[model],
                PRECISIONS[precision],
                {1: "one", 2: "dp2", 4: "tp2_sp_pp2"}[num_ranks],
                random_batches(1, 4, seq_length=128).expand(4, -1, -1, -1) if model == "blocks" else BATCHES,
                parallel=parallel,
                optimizer=tiny_optimizer(lr=5e-4),
                **training,
            )
        return known[key]

    return train


#: Half of every size and of a micro-batch is a whole number of blocks.
MODELS["blocks"] = replace(
    MODEL,
    **dict.fromkeys(("hidden_size", "ffn_hidden_size", "moe_ffn_hidden_size"), 256),  # type: ignore[arg-type]
    moe_shared_expert_intermediate_size=256,
    num_query_groups=4,
    seq_length=128,
)
MODELS["dropping"] = replace(MODEL, moe_expert_capacity_factor=1.0)
#: Of each model two, between which layouts take turns.
CASES = [
    ("gpt_oss", "delayed"),
    ("gpt_oss", "bf16"),
    ("softmax", "bf16"),
    ("softmax", "O3"),
    ("sigmoid", "O2"),
    ("sigmoid", "delayed"),
    ("blocks", "blockwise"),
    ("blocks", "blockwise_O2"),
]
#: With biases experts are whole, and windows take whole sequences.
NOT_WITH_BIASES = {"tp2", *(name + sent for name in ("tp2_ep2", "cp2_ep2") for sent in ("", "_alltoall"))}


def meet(model: str, precision: str, layout: str) -> bool:
    """Whether a case runs in a layout: each model in half of the layouts, with one of its two precisions in half of
    those. With EVERY_PAIR=1 all."""
    cases = [case for case in CASES if case[0] == model]
    if model == "gpt_oss" and layout in NOT_WITH_BIASES:
        return False
    if not cases or (model, precision, layout) in USUAL:
        return True
    number = list(LAYOUTS).index(layout.removesuffix("_alltoall"))
    if list(MODELS).index(model) % 2 != number % 2 and not EVERY_PAIR:
        return False
    return (model, precision) in by_turns(cases, number // 2)


#: The others are slow.
USUAL = {
    ("gpt_oss", "bf16", "tp2_experts_of_ranks"),
    ("gpt_oss", "delayed", "ep2"),
    ("softmax", "bf16", "ep2"),
    ("softmax", "O3", "ep2"),
    ("sigmoid", "delayed", "tp2_experts_of_ranks_alltoall"),
    ("blocks", "blockwise", "ep2_alltoall"),
}


@pytest.mark.parametrize(
    ("model", "precision", "layout"),
    [
        pytest.param(*case, layout, marks=() if (*case, layout) in USUAL else pytest.mark.slow)
        for case in CASES
        for layout in LAYOUTS
        if meet(*case, layout)
    ],
)
def test_a_layout_trains_as_one_rank(trained: Trained, model: str, precision: str, layout: str) -> None:
    single = trained(model, precision, "one")
    shared = trained(model, precision, layout)
    is_16_bit = precision == "bf16"
    first, later = (1e-3, 5e-3) if is_16_bit else (3e-3, 1.5e-2)
    assert single.losses[-1] < single.losses[0] - 0.1
    assert shared.losses[0] == pytest.approx(single.losses[0], abs=first)
    assert shared.losses == pytest.approx(single.losses, abs=later)
    assert shared.grad_norms == pytest.approx(single.grad_norms, rel=0.03 if is_16_bit else 0.25)
    for name, weight in single.weights.items():
        if weight.ndim > 1 and not name.endswith(".bias"):
            assert snr_db(shared.weights[name], weight.double()) > (17.0 if is_16_bit else 7.0), name


@pytest.mark.parametrize(
    ("model", "precision", "name"),
    [
        pytest.param(*case, name, marks=() if (*case, name) == ("softmax", "O3", "ep4") else pytest.mark.slow)
        for case in [*CASES, ("dropping", "bf16")]
        for name in SENDING
        if meet(*case, name)
        if name != "tp2_ep2"  # there a token has four summands, and gloo adds up in an order of its own
    ],
)
def test_tokens_sent_to_their_experts_alone_train_bit_for_bit(
    trained: Trained, model: str, precision: str, name: str
) -> None:
    """A token has two experts, so two summands at most."""
    assert_same_bits(trained(model, precision, SENDING[name]), trained(model, precision, name))


@pytest.mark.parametrize(
    ("model", "precision"), [("softmax", "bf16"), pytest.param("blocks", "blockwise", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("layout", ["ep2_dp2", "ep4", "ep4_alltoall"])
def test_a_first_loss_has_the_same_bits_under_any_expert_parallel_size(
    trained: Trained, model: str, precision: str, layout: str
) -> None:
    """In 16 bits and in blocks no scale is shared by the tokens of ranks, and a token's sum has two terms. Later
    weights differ: a weight gradient sums the tokens of other ranks in one GEMM, or by replicas."""
    assert trained(model, precision, layout).losses[0] == trained(model, precision, "dp4").losses[0]


@pytest.mark.parametrize("layout", ["ep2", pytest.param("tp2_experts_of_ranks", marks=pytest.mark.slow)])
def test_gradients_of_biases_and_sinks_are_one_ranks(ranks: RankPool, layout: str) -> None:
    """A bias's gradient sums what its weight's does, so rounding and tokens that go elsewhere cost it as many dB; 6 are
    for the few elements of a router's. Sinks have the noise of attention's output, 20 dB here, less 6."""
    num_ranks, parallel = LAYOUTS[layout]
    model = replace(MODELS["gpt_oss"], moe_router_load_balancing_type=("none",), moe_z_loss_coeff=None)
    single = ranks.run(gradients, config_of(model, ParallelConfig(), "bf16"), num_ranks=1)[0][2]
    shared = ranks.run(gradients, config_of(model, parallel, "bf16"), num_ranks=num_ranks)[0][2]
    found = {name: snr_db(shared[name], value) for name, value in single.items()}
    biases = [name for name in found if name.endswith((".router.bias", "_fc1.bias", "_fc2.bias"))]
    sinks = [name for name in found if name.endswith("softmax_offset")]
    assert (len(biases), len(sinks)) == (6, 2)
    assert all(found[name] > 14.0 for name in sinks), found
    for name in biases:
        of_weight = min(found[name.replace(".bias", ".weight")], 50.0)
        assert of_weight > 12.0 and found[name] > of_weight - 6.0, (name, found)


def order_of_a_step(config: Config, tokens: Tensor) -> list[str]:
    """What one layer with experts does in a step of a micro-batch a rank, in the order of its launches."""
    events: list[str] = []

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **settings: Any) -> Any:
            events.append(name)
            result = function(*args, **settings)
            if name == "shared":
                result.register_hook(lambda _: events.append("shared backward"))
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        for cls, method, name in (
            (Router, "forward", "router"),
            (SharedExpert, "forward", "shared"),
            (AllGather, "send", "send"),
            (AllToAll, "send", "send"),
            (AllGather, "sum", "sum"),
            (AllToAll, "sum", "sum"),
            (Rows, "wait", "rows"),
            (RowSum, "wait", "sums"),
        ):
            patch.setattr(cls, method, noting(name, getattr(cls, method)))
        train_tiny_gpt(config, tokens)
    return events


@pytest.mark.parametrize(
    ("precision", "layout"),
    [("bf16", "ep2"), ("delayed", "ep2"), ("bf16", "ep2_alltoall"), ("delayed", "ep2_alltoall")],
)
def test_the_router_and_the_shared_expert_run_while_tokens_travel(ranks: RankPool, precision: str, layout: str) -> None:
    num_ranks, parallel = LAYOUTS[layout]
    config = config_of(replace(MODEL, num_layers=1), parallel, "bf16")
    config = replace(config, precision=PRECISIONS[precision])
    first, *others = ranks.run(order_of_a_step, config, random_batches(1, 2), num_ranks=num_ranks)
    assert all(other == first for other in others)
    start = ["router", "send"] if "alltoall" in layout else ["send", "router"]
    forward = [*start, "rows", "sum", "shared", "sums"]
    assert first[: len(forward)] == forward
    backward = ["send", "shared backward", "rows"]
    assert first[len(forward) : len(forward) + len(backward)] == backward
    assert first[len(forward) + len(backward) :].count("sum") == 1


def train_without_overlap(config: Config, tokens: Tensor) -> TinyRun:
    """As `train_tiny_gpt`, where each exchange starts where its result is read."""
    take = Flight.take

    def stay(experts: Experts, x: Tensor, routing_map: Tensor | None = None) -> Flight | None:
        if experts.ranks is None:
            return None
        if routing_map is None:
            return Flight(AllGather(experts.ranks, experts.num_parts))
        return Flight(AllToAll(routing_map, experts.ranks, experts.num_parts, experts.top_k))

    def only_sums(flight: Flight, name: str) -> Any:
        return take(flight, name) if name == "output" else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Experts, "depart", stay)
        patch.setattr(Flight, "take", only_sums)
        return train_tiny_gpt(config, tokens)


@pytest.mark.parametrize(
    ("model", "precision", "layout"),
    [
        ("softmax", "bf16", "ep2"),
        ("softmax", "delayed", "ep2"),
        pytest.param("sigmoid", "O3", "ep2_alltoall", marks=pytest.mark.slow),
        pytest.param("blocks", "blockwise", "ep2", marks=pytest.mark.slow),
        pytest.param("gpt_oss", "bf16", "ep2_alltoall", marks=pytest.mark.slow),
        pytest.param("sigmoid", "O2", "tp2_experts_of_ranks", marks=pytest.mark.slow),
    ],
)
def test_overlap_has_the_bits_of_waiting_at_once(
    ranks: RankPool, trained: Trained, model: str, precision: str, layout: str
) -> None:
    num_ranks, parallel = LAYOUTS[layout]
    batches = random_batches(1, 4, seq_length=128).expand(4, -1, -1, -1) if model == "blocks" else BATCHES
    settings = {"parallel": parallel, "optimizer": tiny_optimizer(lr=5e-4), "train": train_without_overlap}
    base = {1: "one", 2: "dp2", 4: "tp2_sp_pp2"}[num_ranks]
    waiting = run(ranks, MODELS[model], PRECISIONS[precision], base, batches, **settings)
    assert_same_bits(trained(model, precision, layout), waiting)


RECOMPUTED = [
    ("gpt_oss", "delayed", "ep2", ("moe", "core_attn")),
    ("gpt_oss", "bf16", "one", ("moe",)),
    ("softmax", "O3", "one", ("moe",)),
    ("sigmoid", "delayed", "ep2_alltoall", ("moe", "mlp")),
    ("softmax", "bf16", "one", ("moe",)),
    ("softmax", "bf16", "ep2_alltoall", ("moe_act", "shared_experts")),
    ("softmax", "delayed", "tp2", ("shared_experts",)),
    ("blocks", "blockwise", "ep2", ("moe",)),
]


@pytest.mark.parametrize(("model", "precision", "layout", "modules"), RECOMPUTED)
def test_recomputed_experts_train_bit_for_bit(
    trained: Trained, model: str, precision: str, layout: str, modules: tuple[str, ...]
) -> None:
    again = trained(model, precision, layout, recompute_granularity="selective", recompute_modules=modules)
    assert_same_bits(again, trained(model, precision, layout))


def test_kept_transposes_of_a_shared_expert_change_no_bit(ranks: RankPool, trained: Trained) -> None:
    kept = replace(PRECISIONS["O3"], keep_fp8_transpose_cache=2)
    found = run(ranks, MODEL, kept, "one", BATCHES, optimizer=tiny_optimizer(lr=5e-4))
    assert_same_bits(found, trained("softmax", "O3", "one"))


@pytest.mark.parametrize(("precision", "layout"), [("bf16", "ep2"), ("O3", "ep2_alltoall"), ("O3", "tp2")])
def test_ranks_that_drop_tokens_train(trained: Trained, precision: str, layout: str) -> None:
    """Under tensor parallelism each rank drops of its own part, so other tokens."""
    single = trained("dropping", precision, "one")
    shared = trained("dropping", precision, layout)
    assert single.losses != trained("softmax", precision, "one").losses
    assert single.losses[-1] < single.losses[0] - 0.1
    assert shared.losses == pytest.approx(single.losses, abs=5e-3 if precision == "bf16" else 1.5e-2)


def test_the_loss_over_the_global_batch_is_as_strong_on_two_ranks(ranks: RankPool) -> None:
    """Its gradient is nearly all that there is, and one rank has the same batch at once."""
    model = replace(MODEL, moe_router_load_balancing_type=("global_aux_loss",), moe_aux_loss_coeff=("1000",))
    both = random_batches(1, 1, micro_batch_size=4)
    single = run(ranks, model, PRECISIONS["bf16"], "one", both)
    shared = run(ranks, model, PRECISIONS["bf16"], "dp2", both.unflatten(2, (2, 2)).flatten(1, 2))
    assert shared.grad_norms == pytest.approx(single.grad_norms, rel=0.03)
