"""What pipeline stages send each other, in 16 bits or in FP8: activations forwards, and their gradients backwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator, _batched_p2p_ops, _p2p_ops
from megatron.core.utils import get_model_config
from torch import Tensor

from ..collectives.packed import packed, packed_bytes, unpacked
from ..formats import E4M3
from .topology import Topology

#: Of activations and of gradients. A block's own scale brings both into E4M3's range.
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
        received = {
            name: self._buffer(name, tensor_shape, self.config.pipeline_dtype) if wanted else None
            for name, wanted in (("from previous", recv_prev), ("from next", recv_next))
        }
        requests = exchange(
            tensor_send_prev=self._filled("to previous", tensor_send_prev),
            tensor_recv_prev=received["from previous"],
            tensor_send_next=self._filled("to next", tensor_send_next),
            tensor_recv_next=received["from next"],
            group=self.pp_group,
            prev_pipeline_rank=self.prev_rank,
            next_pipeline_rank=self.next_rank,
        )
        for request in requests if isinstance(requests, list) else requests.values():
            request.wait()
        return _copied(received["from previous"]), _copied(received["from next"]), None

    def _buffer(self, name: str, shape: Any, dtype: torch.dtype) -> Tensor:
        key = (name, torch.Size(shape), dtype)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(key[1], dtype=dtype, device=torch.cuda.current_device())
        return self._buffers[key]

    @torch.no_grad()
    def _filled(self, name: str, x: Tensor | None) -> Tensor | None:
        return None if x is None else self._buffer(name, x.shape, x.dtype).copy_(x)


def _copied(received: Tensor | None) -> Tensor | None:
    return None if received is None else received.clone().requires_grad_()


class FP8P2PCommunicator(BufferedP2PCommunicator):
    """Messages between neighbouring stages with half the bytes.

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
    """What to give megatron-core's schedules for messages of our own; nothing without stages."""
    if topology.pp.size() == 1:
        return {}
    kind = FP8P2PCommunicator if in_fp8 else BufferedP2PCommunicator
    communicator = kind(topology.pp, get_model_config(model[0]))
    return {"p2p_communicator": communicator, "pg_collection": topology.groups}


def _numel(shape: Any) -> int:
    return int(torch.Size(shape).numel())


def _message(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if x is None else packed(x.detach().contiguous(), dtype).view(torch.bfloat16)


def _received(message: Tensor | None, shape: Any, dtype: torch.dtype) -> Tensor | None:
    if message is None:
        return None
    return unpacked(message.detach().view(torch.uint8), shape, dtype).requires_grad_()
