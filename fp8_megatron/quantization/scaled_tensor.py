"""ScaledTensor: a weight that is stored only as a low-precision payload and FP32 scales.

It is a ``torch.Tensor`` wrapper subclass. It can be an ``nn.Parameter`` with ``requires_grad=True``, and it passes
through megatron-core's attribute tagging and ``state_dict``. It advertises BF16 unless told otherwise, so that
``.bfloat16()``, ``Float16Module`` and other casts leave the payload alone. There is no hidden high-precision copy.
A layer calls `gemm_operand` for the FP8 operand of a GEMM. torch's products with a layer's own weight are the layer's
(`weight_products`). Where autograd is on, any other matrix product with it raises an error, so that no forward in
training multiplies a decoded weight unseen. Code that only reads it, such as a norm for a log or for a loss, gets its
owner's value. Arithmetic in place writes through
the owner. Clones, and all copies of an owned weight, are plain tensors of that value. `scaled_functions` says this of
each of torch's functions.

A weight is a matrix [N, K], or several matrices [M, N, K], each with a scale of its own.

Views of whole rows are ScaledTensors too, and share memory with their base. torch's ``fully_shard`` cuts a weight into
such parts and gathers them as they are stored (`weight_shards`): one byte an element for E4M3.
"""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..dtypes import E4M3, FP8_DTYPES
from ..formats.format import Format, Quantized
from ..kernels import ops
from . import scaled_functions
from .value_view import Decoded
from .weight_shards import Gathered, gather_inputs
from .weight_views import CastScale, Home, OwnerOfView, Part, WeightOwner

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_DATA: Any = torch.Tensor.data  # the descriptor


