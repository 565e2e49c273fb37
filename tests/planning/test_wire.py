"""Predicted bytes on the wire are those that a step sends."""

from __future__ import annotations

import pytest
import torch

from fp8_megatron.config.schema import Config, PrecisionConfig
from fp8_megatron.mcore.runtime import runtime
from fp8_megatron.mcore.topology import initialized
from fp8_megatron.planning.wire import predict_wire_bytes
from tests.harness.ranks import RankPool
from tests.harness.tiny_gpt import VOCAB_SIZE, build_tiny_gpt, forward_backward, random_batches, tiny_config
from tests.harness.traffic import counted_traffic

PRECISIONS = {
    "O3": PrecisionConfig(),
    "O3-local": PrecisionConfig(grad_accumulation="local"),
    "O1": PrecisionConfig(opt_level="O1"),
    "bf16": PrecisionConfig(precision="bf16"),
}


def _sent(config: Config, num_micro_batches: int) -> dict[str, int]:
    """What this rank sends in one step."""
    device = torch.device("cpu")
    batches = random_batches(1, num_micro_batches)
    with runtime(device), initialized(config.parallel, config.model.num_layers, device) as topology:
        gpt = build_tiny_gpt(config, topology, device, num_micro_batches)
        for chunk in gpt.model:
            chunk.wait_for_weights()
        with counted_traffic() as traffic:
            forward_backward(gpt, config, batches[0])
            gpt.optimizer.step()
            for chunk in gpt.model:
                chunk.wait_for_weights()
    return dict(traffic)


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_prediction_is_what_a_step_sends(ranks: RankPool, precision: str, num_micro_batches: int) -> None:
    """Within 2%: spaces are padded to whole blocks and chunks, and the smallest hold some hundred elements."""
    world_size = 2
    config = tiny_config(precision=PRECISIONS[precision])
    training = {"micro_batch_size": 2, "global_batch_size": 2 * num_micro_batches * world_size}
    config = Config(**{**vars(config), "training": type(config.training)(**{**vars(config.training), **training})})
    predicted = predict_wire_bytes(config, VOCAB_SIZE, world_size=world_size)
    for sent in ranks.run(_sent, config, num_micro_batches, num_ranks=world_size):
        assert sent["reduce_scatter"] == pytest.approx(predicted.gradients, rel=0.02)
        assert sent["all_gather"] == pytest.approx(predicted.weights, rel=0.02)
