"""What pipeline stages send each other, in 16 bits or in FP8: activations forwards, and their gradients backwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator, _batched_p2p_ops, _p2p_ops
from megatron.core.utils import get_model_config
from torch import Tensor

from ..collectives.packed import packed, packed_bytes, unpacked
from ..dtypes import E4M3
from .topology import Topology

#: The format of activations and of gradients. A block's own scale brings both into E4M3's range.
_ACTIVATIONS = _GRADIENTS = E4M3


class BufferedP2PCommunicator(P2PCommunicator):
    """megatron-core's messages between neighbouring stages, through one buffer for each direction.

    NCCL's stream reads what is sent and writes what is received. While a CUDA graph is recorded, torch does not reuse
    memory that another stream used: a recording would hold every message of a step. It holds these buffers alone.
    A message is copied where it is sent and where it arrives. Before `_communicate` returns, the current stream (on a
    CPU: the host) waits for all messages, so the next ones may have the buffers.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._buffers: dict[tuple[str, torch.Size, torch.dtype], Tensor] = {}

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
        assert wait_on_reqs, "a buffer that is on its way cannot be filled again"
        exchange = _batched_p2p_ops if self.config.batch_p2p_comm else _p2p_ops
        from_previous, from_next = (
            self._buffer(name, *self._message_of(tensor_shape)) if wanted else None
            for name, wanted in (("from previous", recv_prev), ("from next", recv_next))
        )
        requests = exchange(
            tensor_send_prev=self._filled("to previous", tensor_send_prev, _GRADIENTS),
            tensor_recv_prev=from_previous,
            tensor_send_next=self._filled("to next", tensor_send_next, _ACTIVATIONS),
            tensor_recv_next=from_next,
            group=self.pp_group,
            prev_pipeline_rank=self.prev_rank,
            next_pipeline_rank=self.next_rank,
        )
        for request in requests if isinstance(requests, list) else requests.values():
            request.wait()
        return (
            self._arrived(from_previous, tensor_shape, _ACTIVATIONS),
            self._arrived(from_next, tensor_shape, _GRADIENTS),
            None,
        )

    def _buffer(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        key = (name, shape, dtype)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(shape, dtype=dtype, device=torch.cuda.current_device())
        return self._buffers[key]

    @torch.no_grad()
    def _filled(self, name: str, x: Tensor | None, format: torch.dtype) -> Tensor | None:
        if x is None:
            return None
        message = self._encoded(x, format)
        return self._buffer(name, message.shape, message.dtype).copy_(message)

    def _arrived(self, message: Tensor | None, shape: Any, format: torch.dtype) -> Tensor | None:
        return None if message is None else self._decoded(message, shape, format).requires_grad_()

    def _message_of(self, shape: Any) -> tuple[torch.Size, torch.dtype]:
        """Shape and dtype of the message of a tensor."""
        return torch.Size(shape), self.config.pipeline_dtype

    def _encoded(self, x: Tensor, format: torch.dtype) -> Tensor:
        """The message of a tensor."""
        return x

    def _decoded(self, message: Tensor, shape: Any, format: torch.dtype) -> Tensor:
        """The tensor of a message, in memory of its own."""
        return message.clone()


class FP8P2PCommunicator(BufferedP2PCommunicator):
    """Messages between neighbouring stages with half the bytes: a tensor and its scales (`collectives.packed`)."""

    def _message_of(self, shape: Any) -> tuple[torch.Size, torch.dtype]:
        return torch.Size([packed_bytes(torch.Size(shape).numel())]), torch.uint8

    def _encoded(self, x: Tensor, format: torch.dtype) -> Tensor:
        return packed(x.contiguous(), format)

    def _decoded(self, message: Tensor, shape: Any, format: torch.dtype) -> Tensor:
        return unpacked(message, shape, format)


def schedule_arguments(model: Sequence[torch.nn.Module], topology: Topology, *, in_fp8: bool) -> dict[str, Any]:
    """What to give megatron-core's schedules for messages of our own; nothing without stages."""
    if topology.pp.size() == 1:
        return {}
    kind = FP8P2PCommunicator if in_fp8 else BufferedP2PCommunicator
    communicator = kind(topology.pp, get_model_config(model[0]))
    return {"p2p_communicator": communicator, "pg_collection": topology.groups}