class ScaledTensor(Decoded):
    """x ≈ payload · scale.

    Args:
        payload: E4M3 or FP16 (with --params-dtype any 16- or 32-bit dtype), of the tensor's shape. Contiguous, but for
            views.
        scale: FP32, one for each matrix (FP8), or one for each block of the flattened tensor (FP16). [1] of value 1 if
            the tensor is unscaled.
        dtype: the dtype it advertises.
    """

    _payload: Tensor
    _scale: Tensor
    #: Who derives payload and scale. Views write through it, copies have none.
    owner: WeightOwner | None = None
    #: Mark of the layer that it is the weight of. Views have it, copies do not, so a compiler can tell them apart.
    home: Home | None = None
    #: What its cast to FP8 takes, if its owner keeps it.
    cast_scale: CastScale | None = None
    _part: Part | None

    @staticmethod
    def __new__(
        cls,
        payload: Tensor,
        scale: Tensor,
        *,
        dtype: torch.dtype = torch.bfloat16,
        requires_grad: bool = False,
    ) -> ScaledTensor:
        assert scale.dtype == torch.float32, scale.dtype
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            payload.shape,
            strides=payload.stride(),
            dtype=dtype,
            device=payload.device,
            requires_grad=requires_grad,
        )
        self._payload = payload
        self._scale = scale
        self._part = None
        return self

    @classmethod
    def quantize(cls, value: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> ScaledTensor:
        """E4M3 with a scale from the amax of each matrix of `value` (any float dtype, [N, K] or [M, N, K]), a power of
        two: see `assign`."""
        payload, scale = _quantized(value.detach(), len(value) if value.ndim == 3 else 1, E4M3)
        return cls(payload, scale, dtype=dtype)

    @property
    def payload(self) -> Tensor:
        """The stored bits: E4M3, FP16 or another dtype of 16 or 32 bits, in the tensor's shape."""
        return self._payload

    @property
    def scale(self) -> Tensor:
        """The stored scales, FP32: one for each matrix, or one for each block."""
        return self._scale

    @property
    def data(self) -> Tensor:
        """A view without autograd, as of any tensor. What is assigned is written: the tensor keeps its memory.

        Raises:
            ValueError: what is assigned has another shape, or is on another device.
        """
        view: Tensor = _DATA.__get__(self)
        return view

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape or value.device != self.device:
            raise ValueError(
                f"a weight {tuple(self.shape)} on {self.device} cannot become {tuple(value.shape)} on {value.device} "
                f"through .data: move its layer with .to(device), or assign a tensor of its shape"
            )
        if not (isinstance(value, ScaledTensor) and value._payload.data_ptr() == self._payload.data_ptr()):
            with torch.no_grad():
                self.assign(value)

    def data_ptr(self) -> int:
        """The payload's, by which libraries tell parameters apart (Accelerate under FSDP2). torch's would be 0."""
        return self._payload.data_ptr()

    def element_size(self) -> int:
        """Bytes of a stored element, by which libraries count memory (transformers' ``get_memory_footprint``)."""
        return self._payload.element_size()

    @property
    def itemsize(self) -> int:  # type: ignore[override]
        """`element_size`."""
        return self._payload.itemsize

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of payload and scales. An owner's state is not among them."""
        return self._payload.nbytes + self._scale.nbytes

    def set_storage(self, payload: Tensor, scale: Tensor) -> None:
        """Re-point the tensor at other storage of the same shape (a view into a flat buffer)."""
        assert payload.shape == self.shape and payload.is_contiguous(), (payload.shape, self.shape)
        self._payload = payload
        self._scale = scale
        if self._part is not None:
            self._part = Part(payload)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """payload · scale as a plain tensor of `dtype` in this shape; a new copy."""
        if self._has_blocks:
            return ops.dequantize_blockwise(self._payload.view(-1), self._scale).view(self.shape).to(dtype)
        return _decoded(self._payload, self._scale).to(dtype)

    @property
    def _has_blocks(self) -> bool:
        """Whether the scales are of blocks, and not of matrices."""
        return self._scale.numel() > 1 and self._payload.dtype not in FP8_DTYPES

    def master_value(self) -> Tensor:
        """The tensor's value in FP32: its owner's, which may be more precise than the payload, or the payload's."""
        return self.dequantize() if self.owner is None else self.owner.value()

    def value_here(self) -> Tensor:
        """`master_value`, or as much of it as is known without other ranks (`WeightOwner.value_here`)."""
        return self.dequantize() if self.owner is None else self.owner.value_here()

    @property
    def takes_arithmetic(self) -> bool:
        """See `Decoded.takes_arithmetic`: if it has an owner."""
        return self.owner is not None

    @property
    def layer_name(self) -> str:
        """See `Decoded.layer_name`."""
        return "" if self.home is None else self.home.name

    def gemm_operand(self, format: Format, *, transposed: bool = False) -> Quantized:
        """The weight [N, K] or [M, N, K] in `format`, or its transpose [K, N] or [M, K, N], for an FP8 GEMM.

        An FP8 weight is used as it is where the format allows it (`Format.stored_weight`). Other weights (FP16 at
        levels O1 and O2) are cast here at each use; the cast is not kept. Each matrix has its own scale.
        """
        weight = self._payload
        if weight.dtype in FP8_DTYPES:
            return format.stored_weight(weight, self._scale, transposed=transposed)
        scale = self.current_cast_scale if format.takes_scale else None
        if scale is not None:
            assert format.dtype is E4M3 and not format.power_of_two, format
            if weight.dtype is torch.float16 and self._scale.numel() > 1 and weight.is_contiguous():
                payload = ops.quantize_weight(weight, self._scale, scale, E4M3, transposed=transposed)
                return Quantized(payload, None, scale, format)
        value = self.dequantize()
        if value.ndim == 3:
            return format.cast_matrices(value, scale, transposed=transposed)
        cast = format.cast(value, scale, rowwise=not transposed, transposed=transposed)
        return cast.t if transposed else cast

    def rows(self, rows: slice) -> ScaledTensor:
        """A view of whole rows for GEMMs, without a `main_grad`. Its cast takes the whole weight's scale."""
        view, whole = self.view_onto(self._payload[rows]), self.cast_scale
        if whole is not None and whole.numel == self._payload.numel():
            view.cast_scale = CastScale(whole.scale, view._payload.numel())
            view.cast_scale.is_current = whole.is_current
        return view

    @property
    def current_cast_scale(self) -> Tensor | None:
        """FP32, the scale of each matrix's present values, if its owner keeps it: the cast then needs no amax."""
        known = self.cast_scale
        if known is None or not known.is_current or known.numel != self._payload.numel():
            return None
        return known.scale

    def assign(self, value: Tensor) -> None:
        """Take on new values in place, rounded to the tensor's own storage format; an owner does so itself.

        The scales of an FP8 weight without an owner are powers of two, whoever sets it. So its values are exact in 16
        bits, and an FP8 weight that takes them, whole or in parts on any number of ranks, has them without rounding.

        Args:
            value: of the tensor's shape and any float dtype. Its scales are taken over if its format is the same.

        Raises:
            NotImplementedError: it is a small change of a layer's FP8 weight without an owner (`Home.check_change`).
        """
        if self.owner is not None:
            self.owner.write(value.master_value() if isinstance(value, Decoded) else value)
            return
        if self.cast_scale is not None:
            self.cast_scale.is_current = False
        if isinstance(value, ScaledTensor) and value._payload.dtype == self._payload.dtype and self._owns_scale():
            self._payload.copy_(value._payload)
            self._scale.copy_(value._scale)
            if self._part is not None:
                self._part.is_zero = False
                self._part.scales_alone = value._part is not None and value._part.scales_alone
            return
        plain = value.dequantize() if isinstance(value, ScaledTensor) else value.to(self._payload.device)
        home = None if isinstance(value, Decoded) else self.home  # another weight's values are no change of this one's
        if self._has_blocks:
            ops.quantize_blockwise_(plain.reshape(-1), self._payload.view(-1), self._scale)
        elif self._payload.dtype not in FP8_DTYPES:
            self._payload.copy_(plain)
            self._scale.fill_(1.0)
        elif self._part is None:
            self._quantize_(self._payload, plain, home)
        else:
            self._write_part(self._part, plain, home)

    @property
    def part(self) -> Part | None:
        """What the tensor is a part of, if it is a view of rows or was made from one."""
        return self._part

    def _owns_scale(self) -> bool:
        """Whether no other elements are scaled by this tensor's scales."""
        part = self._part
        return part is None or part.is_zero or self._scale.numel() > 1 or part.root.numel() == self._payload.numel()

    def _write_part(self, part: Part, plain: Tensor, home: Home | None) -> None:
        """Write rows of an FP8 weight. Rows that share their memory and their scale move to the new scale."""
        if self._owns_scale():
            self._quantize_(self._payload, plain, home)
        else:
            values = _decoded(part.root, self._scale)
            start = self._payload.storage_offset() - part.root.storage_offset()
            values.as_strided(self._payload.shape, self._payload.stride(), start).copy_(plain)
            self._quantize_(part.root, values, home)
        part.is_zero = False
        part.scales_alone = True

    def _quantize_(self, payload: Tensor, plain: Tensor, home: Home | None) -> None:
        if plain.numel() == 0:
            return
        quantized, scale = _quantized(plain, self._scale.numel(), payload.dtype)
        if home is not None:
            if not (home.is_loading or payload.is_meta):
                home.check_change(_decoded(payload, self._scale), plain.float(), _decoded(quantized, scale))
            home.note_write()
        payload.copy_(quantized)
        self._scale.copy_(scale)

    def like(self, payload: Tensor, scale: Tensor) -> ScaledTensor:
        """A tensor with other storage, without an owner. As a part it scales alone only after a write of its own.

        Args:
            payload, scale: of this tensor's dtypes and shapes.
        """
        made = ScaledTensor(payload, scale, dtype=self.dtype)
        made._part = None if self._part is None else Part(payload, scales_alone=self._part.scales_alone)
        return made

    def sized(self, payload: Tensor, *, is_zero: bool) -> ScaledTensor:
        """A tensor of the same format over new storage of another size, with as many scales as it takes. It is no part
        of this one.

        Args:
            payload: the new storage.
            is_zero: whether all of it is zero.
        """
        block = max(1, self._payload.numel() // self._scale.numel())
        num_scales = 1 if self._scale.numel() == 1 else payload.numel() // block
        made = self.like(payload, torch.ones(num_scales, device=payload.device))
        made._part, made.home = Part(payload, is_zero=is_zero), self.home
        return made

    def view_onto(self, payload: Tensor) -> ScaledTensor:
        """A view of the tensor, of which `payload` is a view of its payload. It shares the scale, or has its own
        blocks' scales.

        Raises:
            NotImplementedError: the view cuts blocks that share a scale.
        """
        scale = self._scale
        if scale.numel() > 1 and payload.numel() < self._payload.numel():
            block = self._payload.numel() // scale.numel()
            start = payload.storage_offset() - self._payload.storage_offset()
            if not payload.is_contiguous() or start % block or payload.numel() % block:
                raise NotImplementedError(
                    f"{payload.numel()} elements from {start} of a weight {tuple(self.shape)} are no whole blocks of "
                    f"{block} that share a scale: shard it over fewer ranks, or store it in FP8 (O3); to read "
                    f"them, take them of p.detach().clone()"
                )
            scale = scale[start // block : (start + payload.numel()) // block]
        with torch.inference_mode(self.is_inference()):  # torch gives a view the version counter of its base
            made = ScaledTensor(payload, scale, dtype=self.dtype)
        made._part, made.home, made.cast_scale = self._part, self.home, self.cast_scale
        if self.owner is not None:
            is_whole = payload.shape == self.shape
            made.owner = self.owner if is_whole else OwnerOfView(self.owner, self._payload, payload)
        return made

    def part_onto(self, payload: Tensor) -> ScaledTensor:
        """`view_onto` some of the rows, which knows what it is a part of."""
        view = self.view_onto(payload)
        if self._has_blocks or view._scale.numel() == self._scale.numel():
            view._part = self._part or Part(self._payload)
        return view

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: torch.nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[Tensor, ...], Gathered]:
        """What ``fully_shard`` gathers of this part of a weight (`weight_shards.gather_inputs`)."""
        return gather_inputs(self, mesh, outer_size)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Gathered,
        param_dtype: torch.dtype,
        *,
        out: ScaledTensor | None = None,
    ) -> tuple[ScaledTensor, tuple[Tensor, ...]] | None:
        """The whole weight, in the memory that was gathered into; it advertises `param_dtype`.

        Args:
            out: the whole weight of an earlier gather; its payload is that memory already.
        """
        payload, scale = metadata.whole(all_gather_outputs)
        if out is not None:
            out._scale = scale
            return None
        gathered = ScaledTensor(payload, scale, dtype=param_dtype)
        gathered.home = self.home
        return gathered, ()

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"ScaledTensor(shape={tuple(self.shape)}, payload={self._payload.dtype}, scales={self._scale.numel()}, "
            f"advertises={self.dtype}, device={self.device})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A tensor of its own: no owner, and no gradient. Of an owned weight a plain one, with `value_here`."""
        if id(self) not in memo:
            notes = copy.deepcopy(notes_of(self, for_plain=self.owner is not None), memo)
            if self.owner is None:
                copied: Tensor = _rebuild(
                    self._payload.clone(), self._scale.clone(), self.dtype, self.requires_grad, notes
                )
            else:
                copied = self.value_here().to(self.dtype).requires_grad_(self.requires_grad)
                if isinstance(self, torch.nn.Parameter):
                    copied = torch.nn.Parameter(copied, self.requires_grad)
                copied.__dict__.update(notes)
            memo[id(self)] = copied
        value: Tensor = memo[id(self)]
        return value

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if self.owner is not None:
            warnings.warn(
                "a pickled FP8 weight, as torch.save(model) writes it, has no master weight, and rounds the small "
                "updates away that the master holds: save model.state_dict(), whose weights are the masters",
                stacklevel=2,
            )
        # Cloned: the storage of a view in a flat buffer would be written whole. Bytes: pickle takes no float8.
        payload, scale = self._payload.clone().view(torch.uint8), self._scale.clone()
        notes = notes_of(self)
        return _unpickle, (self._payload.dtype, payload, scale, self.dtype, self.requires_grad, notes)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def,override]
        return scaled_functions.call(func, args, kwargs or {})


