"""Where a rank's parameters lie in the whole model: megatron-core's checkpoint keys over the map `sharding.region`.

megatron-core stacks the layers of a model along a new first axis: ``decoder.layers.mlp.linear_fc2.weight`` is
[layers, hidden, ffn]. It names a layer's norm as if it were fused into the linear layer behind it. So its plain layers
and Transformer Engine's read each other's checkpoints. This project's layers do the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..models.keys import VOCABULARY_KEYS, key_and_layer
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


def placement_of(name: str, region: Region, num_layers: int) -> Placement:
    """Where a rank's parameter lies.

    Args:
        name: in the whole model (`mcore.initialization.named_parameters_of_model`).
        region: of the parameter in its layer.
    """
    key, index = key_and_layer(name)
    return Placement(key, region if index is None else replace(region, stacked=((index, num_layers), *region.stacked)))
