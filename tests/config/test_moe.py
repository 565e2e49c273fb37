"""Flags of experts: what is read, what is refused with one line, and what megatron-core is told."""

from __future__ import annotations

import pytest
import torch

from fp8_megatron.assembly import parts_of
from fp8_megatron.config.checks import ConfigError, check_config, cuda_graph_problems
from fp8_megatron.config.io import parse_command_line, parse_config
from fp8_megatron.config.learning_rate import schedule_notes
from fp8_megatron.config.schema import Config
from fp8_megatron.mcore.transformer_config import transformer_config

MODEL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2 --swiglu "
    "--disable-bias-linear --mock-data --vocab-size 1024 --ffn-hidden-size 512 --num-experts 8"
)


def config_of(flags: str) -> Config:
    return parse_config(f"{MODEL} {flags}".split())


@pytest.mark.parametrize(
    ("pattern", "layers"),
    [("1", (0, 1, 2, 3)), ("2", (0, 2)), ("3", (0, 3)), ("([0]*1+[1]*3)", (1, 2, 3)), ("[0,1,1,0]", (1, 2))],
)
def test_layers_with_experts(pattern: str, layers: tuple[int, ...]) -> None:
    """N is the first of every N layers, as in megatron-core."""
    config = config_of(f"--moe-layer-freq {pattern}")
    check_config(config, 1)
    assert config.model.expert_layers == layers


def test_megatron_core_has_the_same_experts() -> None:
    config = config_of(
        "--moe-layer-freq [0]*1+[1]*3 --moe-ffn-hidden-size 128 --moe-router-topk 4 "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-num-groups 4 "
        "--moe-router-group-topk 2 --moe-router-dtype fp32 "
        "--moe-router-topk-scaling-factor 2.5 --moe-router-load-balancing-type seq_aux_loss global_aux_loss "
        "--moe-aux-loss-coeff 1e-4 1e-2 --moe-z-loss-coeff 1e-3 --moe-shared-expert-intermediate-size 64"
    )
    check_config(config, 1)
    settings = transformer_config(config, torch.device("cpu"), parts_of(config).settings)
    assert (settings.num_moe_experts, settings.moe_layer_freq, settings.moe_ffn_hidden_size) == (8, [0, 1, 1, 1], 128)
    assert (settings.moe_router_topk, settings.moe_router_score_function) == (4, "sigmoid")
    assert settings.moe_router_enable_expert_bias and settings.moe_router_dtype == "fp32"
    assert (settings.moe_router_num_groups, settings.moe_router_group_topk) == (4, 2)
    assert (settings.moe_router_topk_scaling_factor, settings.moe_z_loss_coeff) == (2.5, 1e-3)
    assert settings.moe_router_load_balancing_type == ["seq_aux_loss", "global_aux_loss"]
    assert settings.moe_aux_loss_coeff == [1e-4, 1e-2]
    assert settings.moe_shared_expert_intermediate_size == 64


@pytest.mark.parametrize(
    ("flags", "kind", "factor"),
    [
        ("", "aux_loss", 0.0),
        ("--moe-aux-loss-coeff 1e-2", "aux_loss", 0.01),
        ("--moe-router-load-balancing-type sinkhorn --moe-router-topk 1", "sinkhorn", 0.0),
        ("--moe-router-load-balancing-type none", "none", 0.0),
        ("--moe-router-load-balancing-type none --moe-aux-loss-coeff 0", "none", 0.0),
    ],
)
def test_one_loss_is_no_list(flags: str, kind: str, factor: float) -> None:
    config = config_of(flags)
    check_config(config, 1)
    settings = transformer_config(config, torch.device("cpu"), parts_of(config).settings)
    assert (settings.moe_router_load_balancing_type, settings.moe_aux_loss_coeff) == (kind, factor)
    assert settings.moe_ffn_hidden_size == 512


