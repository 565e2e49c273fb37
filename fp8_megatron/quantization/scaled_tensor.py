"""ScaledTensor: a weight that is stored only as a low-precision payload and FP32 scales.

It is a ``torch.Tensor`` wrapper subclass. It can be an ``nn.Parameter`` with ``requires_grad=True``, and it passes
through megatron-core's attribute tagging and ``state_dict``. It advertises BF16 unless told otherwise, so that
``.bfloat16()``, ``Float16Module`` and other casts leave the payload alone. There is no hidden high-precision copy.
A layer calls `gemm_operand` for the FP8 operand of a GEMM. A matrix product with it, or arithmetic that autograd would
record, raises an error, so that no forward decodes a weight unseen. Code that only reads it, such as an average of
weights or a norm for a log, gets its owner's value, and arithmetic in place writes through the owner (`_read`). Copies
of an owned weight are plain tensors of that value.

Views of whole rows are ScaledTensors too, and share memory with their base. torch's ``fully_shard`` cuts a weight into
such parts and gathers them as they are stored (`weight_shards`): one byte an element for E4M3.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..formats import E4M3, FP8_DTYPES
from ..kernels import ops
from .operand import Format, Quantized, quantize, with_one_scale
from .weight_shards import Gathered, OwnerOfView, Part, WeightOwner, gather_inputs

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: Writes to a frozen FP8 weight after which `Home` warns. Loading a state takes one.
MANY_WRITES = 8

_aten = torch.ops.aten
_DATA: Any = torch.Tensor.data  # the descriptor


class CastScale:
    """The scale with which a weight of 16 or 32 bits is cast to E4M3: that of its amax, kept by who writes the weight.

    A weight and its views share it, so that a write through any of them is seen.

    Attributes:
        scale: FP32 [1], 16-byte aligned, as cuBLASLt requires.
        numel: elements of the weight. A view of some of them has another amax.
        is_current: whether `scale` is that of the present values. A write through a tensor makes it False.
    """

    __slots__ = ("is_current", "numel", "scale")

    def __init__(self, scale: Tensor, numel: int) -> None:
        self.scale = scale
        self.numel = numel
        self.is_current = False


class Home:
    """Mark of the layer that a weight belongs to, shared by the layer, its weight and views of that.

    It counts the values that were written to a weight that only FP8 holds, and warns of what looks like an average.
    """

    __slots__ = ("num_writes",)

    def __init__(self) -> None:
        self.num_writes = 0

    def note_write(self) -> None:
        """Values were rounded to the weight's FP8."""
        self.num_writes += 1
        if self.num_writes == MANY_WRITES:
            warnings.warn(
                f"values were written {MANY_WRITES} times to an FP8 weight without a master, as a frozen one is. Each "
                f"was rounded to FP8, so an average (a momentum encoder, a mean teacher) may not move at all: keep its "
                f"layers out of FP8 with filter=…",
                stacklevel=2,
            )


