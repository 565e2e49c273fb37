"""What pipeline stages send each other, in FP8: activations forwards, and their gradients backwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import get_model_config
from torch import Tensor

from ..collectives.packed import packed, packed_bytes, unpacked
from ..formats import E4M3
from .topology import Topology

#: Of activations and of gradients. A block's own scale brings both into E4M3's range.
_ACTIVATIONS = _GRADIENTS = E4M3


class FP8P2PCommunicator(P2PCommunicator):
    """megatron-core's messages between neighbouring stages, with half the bytes.

    A tensor and its scales are one message of bytes (`collectives.packed`). megatron-core carries it as BF16 numbers,
    which nothing computes with. Before it returns, the current stream (on a CPU: the host) waits for all messages:
    what was received may be decoded, and the memory of what was sent is free.
    """

    def _communicate(
        self,
        *,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> tuple[Tensor | None, Tensor | None, Any]:
        assert wait_on_reqs, "what is on its way cannot be decoded"
        length = None if tensor_shape is None else [packed_bytes(_numel(tensor_shape)) // 2]
        from_previous, from_next, requests = super()._communicate(
            tensor_send_next=_message(tensor_send_next, _ACTIVATIONS),
            tensor_send_prev=_message(tensor_send_prev, _GRADIENTS),
            recv_prev=recv_prev,
            recv_next=recv_next,
            tensor_shape=length,
        )
        return (
            _received(from_previous, tensor_shape, _ACTIVATIONS),
            _received(from_next, tensor_shape, _GRADIENTS),
            requests,
        )


def schedule_arguments(model: Sequence[torch.nn.Module], topology: Topology, *, in_fp8: bool) -> dict[str, Any]:
    """What to give megatron-core's schedules so that stages send FP8; nothing unless `in_fp8`."""
    if not in_fp8:
        return {}
    communicator = FP8P2PCommunicator(topology.pp, get_model_config(model[0]))
    return {"p2p_communicator": communicator, "pg_collection": topology.groups}


def _numel(shape: Any) -> int:
    return int(torch.Size(shape).numel())


def _message(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if x is None else packed(x.detach().contiguous(), dtype).view(torch.bfloat16)


def _received(message: Tensor | None, shape: Any, dtype: torch.dtype) -> Tensor | None:
    if message is None:
        return None
    return unpacked(message.detach().view(torch.uint8), shape, dtype).requires_grad_()