def test_switches_of_speed_have_nothing_to_do() -> None:
    idle = "--moe-grouped-gemm --moe-permute-fusion --moe-router-fusion --moe-shared-expert-overlap"
    line = parse_command_line(f"{MODEL} {idle}".split())
    assert line.config == config_of("") and f"no effect here: {idle} " in line.notes[0]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--moe-layer-freq [1]*3", "moe_layer_freq([1]*3) is neither a number of layers nor a list of 0 and 1 for num"),
        ("--moe-layer-freq 0", "moe_layer_freq(0) is neither"),
        (
            "--moe-layer-freq [0]*4",
            "leaves no layer with experts; give --moe-layer-freq 1, or a list such as [0]*1+[1]*3",
        ),
        (
            "--no-disable-bias-linear --moe-shared-expert-intermediate-size 64",
            "moe_shared_expert_intermediate_size(64): a shared expert has no biases, as in Megatron; give --disable-bi",
        ),
        ("--num-experts 32768", "num_experts(32768) is out of range; give --num-experts a whole number of at least 1"),
        ("--moe-router-topk 9", "moe_router_topk(9) > num_experts(8)"),
        ("--moe-router-topk 1", "moe_router_topk(1): the softmax of one score is 1"),
        ("--moe-router-enable-expert-bias", "needs --moe-router-score-function sigmoid"),
        ("--moe-router-num-groups 4", "moe_router_num_groups(4) and moe_router_group_topk(None) belong together"),
        ("--moe-router-num-groups 3 --moe-router-group-topk 1", "num_experts(8) % moe_router_num_groups(3) = 2"),
        ("--moe-router-num-groups 4 --moe-router-group-topk 5", "moe_router_group_topk(5) > moe_router_num_groups(4)"),
        ("--moe-router-num-groups 8 --moe-router-group-topk 1", "moe_router_topk(2) experts do not come from"),
        (
            "--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 1",
            "coeff(1) has no effect with moe_router_load_balancing_type(sinkhorn), which has no loss; give 0",
        ),
        (
            "--moe-router-load-balancing-type none --moe-aux-loss-coeff 1e-2",
            "coeff(1e-2) has no effect with moe_router_load_balancing_type(none), which has no loss; give 0",
        ),
        (
            "--moe-router-load-balancing-type sinkhorn --moe-router-pre-softmax",
            "load_balancing_type(sinkhorn) does not read moe_router_pre_softmax; drop one of them",
        ),
        (
            "--moe-router-load-balancing-type sinkhorn --moe-expert-capacity-factor 1.0",
            "load_balancing_type(sinkhorn) does not read moe_expert_capacity_factor",
        ),
        ("--moe-router-load-balancing-type quantile_balancing", "there is no quantile balancing"),
        (
            "--moe-router-load-balancing-type aux",
            "load_balancing_type(aux): there is no such loss; choose from aux_loss",
        ),
        (
            "--moe-router-load-balancing-type aux_loss none --moe-aux-loss-coeff 1 0",
            "name losses once, sinkhorn or none alone",
        ),
        ("--moe-aux-loss-coeff 1 2", "moe_aux_loss_coeff has 2 factors for 1 losses"),
        ("--moe-aux-loss-coeff 1e31", "moe_aux_loss_coeff(1e31) are not factors of at least 0 and up to 1e+30"),
        ("--moe-aux-loss-coeff much", "moe_aux_loss_coeff(much) are not factors"),
        ("--precision te", "experts are in FP8 or BF16, not te"),
        ("--fp8-recipe mxfp8 --moe-ffn-hidden-size 32", "num_experts with fp8_recipe(mxfp8)"),
        ("--fp8-fallback-recipe mxfp8 --fp8-fallback-iter 9", "num_experts with fp8_fallback_recipe(mxfp8)"),
        ("--fp8-recipe blockwise --moe-ffn-hidden-size 64", "moe_ffn_hidden_size(64) is not a multiple of 128"),
        (
            "--recompute-granularity selective --recompute-modules mlp",
            "recompute_modules(mlp): every layer has experts; choose moe",
        ),
        (
            "--recompute-granularity selective --recompute-modules shared_experts",
            "recompute_modules(shared_experts): there is none",
        ),
        ("--hidden-size 512 --moe-ffn-hidden-size 24", "moe_ffn_hidden_size(24) is not a multiple of 16"),
        (
            "--moe-ffn-hidden-size 8 --bf16",
            "= 2048 is not a multiple of 4096, in which an expert's weights are stored; choose a multiple of 16 (16)",
        ),
    ],
)
def test_what_cannot_work_is_one_line_with_its_values(flags: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_config(config_of(flags), 1, on_this_machine=False)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_experts_with_biases_are_whole_and_not_made_of_mlps() -> None:
    with pytest.raises(ConfigError) as error:
        check_config(config_of("--no-disable-bias-linear --tensor-model-parallel-size 2 --sequence-parallel"), 2)
    assert str(error.value) == (
        "expert_tensor_parallel_size(2): experts with biases are whole, as in Megatron; give "
        "--expert-tensor-parallel-size 1, or --disable-bias-linear"
    )
    with pytest.raises(
        ConfigError, match="moe_use_upcycling: experts with biases are not made of MLPs; give --disable"
    ):
        check_config(config_of("--no-disable-bias-linear --moe-use-upcycling --load x"), 1)


def test_gradients_of_experts_on_several_ranks_are_not_released() -> None:
    """Where nothing else has replicas: tensor-parallel ranks with whole experts."""
    ranks = "--tensor-model-parallel-size 4 --sequence-parallel --expert-tensor-parallel-size 1"
    flags = f"{ranks} --release-gradients --clip-grad 0 --expert-model-parallel-size"
    with pytest.raises(ConfigError) as error:
        check_config(config_of(f"{flags} 2"), 4, on_this_machine=False)
    assert str(error.value) == (
        "release_gradients updates weights during backward, but each expert is on 2 ranks, whose gradients are reduced "
        "first; drop it, or choose an expert_model_parallel_size of 4"
    )
    check_config(config_of(f"{flags} 4"), 4, on_this_machine=False)


def test_ranks_that_hold_no_whole_copy_of_the_experts() -> None:
    with pytest.raises(ConfigError) as error:
        check_config(config_of("--expert-model-parallel-size 4 --global-batch-size 4"), 2)
    assert "expert_tensor_parallel_size(1) × " in str(error.value)
    assert "expert_model_parallel_size(4) × pipeline_model_parallel_size(1) = 4 does not divide WORLD_SIZE(2)" in str(
        error.value
    )


OVERLAP = "--expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--pipeline-model-parallel-size 2", "is for one stage, pipeline_model_parallel_size is 2; drop one"),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", "sets random states back"),
        ("--cpu-offloading-num-layers 1", "cpu_offloading_num_layers(1) copies the layers of one micro-batch at a"),
    ],
)
def test_what_micro_batches_cannot_overlap_with(flags: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_config(config_of(f"{OVERLAP} --global-batch-size 16 {flags}"), 4, on_this_machine=False)
    assert "overlap_moe_expert_parallel_comm" in str(error.value) and said in str(error.value)


@pytest.mark.parametrize(
    ("flags", "mode"),
    [
        (MODEL, "where each rank has all experts; drop it or raise --expert-model-parallel-size"),
        ("--mock-data --vocab-size 1024", "without num_experts; drop it or give --num-experts"),
    ],
)
def test_without_an_exchange_nothing_overlaps(flags: str, mode: str) -> None:
    line = parse_command_line(f"{flags} --overlap-moe-expert-parallel-comm".split())
    assert not line.config.parallel.overlap_moe_expert_parallel_comm
    assert any(f"overlap_moe_expert_parallel_comm(True) has no effect {mode}" in note for note in line.notes)


def test_one_micro_batch_a_step_overlaps_with_nothing() -> None:
    notes = {
        batch: [*schedule_notes(config_of(f"{OVERLAP} --micro-batch-size 2 --global-batch-size {batch}"), 2)]
        for batch in (4, 8)
    }
    assert not notes[8]
    assert notes[4][0].startswith("overlap_moe_expert_parallel_comm has no effect with one micro-batch a step; drop it")


@pytest.mark.parametrize("kind", ["allgather", "alltoall", "flex"])
@pytest.mark.parametrize("size", [1, 2])
def test_tokens_sent_to_their_experts_alone_are_not_recorded(kind: str, size: int) -> None:
    """With one part of experts every rank needs all tokens."""
    config = config_of(f"--expert-model-parallel-size {size} --moe-token-dispatcher-type {kind}")
    gathers = kind == "allgather" or size == 1
    dispatcher = transformer_config(config, torch.device("cpu"), parts_of(config).settings).moe_token_dispatcher_type
    assert dispatcher == ("allgather" if gathers else "alltoall")
    said = f"cuda_graph_impl(auto) cannot record moe_token_dispatcher_type({kind}), where the host waits for the"
    assert [problem.startswith(said) for problem in cuda_graph_problems(config)] == [True] * (not gathers)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--expert-model-parallel-size 2", "expert_model_parallel_size(2) has no effect without num_experts"),
        *(
            (f"--recompute-activations --recompute-modules {module} core_attn", f"modules({module}) is for experts")
            for module in ("moe", "moe_act", "shared_experts")
        ),
    ],
)
def test_without_experts_their_flags_are_errors(flags: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_config(parse_config(f"--mock-data --vocab-size 1024 {flags}".split()), 1)
    assert said in str(error.value)


def test_experts_of_stages_that_are_neighbours_take_all_ranks_of_a_replica() -> None:
    flags = "--use-tp-pp-dp-mapping --attention-dropout 0 --global-batch-size 16 --pipeline-model-parallel-size"
    says = "expert_tensor_parallel_size(1) × expert_model_parallel_size({0}) = {0} is not tensor_model_parallel_size × "
    says += "context_parallel_size = {1}; give --expert-model-parallel-size {1}, or drop --use-tp-pp-dp-mapping"
    for stages, experts, context in ((2, 4, 1), (2, 1, 2)):
        layout = f"{flags} {stages} --expert-model-parallel-size {experts} --context-parallel-size {context}"
        with pytest.raises(ConfigError) as error:
            check_config(config_of(layout), 8, on_this_machine=False)
        assert str(error.value) == f"use_tp_pp_dp_mapping: {says.format(experts, context)}"
    for stages, experts, context in ((2, 1, 1), (2, 2, 2), (1, 1, 2)):  # of one stage, the order is the same
        layout = f"{flags} {stages} --expert-model-parallel-size {experts} --context-parallel-size {context}"
        check_config(config_of(layout), 8, on_this_machine=False)


def test_the_width_of_mlps_counts_where_a_layer_has_one() -> None:
    flags = "--fp8-recipe blockwise --hidden-size 256 --moe-ffn-hidden-size 256 --ffn-hidden-size 1344"
    check_config(config_of(flags), 1, on_this_machine=False)
    with pytest.raises(ConfigError, match=r"ffn_hidden_size\(1344\) is not a multiple of 128"):
        check_config(config_of(f"{flags} --moe-layer-freq 2"), 1, on_this_machine=False)