class ScaledTensor(torch.Tensor):
    """x ≈ payload · scale.

    Args:
        payload: E4M3 or FP16 (with --params-dtype any 16- or 32-bit dtype), of the tensor's shape. Contiguous, but for
            views.
        scale: FP32, [1] for the whole tensor (its value is 1 if the tensor is unscaled), or [numel / block] for blocks
            of the flattened tensor (FP16).
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

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

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
        """E4M3 with one scale from the amax of `value` (any float dtype, 2-D)."""
        payload, _, scale = ops.quantize_current(value.detach(), E4M3)
        return cls(payload, scale, dtype=dtype)

    @property
    def payload(self) -> Tensor:
        """The stored bits."""
        return self._payload

    @property
    def scale(self) -> Tensor:
        """The stored FP32 scales."""
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
                self._assign(value)

    def set_storage(self, payload: Tensor, scale: Tensor) -> None:
        """Re-point the tensor at other storage of the same shape (a view into a flat buffer)."""
        assert payload.shape == self.shape and payload.is_contiguous(), (payload.shape, self.shape)
        self._payload = payload
        self._scale = scale
        if self._part is not None:
            self._part = Part(payload)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """payload · scale as a plain tensor; a new high-precision copy."""
        if self._scale.numel() == 1:
            return ops.decode(self._payload, self._scale).to(dtype)
        return ops.dequantize_blockwise(self._payload.view(-1), self._scale).view(self.shape).to(dtype)

    def master_value(self) -> Tensor:
        """The tensor's value in FP32: its owner's, which may be more precise than the payload, or the payload's."""
        return self.dequantize() if self.owner is None else self.owner.value()

    def value_here(self) -> Tensor:
        """`master_value`, or as much of it as is known without other ranks (`WeightOwner.value_here`)."""
        return self.dequantize() if self.owner is None else self.owner.value_here()

    def gemm_operand(self, format: Format) -> Quantized:
        """The weight [N, K] in `format`, for an FP8 GEMM.

        An FP8 weight is used as it is: in a format with tiles, every tile has its one scale. Other weights (FP16 at
        levels O1 and O2) are cast here at each use; the cast is not kept.
        """
        if self._payload.dtype in FP8_DTYPES:
            return with_one_scale(self._payload, self._scale, format)
        if format.has_one_scale:
            return self._cast(format, transposed=False)
        return quantize(self.dequantize(), format)

    def transposed_gemm_operand(self, format: Format) -> Quantized:
        """The transpose [K, N] of `gemm_operand`. A weight that is cast at each use is read once."""
        if not format.has_one_scale:
            return self.gemm_operand(format).transposed()
        if self._payload.dtype in FP8_DTYPES:
            return Quantized(ops.transpose(self._payload), None, self._scale, format)
        return self._cast(format, transposed=True)

    def rows(self, rows: slice) -> ScaledTensor:
        """A view of whole rows for GEMMs, without a `main_grad`. Its cast takes the whole weight's scale."""
        view, whole = self._view(self._payload[rows]), self.cast_scale
        if whole is not None and whole.numel == self._payload.numel():
            view.cast_scale = CastScale(whole.scale, view._payload.numel())
            view.cast_scale.is_current = whole.is_current
        return view

    def _cast(self, format: Format, *, transposed: bool) -> Quantized:
        """The weight [N, K], or its transpose [K, N], with one scale."""
        scale, weight = self.current_cast_scale, self._payload
        if scale is None:
            cast = quantize(self.dequantize(), format, rowwise=not transposed, transposed=transposed)
            return cast.t if transposed else cast
        assert format.dtype is E4M3 and not format.power_of_two, format
        if weight.dtype is torch.float16 and self._scale.numel() > 1 and weight.is_contiguous():
            payload = ops.quantize_weight(weight, self._scale, scale, E4M3, transposed=transposed)
            return Quantized(payload, None, scale, format)
        payload, payload_t = ops.quantize_with_scale(
            self.dequantize(), scale, E4M3, rowwise=not transposed, transposed=transposed
        )
        return Quantized(payload_t if transposed else payload, None, scale, format)

    @property
    def current_cast_scale(self) -> Tensor | None:
        """FP32 [1], the scale of its present values, if its owner keeps it: the cast then needs no amax."""
        known = self.cast_scale
        if known is None or not known.is_current or known.numel != self._payload.numel():
            return None
        return known.scale

    def _assign(self, value: Tensor) -> None:
        """Take on new values in place, quantised in the tensor's own storage format; an owner does so itself."""
        if self.owner is not None:
            self.owner.write(value.master_value() if isinstance(value, ScaledTensor) else value)
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
        if self._scale.numel() > 1:
            ops.quantize_blockwise_(plain.reshape(-1), self._payload.view(-1), self._scale)
        elif self._payload.dtype not in FP8_DTYPES:
            self._payload.copy_(plain)
            self._scale.fill_(1.0)
        elif self._part is None:
            if self.home is not None:
                self.home.note_write()
            self._quantize_(self._payload, plain, power_of_two=False)
        else:
            self._write_part(self._part, plain)

    @property
    def part(self) -> Part | None:
        """What the tensor is a part of, if it is a view of rows or was made from one."""
        return self._part

    def _owns_scale(self) -> bool:
        """Whether no other elements are scaled by this tensor's scales."""
        part = self._part
        return part is None or part.is_zero or self._scale.numel() > 1 or part.root.numel() == self._payload.numel()

    def _write_part(self, part: Part, plain: Tensor) -> None:
        """Write rows of an FP8 weight. Rows that share their memory and their scale move to the new scale."""
        if self._owns_scale():
            self._quantize_(self._payload, plain, power_of_two=True)
        else:
            values = ops.decode(part.root, self._scale)
            start = self._payload.storage_offset() - part.root.storage_offset()
            values.as_strided(self._payload.shape, self._payload.stride(), start).copy_(plain)
            self._quantize_(part.root, values, power_of_two=True)
        part.is_zero = False
        part.scales_alone = True

    def _quantize_(self, payload: Tensor, plain: Tensor, *, power_of_two: bool) -> None:
        if plain.numel() == 0:
            return
        flat = plain.reshape(1, -1)
        quantized, _, scale = ops.quantize_current(flat, payload.dtype, power_of_two=power_of_two)
        payload.copy_(quantized.view(payload.shape))
        self._scale.copy_(scale)

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

    def _like(self, payload: Tensor, scale: Tensor) -> ScaledTensor:
        """A tensor with other storage. As a part it scales alone only after a write of its own."""
        made = ScaledTensor(payload, scale, dtype=self.dtype)
        made._part = None if self._part is None else Part(payload, scales_alone=self._part.scales_alone)
        return made

    def _view(self, payload: Tensor) -> ScaledTensor:
        """A view with this view of the payload. It shares the scale, or has its own blocks' scales."""
        scale = self._scale
        if scale.numel() > 1 and payload.numel() < self._payload.numel():
            block = self._payload.numel() // scale.numel()
            start = payload.storage_offset() - self._payload.storage_offset()
            if not payload.is_contiguous() or start % block or payload.numel() % block:
                raise NotImplementedError(
                    f"{payload.numel()} elements from {start} of a weight {tuple(self.shape)} are no whole blocks of "
                    f"{block} that share a scale: shard it over fewer ranks, or store it in FP8"
                )
            scale = scale[start // block : (start + payload.numel()) // block]
        with torch.inference_mode(self.is_inference()):  # torch gives a view the version counter of its base
            made = ScaledTensor(payload, scale, dtype=self.dtype)
        made._part, made.home, made.cast_scale = self._part, self.home, self.cast_scale
        if self.owner is not None:
            is_whole = payload.shape == self.shape
            made.owner = self.owner if is_whole else OwnerOfView(self.owner, self._payload, payload)
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def,override]
        function = _FUNCTIONS.get(func)
        if function is not None and isinstance(args[0], Tensor):
            return function(func, *args, **(kwargs or {}))
        made = func.decompose(*args, **(kwargs or {}))  # functions that torch leaves whole in inference mode
        return _read(func, args, kwargs or {}) if made is NotImplemented else made


