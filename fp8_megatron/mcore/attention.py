"""Core attention by PyTorch's kernels: cuDNN's where they are the fastest, FlashAttention's within documents and
windows."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, cast, get_args

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..device import cudnn
from ..device.device import UnsupportedDeviceError
from ..device.group import Group
from ..kernels.ops import BlockKernel
from ..nn.attention_sinks import SinkAttention, sink_attention
from ..nn.context_attention import CommType, ContextParallel, context_attention
from ..nn.head_exchange import heads_of_sequence, sequences_of_heads
from ..nn.masked_attention import dense_attention, flash_attention

logger = logging.getLogger(__name__)

AttentionBackend = Literal["auto", "cudnn", "flash", "math"]

#: In order of preference. On Hopper at sequence 2048 cuDNN runs at 494/400 TFLOP/s forward/backward, flash 297/224.
_BACKENDS: dict[str, list[SDPBackend]] = {
    "auto": [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "math": [SDPBackend.MATH],
}

#: Columns of the widest heads that cuDNN's backward takes on every GPU.
_CUDNN_MAX_WIDTH = 128

#: The backend that `preferring_backends` holds.
_preferred: list[SDPBackend] | None = None


def may_use_cudnn(backend: AttentionBackend, seq_length: int, *, recorded: bool, device: torch.device) -> bool:
    """Whether a run may use cuDNN's kernels. Logs if it may not, and if a cuDNN other than PyTorch's is loaded.

    Args:
        recorded: whether steps are CUDA graphs.

    Raises:
        UnsupportedDeviceError: the run may not use cuDNN, or there is no GPU, and `backend` allows only cuDNN.
    """
    if device.type == "cpu" and backend == "cudnn":
        raise UnsupportedDeviceError("--attention-backend cudnn needs a GPU, and there is none here; drop it")
    if device.type != "cuda" or SDPBackend.CUDNN_ATTENTION not in _BACKENDS[backend]:
        return True
    may = not recorded or cudnn.can_record(seq_length)
    if not may and backend == "cudnn":
        raise UnsupportedDeviceError(
            f"--attention-backend cudnn: this cuDNN is older than 9.15.1 and wrong in a CUDA graph for --seq-length "
            f"{seq_length}, which is no multiple of 128; {cudnn.fix()}, or give --attention-backend auto, or "
            "--cuda-graph-impl none"
        )
    problem = cudnn.problem()
    if problem is not None or not may:
        instead = "" if may else f"; attention runs PyTorch's flash kernels for --seq-length {seq_length}"
        logger.warning("%s%s; %s", problem or "cuDNN is older than 9.15.1", instead, cudnn.fix())
    return may


@contextmanager
def preferring_backends(backend: AttentionBackend, *, with_cudnn: bool = True) -> Iterator[None]:
    """Let PyTorch choose among this backend's kernels inside the block.

    Each `CoreAttention` does this by itself otherwise. A run enters the block around its steps, because setting it at
    each call costs the host 31 µs, as long as three launches.

    Args:
        with_cudnn: whether cuDNN's kernels are among them (`may_use_cudnn`).
    """
    global _preferred
    before = _preferred
    kernels = [kernel for kernel in _BACKENDS[backend] if with_cudnn or kernel is not SDPBackend.CUDNN_ATTENTION]
    with sdpa_kernel(kernels, set_priority=True):
        _preferred = _BACKENDS[backend]
        try:
            yield
        finally:
            _preferred = before


class CoreAttention(MegatronModule):
    """softmax(QKᵀ/√d)·V with a causal mask, in 16 bits; grouped queries share their keys and values.

    Documents and windows (`nn.masked_attention`) run in FlashAttention's kernels on a GPU. On a CPU, and with the
    backend ``math``, they are a dense mask. Ranks that share sequences attend as `nn.context_attention` says, or
    exchange them for heads (`nn.head_exchange`). With `config.softmax_type` the heads have sinks
    (`nn.attention_sinks`), under megatron-core's name ``softmax_offset``: parameters, or 0 with ``off-by-one``.

    Args:
        layer_number: 1 is the first layer of the model. `config.window_size` and `config.window_attn_skip_freq` say
            whether it has a window.
        backend: ``auto`` or one kernel. One kernel raises an error if it does not take the shape.
        context_wire: `ContextParallel.wire`.
        cp_comm_type, pg_collection: how the ranks of `pg_collection.cp` exchange keys and values; ``a2a``: heads.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        backend: AttentionBackend = "auto",
        context_wire: torch.dtype | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        if attn_mask_type is not AttnMaskType.causal:
            raise ValueError(f"CoreAttention is causal; the layer spec asked for {attn_mask_type}")
        assert config.kv_channels is not None
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)
        self.backends = _BACKENDS[backend]
        self.window: int | None = None
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            assert config.window_size is not None
            self.window = config.window_size[0]
        #: [heads of this rank]; None: no head has a sink.
        self.softmax_offset: Tensor | None
        self._make_sinks(config)
        assert self.softmax_offset is None or not self.dropout, config
        #: The ranks that share each sequence; None if this rank has whole sequences.
        self.context_group: Group | None = None
        if config.context_parallel_size > 1:
            assert pg_collection is not None and not self.dropout, (pg_collection, config)
            assert cp_comm_type == "a2a" or (cp_comm_type in get_args(CommType) and self.window is None), config
            self.context_group, self._wire = pg_collection.cp, context_wire
            #: None: the ranks exchange heads.
            self.comm_type = None if cp_comm_type == "a2a" else cast(CommType, cp_comm_type)

    def _make_sinks(self, config: TransformerConfig) -> None:
        if config.softmax_type == "vanilla":
            self.softmax_offset = None
            return
        device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        sinks = torch.zeros(heads, dtype=config.params_dtype, device=device)
        if config.softmax_type == "off-by-one":
            self.register_buffer("softmax_offset", sinks, persistent=False)
            return
        param = torch.nn.Parameter(sinks)
        param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, 0, 1  # type: ignore[attr-defined]
        self.softmax_offset = param

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **unused: Any
    ) -> Tensor:
        """query [s, b, heads, d], key and value [s, b, groups, d] → [s, b, heads · d].

        Args:
            attention_mask: not a mask but its documents, int32 [n + 1]: `cu_seqlens` of `flash_attention`. None: each
                sequence is one document. megatron-core hands it to every layer under this name.
        """
        dropout = self.dropout if self.training else 0.0
        if dropout > 0.0:
            with tensor_parallel.get_cuda_rng_tracker().fork():
                return self._attend(query, key, value, attention_mask, dropout)
        return self._attend(query, key, value, attention_mask, 0.0)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None, dropout: float) -> Tensor:
        sinks = self.softmax_offset
        if self.context_group is None:
            return self._attend_in_sequences(query, key, value, sinks, cu_seqlens, dropout)
        if self.comm_type is None:
            query, key, value = sequences_of_heads(query, key, value, self.context_group)
            own = None if sinks is None else sinks.chunk(self.context_group.size())[self.context_group.rank()]
            result = self._attend_in_sequences(query, key, value, own, cu_seqlens, dropout)
            return heads_of_sequence(result.view(query.shape), self.context_group).flatten(2)
        assert cu_seqlens is None, "documents lie in whole sequences"
        kernel = self._block_kernel(query)
        shared = ContextParallel(self.context_group, self.comm_type, self.softmax_scale, kernel, self._wire)
        return context_attention(query, key, value, shared, sinks)

    def _attend_in_sequences(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        cu_seqlens: Tensor | None,
        dropout: float,
    ) -> Tensor:
        """Attention of heads of which this rank has the whole sequences."""
        window = self.window if self.window is not None and self.window < query.shape[0] - 1 else None
        if sinks is not None:
            is_masked = cu_seqlens is not None or window is not None
            kernel = self._block_kernel(query, is_masked=is_masked)
            return sink_attention(
                query, key, value, sinks, SinkAttention(self.softmax_scale, kernel, cu_seqlens, window)
            )
        if cu_seqlens is not None or window is not None:
            is_dense = query.device.type == "cpu" or self.backends is _BACKENDS["math"]
            attend = dense_attention if is_dense else flash_attention
            return attend(
                query, key, value, cu_seqlens=cu_seqlens, window=window, scale=self.softmax_scale, dropout=dropout
            )
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        context = self._attend_to_all(q, k, v, dropout)
        return context.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)

    def _block_kernel(self, query: Tensor, *, is_masked: bool = False) -> BlockKernel:
        """The kernel of a block of context-parallel attention, or of attention with sinks.

        cuDNN's backward takes heads of up to 128 columns, and its results do not repeat bit for bit.

        Args:
            is_masked: documents or a window hide keys, which cuDNN's kernels do not take here.
        """
        if query.device.type == "cpu" or self.backends is _BACKENDS["math"]:
            return "dense"
        takes_cudnn = SDPBackend.CUDNN_ATTENTION in self.backends and query.device.type == "cuda" and not is_masked
        takes_cudnn &= self.backends is not _preferred or torch.backends.cuda.cudnn_sdp_enabled()
        takes_cudnn &= query.shape[3] <= _CUDNN_MAX_WIDTH and not torch.are_deterministic_algorithms_enabled()
        return "cudnn" if takes_cudnn else "flash"

    def _attend_to_all(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        """Plain causal attention of [b, heads, s, d]."""
        dtype = q.dtype
        if q.device.type == "cpu":  # PyTorch's backward on a CPU is seven times as slow in BF16 as in FP32
            q, k, v = q.float(), k.float(), v.float()
        with nullcontext() if self.backends is _preferred else sdpa_kernel(self.backends, set_priority=True):
            context = torch.nn.functional.scaled_dot_product_attention(
                q,
                k,
                v,
                is_causal=True,
                dropout_p=dropout,
                scale=self.softmax_scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        return context.to(dtype)
