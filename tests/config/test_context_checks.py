"""Context parallelism: what is read, and what is refused."""

from __future__ import annotations

import pytest

from fp8_megatron.config.checks import ConfigError, check_config
from fp8_megatron.config.io import parse_command_line, parse_config
from fp8_megatron.reporting.flops import layer_flops
from fp8_megatron.training.graph_choice import choose_graph

LLAMA = "--mock-data --vocab-size 512 --attention-dropout 0 --hidden-dropout 0 "
CP4 = LLAMA + "--context-parallel-size 4 "


def problems(flags: str, world_size: int = 8) -> list[str]:
    try:
        check_config(parse_config(flags.split()), world_size, on_this_machine=False)
    except ConfigError as error:
        return str(error).splitlines()
    return []


@pytest.mark.parametrize(
    "flags",
    [
        CP4,
        CP4 + "--cp-comm-type all_gather --bf16",
        CP4 + "--tensor-model-parallel-size 2 --sequence-parallel",
        CP4 + "--pipeline-model-parallel-size 2 --calculate-per-token-loss",
        LLAMA + "--cp-comm-type p2p",
        CP4 + "--cp-comm-type a2a --window-size 5,0",
        CP4 + "--cp-comm-type a2a --tensor-model-parallel-size 2 --num-attention-heads 16",
        CP4 + "--cp-comm-type a2a --attention-backend cudnn --deterministic-mode",
        CP4 + "--cp-comm-type all_gather --fp8-context-communication",
        CP4 + "--cp-comm-type a2a --fp8-recipe delayed --fp8-dot-product-attention --kv-channels 128",
    ],
)
def test_what_works_passes(flags: str) -> None:
    assert problems(flags) == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (CP4 + "--bf16 --seq-length 1028", "seq_length(1028) % (2 × context_parallel_size(4)) = 4; choose a"),
        (CP4 + "--tensor-model-parallel-size 8 --sequence-parallel --seq-length 1040", "sequence_parallel: seq_lengt"),
        (CP4 + "--precision te", "context_parallel_size(4) is for this project's attention, not Transformer Engine's"),
        (CP4 + "--fp8-recipe delayed --fp8-dot-product-attention --kv-channels 128", "context_parallel_size(4) runs"),
        (CP4 + "--fp8-context-communication", "fp8_context_communication casts what all_gather sends, not"),
        (CP4 + "--cp-comm-type a2a --fp8-context-communication", "not cp_comm_type(a2a); choose --cp-comm-type"),
        (CP4 + "--bf16 --cp-comm-type all_gather --fp8-context-communication", "fp8_context_communication is for"),
        (CP4 + "--window-size 5,0", "context_parallel_size(4) does not support windows; drop window_size(5,0), or"),
        (CP4 + "--attention-dropout 0.1", "context_parallel_size(4) does not support attention dropout; give"),
        (CP4 + "--kv-channels 36 --bf16", "whose heads have a multiple of 8 columns up to 256, not 36; choose another"),
        (CP4 + "--kv-channels 256 --attention-backend cudnn", "runs FlashAttention's kernels for heads of 256"),
        (CP4 + "--deterministic-mode --attention-backend cudnn", "context_parallel_size(4) has no"),
        (CP4 + "--cp-comm-type a2a --group-query-attention --num-query-groups 2", "cp_comm_type(a2a): num_query_grou"),
        (
            CP4 + "--cp-comm-type a2a --tensor-model-parallel-size 2 --num-attention-heads 4 --kv-channels 64",
            "cp_comm_type(a2a): num_attention_heads(4) / tensor_model_parallel_size(2) % context_parallel_size(4) = 2",
        ),
        (CP4 + "--seq-length 24 --micro-batch-size 1", "FP8 GEMM: seq_length(24) × micro_batch_size(1) /"),
        (CP4 + "--tensor-model-parallel-size 4", "tensor_model_parallel_size(4) × context_parallel_size(4) ×"),
    ],
)
def test_what_cannot_work_is_one_line(flags: str, said: str) -> None:
    (problem,) = problems(flags, 32 if "size 8" in flags else 8)
    assert said in problem


def test_documents_need_whole_sequences() -> None:
    text = "--data-path a --vocab-size 512 --tokenizer-type NullTokenizer --reset-attention-mask --attention-dropout 0 "
    (problem,) = problems(text + "--context-parallel-size 4")
    assert "context_parallel_size(4) cannot keep documents apart in attention; drop reset_attention_mask" in problem
    assert problems(text + "--context-parallel-size 4 --cp-comm-type a2a") == []


def test_other_exchanges_are_refused_or_translated() -> None:
    with pytest.raises(ConfigError, match="--cp-comm-type 'ring' is not one of p2p, all_gather, a2a"):
        check_config(parse_config([*CP4.split(), "--cp-comm-type", "ring"]), 8)
    two_rings = "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"
    line = parse_command_line([*CP4.split(), *two_rings.split()])
    assert line.config.parallel.cp_comm_type == "p2p"
    assert "--cp-comm-type a2a+p2p is --cp-comm-type p2p here" in line.notes


def test_a_batch_is_of_data_parallel_ranks() -> None:
    """8 ranks with 4 a sequence read 2 samples a micro-batch, and have 8 copies of the weights between them."""
    config = parse_config((CP4 + "--micro-batch-size 1 --global-batch-size 8").split())
    assert config.data_parallel_size(8) == 2 and config.num_replicas(8) == 8
    assert config.num_micro_batches(8) == 4
    assert config.tokens_per_micro_batch == config.model.seq_length // 4


def test_steps_are_recorded() -> None:
    assert problems(CP4 + "--cuda-graph-impl local", 8) == []
    assert choose_graph(parse_config(CP4.split()), has_gpu=True, world_size=4, node_size=4).records


def test_a_rank_has_its_share_of_a_layers_work() -> None:
    whole, share = (parse_config(flags.split()) for flags in (LLAMA, CP4))
    assert layer_flops(share) == layer_flops(whole) / 4
