"""Where a rank's parameters lie in the whole model: megatron-core's checkpoint keys over the map `sharding.region`.

megatron-core stacks the layers of a model along a new first axis: ``decoder.layers.mlp.linear_fc2.weight`` is
[layers, hidden, ffn]. A key is stacked over the layers that have it (`registry.layers_of_key`). It names a layer's norm
as if it were fused into the linear layer behind it. So its plain layers and Transformer Engine's read each other's
checkpoints. This project's layers do the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..config.model import ModelConfig
from ..models.keys import VOCABULARY_KEYS, key_and_layer
from ..models.registry import layers_of_key
from ..sharding.region import Region


@dataclass(frozen=True)
class Placement:
    """A rank's part of one parameter in the tensor that a checkpoint holds under `key`."""

    key: str
    region: Region

    @property
    def has_vocabulary_rows(self) -> bool:
        """Whether the first axis is the padded vocabulary."""
        return self.key in VOCABULARY_KEYS


def placement_of(name: str, region: Region, model: ModelConfig) -> Placement:
    """Where a rank's parameter lies.

    Args:
        name: in the whole model (`mcore.initialization.named_parameters_of_model`).
        region: of the parameter in its layer.
    """
    key, layer = key_and_layer(name)
    if layer is None:
        return Placement(key, region)
    layers = layers_of_key(model, key)
    return Placement(key, replace(region, stacked=((layers.index(layer), len(layers)), *region.stacked)))