def _quantized(value: Tensor, num_matrices: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """FP8 of the shape of `value`, and the scale of each matrix from its amax, a power of two: FP32 [matrices]."""
    matrices = value.reshape(num_matrices, 1, -1)
    casts = [ops.quantize_current(matrix, dtype, power_of_two=True) for matrix in matrices]
    if num_matrices == 1:
        payload, _, scale = casts[0]
        return payload.view(value.shape), scale
    payload = torch.cat([payload.view(torch.uint8) for payload, _, _ in casts])  # a CPU does not concatenate FP8
    return payload.view(dtype).view(value.shape), torch.cat([scale for _, _, scale in casts])


def _decoded(payload: Tensor, scale: Tensor) -> Tensor:
    """payload · scale in FP32, of matrices that follow each other, with a scale each."""
    if scale.numel() == 1:
        return ops.decode(payload, scale)
    return ops.decode(payload.reshape(scale.numel(), -1), scale[:, None]).view(payload.shape)


#: Attributes that a copy does not take over: its storage is its own, and nobody else's optimizer holds it.
_STATE = frozenset(("_payload", "_scale", "_part", "owner", "cast_scale", "main_grad"))


def notes_of(weight: ScaledTensor, *, for_plain: bool = False) -> dict[str, Any]:
    """What other code has set on a weight, such as that it is a parameter without decay.

    Args:
        for_plain: without what a plain parameter does not have.
    """
    left_out = _STATE | {"home", "_is_param"} if for_plain else _STATE
    return {key: value for key, value in weight.__dict__.items() if key not in left_out}


def _rebuild(
    payload: Tensor, scale: Tensor, dtype: torch.dtype, requires_grad: bool, notes: dict[str, Any]
) -> ScaledTensor:
    """A copied or unpickled tensor. `notes`: attributes that other code has set, such as that it is a parameter."""
    rebuilt = ScaledTensor(payload, scale, dtype=dtype, requires_grad=requires_grad)
    rebuilt.__dict__.update(notes)
    return rebuilt


def _unpickle(dtype: torch.dtype, payload: Tensor, *others: Any) -> ScaledTensor:
    return _rebuild(payload.view(dtype), *others)