def _read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func` of the tensors' values, in the dtypes that they advertise, decoded for this call alone. What arithmetic
    writes into a weight goes to its owner, on every replica.

    Raises:
        NotImplementedError: `func` is a matrix product, makes a view of one of them, or writes into one that has no
            owner, or something else than arithmetic; or autograd would record it, and give the weight a gradient that
            no optimizer reads.
    """
    scaled = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ScaledTensor)]
    written = _written(func, args, kwargs)
    told = f"{func} is not defined on a ScaledTensor of shape {tuple(scaled[0].shape)}"
    if _is_view(func) or _name(func) in _PRODUCTS:
        raise NotImplementedError(
            f"{told}: call .dequantize() for values or .gemm_operand() for a GEMM, so that the high-precision copy is "
            f"visible where it is made. If a module reads its layer's weight itself, keep the layer a torch.nn.Linear "
            f"(filter=…)"
        )
    if written and _name(func) not in _ARITHMETIC:
        raise NotImplementedError(f"{told}, and would write into it: fill a plain tensor, and copy it with p.copy_(…)")
    if any(tensor.owner is None for tensor in written):
        raise NotImplementedError(
            f"{told} without a master, as a frozen one is: what the function writes would be rounded to the weight's "
            f"format each time. Keep its layer a torch.nn.Linear (filter=…)"
        )
    values = {
        id(tensor): (tensor.master_value() if any(tensor is one for one in written) else tensor.value_here()).to(
            tensor.dtype
        )
        for tensor in scaled
    }
    args, kwargs = tree_map_only(ScaledTensor, lambda tensor: values[id(tensor)], (args, kwargs))
    made = func(*args, **kwargs)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in scaled) and _has_gradients(func, made):
        raise NotImplementedError(
            f"{told} under autograd: read a weight's value in torch.no_grad(), or of weight.detach(). If a loss or a "
            f"module takes its layer's weight, keep the layer a torch.nn.Linear (filter=…)"
        )
    for tensor in written:
        tensor._assign(values[id(tensor)])
    weights = {id(values[id(tensor)]): tensor for tensor in written}
    return tree_map_only(Tensor, lambda tensor: weights.get(id(tensor), tensor), made)


def _name(func: Any) -> str:
    """Its name without what says that it writes in place, or takes lists."""
    name: str = func._schema.name
    return name.removeprefix("aten::").removeprefix("_foreach_").removesuffix("_")


def _is_view(func: Any) -> bool:
    return any(made.alias_info is not None and not made.alias_info.is_write for made in func._schema.returns)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[ScaledTensor]:
    """The weights that `func` writes into."""
    if func.namespace == "c10d":
        return [leaf for leaf in written_by_collective(func, args) if isinstance(leaf, ScaledTensor)]
    given = {**dict(zip((arg.name for arg in func._schema.arguments), args, strict=False)), **kwargs}
    writes = [arg.name for arg in func._schema.arguments if arg.alias_info is not None and arg.alias_info.is_write]
    leaves = tree_leaves([given.get(name) for name in writes])
    return [leaf for leaf in leaves if isinstance(leaf, ScaledTensor)]


def written_by_collective(func: Any, args: tuple[Any, ...]) -> list[Any]:
    """What a function of ``torch.distributed`` writes into: its first argument, which its schema does not say."""
    return [] if func._schema.name == "c10d::send" else tree_leaves(args[0])


def _has_gradients(func: Any, made: Any) -> bool:
    """Whether autograd could differentiate what `func` made. Comparisons and new tensors have no gradient."""
    return not _name(func).endswith("_like") and any(
        leaf.is_floating_point() for leaf in tree_leaves(made) if isinstance(leaf, Tensor)
    )


def _same(func: Any, tensor: ScaledTensor) -> ScaledTensor:
    return tensor._view(tensor._payload)


def _view(func: Any, tensor: ScaledTensor, *args: Any, **kwargs: Any) -> ScaledTensor:
    return tensor._view(func(tensor._payload, *args, **kwargs))


def _rows(func: Any, tensor: ScaledTensor, *args: Any, **kwargs: Any) -> ScaledTensor | list[ScaledTensor]:
    """Views of parts."""
    views = func(tensor._payload, *args, **kwargs)
    parts = [tensor._view(view) for view in (views if isinstance(views, (list, tuple)) else [views])]
    for part in parts:
        part._part = tensor._part or Part(tensor._payload)
    return parts if isinstance(views, (list, tuple)) else parts[0]


def _as_strided(
    func: Any, tensor: ScaledTensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> ScaledTensor:
    if tuple(size) != tuple(tensor.shape) or tuple(stride) != tensor.stride() or offset:
        raise NotImplementedError(
            f"as_strided of a ScaledTensor of shape {tuple(tensor.shape)} to {tuple(size)}: only to its own shape"
        )
    return tensor._view(tensor._payload)


def _clone(func: Any, tensor: ScaledTensor, *, memory_format: Any = None) -> Tensor:
    if tensor.owner is not None:
        return tensor.value_here().to(tensor.dtype)
    return tensor._like(tensor._payload.clone(), tensor._scale.clone())


def _empty_like(func: Any, tensor: ScaledTensor, *, device: Any = None, **kwargs: Any) -> ScaledTensor:
    return tensor._like(
        torch.empty_like(tensor._payload, device=device), torch.empty_like(tensor._scale, device=device)
    )


def _zeros_like(func: Any, tensor: ScaledTensor, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Tensor:
    """A plain tensor, as a gradient or an optimizer's state is."""
    return torch.zeros(tensor.shape, dtype=dtype or tensor.dtype, device=device or tensor.device)


def _new(func: Any, tensor: ScaledTensor, size: Sequence[int], *, device: Any = None, **kwargs: Any) -> ScaledTensor:
    """New storage of another size in the same format: FP8 with one scale, FP16 with as many as it takes."""
    payload = func(tensor._payload, size, device=device)
    block = max(1, tensor._payload.numel() // tensor._scale.numel())
    num_scales = 1 if tensor._scale.numel() == 1 else payload.numel() // block
    made = tensor._like(payload, torch.ones(num_scales, device=payload.device))
    made._part, made.home = Part(payload, is_zero=func is _aten.new_zeros.default), tensor.home
    return made


def _to_copy(func: Any, tensor: ScaledTensor, *, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    device = device or tensor._payload.device
    if tensor.owner is not None:
        return tensor.value_here().to(device, kwargs.get("dtype") or tensor.dtype, non_blocking=non_blocking)
    return tensor._like(
        tensor._payload.to(device, non_blocking=non_blocking, copy=True),
        tensor._scale.to(device, non_blocking=non_blocking, copy=True),
    )


def _copy_(func: Any, destination: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(destination, ScaledTensor):
        assert isinstance(source, ScaledTensor)
        return destination.copy_(source.value_here())
    destination._assign(source)
    return destination


def _is_pinned(func: Any, tensor: ScaledTensor, device: Any = None) -> bool:
    return tensor._payload.is_pinned()


def _pin_memory(func: Any, tensor: ScaledTensor, device: Any = None) -> ScaledTensor:
    return tensor._like(tensor._payload.pin_memory(), tensor._scale.pin_memory())


def _fill_(func: Any, tensor: ScaledTensor, *args: Any, **kwargs: Any) -> ScaledTensor:
    """Functions that overwrite all values, such as those of `torch.nn.init`: rounded once."""
    if tensor._payload.device.type != "meta":
        tensor._assign(func(torch.empty(tensor.shape, device=tensor.device), *args, **kwargs))
    return tensor


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _same,
    _aten.alias.default: _same,
    _aten.view.default: _view,
    _aten._unsafe_view.default: _view,
    _aten.slice.Tensor: _rows,
    _aten.split.Tensor: _rows,
    _aten.split_with_sizes.default: _rows,
    _aten.as_strided.default: _as_strided,
    _aten.clone.default: _clone,
    _aten.empty_like.default: _empty_like,
    _aten.zeros_like.default: _zeros_like,
    _aten.new_empty.default: _new,
    _aten.new_zeros.default: _new,
    _aten._to_copy.default: _to_copy,
    _aten.copy_.default: _copy_,
    _aten.is_pinned.default: _is_pinned,
    _aten._pin_memory.default: _pin_memory,
    _aten.uniform_.default: _fill_,
    _aten.normal_.default: _fill_,
    _aten.zero_.default: _fill_,
    _aten.fill_.Scalar: _fill_,
}


#: Functions that may write into an owned weight, as a loop moves, shrinks or bounds it. Most of `torch.nn.init` are not
#: among them: they compute in several steps, and a stored weight would round each.
_ARITHMETIC = frozenset("add sub mul div lerp addcmul addcdiv clamp clamp_min clamp_max masked_fill".split())


#: Functions that would decode a weight at each forward of a module that reads it.
_PRODUCTS = frozenset(
    "mm addmm _addmm_activation bmm baddbmm addbmm mv addmv addr dot vdot ger matmul linear linear_backward einsum "
    "convolution _convolution convolution_overrideable mkldnn_linear _scaled_mm embedding embedding_bag "
    "_embedding_bag _embedding_bag_forward_only _native_multi_head_attention "
    "_transformer_encoder_layer_fwd".split()
)


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
