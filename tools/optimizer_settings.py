"""Settings that `tools.compare_optimizers` compares: AdamW with each operand in the named storage.

The optimizer's kernels run on flat storage with the package's layout: linear weights in one space, embeddings (BF16
under FP8 settings) in another, every tensor on its own chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fp8_megatron.formats import E4M3, GRAD_BLOCK, STATE_BLOCK, StorageDtype
from fp8_megatron.kernels import ops
from fp8_megatron.kernels.quantize.blockwise import store_state_

CHUNK = 4096
BETA1, EPS, WEIGHT_DECAY = 0.9, 1e-8, 0.1


@dataclass(frozen=True)
class Setting:
    """Storage of the state: a `StorageDtype` of the package, "split", or one of `EMULATED` (not in the package)."""

    name: str
    group: str
    master: str = "fp32"
    exp_avg: str = "fp32"
    exp_avg_sq: str = "fp32"
    beta2: float = 0.95
    fp8_model: bool = False
    """Linear weights and their gradients in FP8, as at level O3; else both are FP32."""
    perturbation: float = 0.0
    """Relative error of the initial weights, to see how a single early error grows."""

    @property
    def is_exact(self) -> bool:
        """Whether this is FP32 AdamW itself."""
        return self == Setting(self.name, self.group, beta2=self.beta2)


SETTINGS = (
    Setting("fp32", "reference"),
    Setting("weights off by 2⁻¹² at the start", "reference", perturbation=2.0**-12),
    Setting("master fp16", "master", master="fp16"),
    Setting("master bf16", "master", master="bf16"),
    Setting("master fp8", "master", master="fp8"),
    Setting("master split", "master", master="split"),
    Setting("m bf16", "first moment", exp_avg="bf16"),
    Setting("m fp8", "first moment", exp_avg="fp8"),
    Setting("m int8", "first moment", exp_avg="int8"),
    Setting("m int8, to nearest", "first moment", exp_avg="int8 nearest"),
    Setting("m int8, softsign", "first moment", exp_avg="int8 softsign"),
    Setting("m int8, linear", "first moment", exp_avg="int8 linear"),
    Setting("v fp16", "second moment", exp_avg_sq="fp16"),
    Setting("v bf16", "second moment", exp_avg_sq="bf16"),
    Setting("v uint8", "second moment", exp_avg_sq="uint8"),
    Setting("v uint8, to nearest", "second moment", exp_avg_sq="uint8 nearest"),
    Setting("v uint8, square root", "second moment", exp_avg_sq="uint8 square root"),
    Setting("v uint8, linear", "second moment", exp_avg_sq="uint8 linear"),
    Setting("v fp8, square root", "second moment", exp_avg_sq="fp8 square root"),
    Setting("v fp8", "second moment", exp_avg_sq="fp8"),
    Setting("v fp8, amax as scale", "second moment", exp_avg_sq="fp8 amax"),
    Setting("v fp8, one scale a tensor", "second moment", exp_avg_sq="fp8 tensor"),
    Setting("v fp8, one power of two a tensor", "second moment", exp_avg_sq="fp8 tensor power of two"),
    Setting("FP8 weights + gradients", "together", fp8_model=True),
    Setting("O3", "together", "fp16", "fp8", "fp16", fp8_model=True),
    Setting("O3, v uint8", "together", "fp16", "fp8", "uint8", fp8_model=True),
    Setting("stretch: split, int8, uint8", "together", "split", "int8", "uint8", fp8_model=True),
    # FP8-LM (arXiv 2310.18313), section 2.2 and Table 6: FP8 weights and gradients beside each part of the state.
    Setting("FP32 state", "decoupling", fp8_model=True),
    Setting("m FP8, v FP16", "decoupling", "fp32", "fp8", "fp16", fp8_model=True),
    Setting("m FP8, v FP16, master FP16", "decoupling", "fp16", "fp8", "fp16", fp8_model=True),
    Setting("m FP8, v FP16, master BF16", "decoupling", "bf16", "fp8", "fp16", fp8_model=True),
    Setting("m FP8, v FP16, master FP8", "decoupling", "fp8", "fp8", "fp16", fp8_model=True),
    Setting("m FP8, v FP8, master FP16", "decoupling", "fp16", "fp8", "fp8", fp8_model=True),
    Setting("FP32 gradients and weights, m FP8, v FP16, master FP16", "decoupling", "fp16", "fp8", "fp16"),
    Setting("fp32", "β₂ = 0.999", beta2=0.999),
    Setting("v fp16", "β₂ = 0.999", exp_avg_sq="fp16", beta2=0.999),
    Setting("v bf16", "β₂ = 0.999", exp_avg_sq="bf16", beta2=0.999),
    Setting("v uint8", "β₂ = 0.999", exp_avg_sq="uint8", beta2=0.999),
    Setting("v uint8, to nearest", "β₂ = 0.999", exp_avg_sq="uint8 nearest", beta2=0.999),
    Setting("v fp8, square root", "β₂ = 0.999", exp_avg_sq="fp8 square root", beta2=0.999),
    Setting("v fp8", "β₂ = 0.999", exp_avg_sq="fp8", beta2=0.999),
    Setting("v fp8, one scale a tensor", "β₂ = 0.999", exp_avg_sq="fp8 tensor", beta2=0.999),
    Setting("stretch: split, int8, uint8", "β₂ = 0.999", "split", "int8", "uint8", 0.999, fp8_model=True),
)


def _blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    blocks = x.view(-1, STATE_BLOCK)
    amax = blocks.abs().amax(dim=1, keepdim=True)
    return blocks, torch.where(amax > 0, amax, torch.ones_like(amax))


def _through(dtype: torch.dtype, block: int = STATE_BLOCK) -> Callable[[Tensor], Tensor]:
    def round_trip(x: Tensor) -> Tensor:
        payload, scales = torch.empty(x.numel(), dtype=dtype), torch.empty(x.numel() // block)
        ops.quantize_blockwise_(x, payload, scales)
        return ops.dequantize_blockwise(payload, scales)

    return round_trip


def _fp8_tensorwise(x: Tensor, *, power_of_two: bool = False) -> Tensor:
    scale = ops.scale_from_amax(ops.amax(x), E4M3, power_of_two=power_of_two)
    return ops.decode(ops.encode(x, scale, E4M3), scale)


def _fp8_amax(x: Tensor) -> Tensor:
    blocks, amax = _blocks(x)
    scale = ops.scale_from_amax(amax, E4M3, power_of_two=False)
    return ops.decode(ops.encode(blocks, scale, E4M3), scale).view(-1)


def _fp8_square_root(x: Tensor) -> Tensor:
    return _through(E4M3)(x.sqrt()).square()


def _linear(limit: int) -> Callable[[Tensor], Tensor]:
    def round_trip(x: Tensor) -> Tensor:
        blocks, amax = _blocks(x)
        return (blocks * (limit / amax)).round().mul(amax / limit).view(-1)

    return round_trip


def _uint8_square_root(x: Tensor) -> Tensor:
    """To nearest, never to 0: FlashOptim's map (arXiv 2602.23349, section 3.2) on this project's blocks."""
    blocks, amax = _blocks(x)
    code = (blocks / amax).sqrt().mul(255).round()
    code = torch.where(blocks > 0, code.clamp_min(1), code)
    return (code / 255).square().mul(amax).view(-1)


def _int8_softsign(x: Tensor) -> Tensor:
    """To nearest: FlashOptim's map on this project's blocks."""
    blocks, amax = _blocks(x)
    y = blocks / amax
    code = (127 * 2 * y / (1 + y.abs())).round() / 127
    return (code / (2 - code.abs())).mul(amax).view(-1)


#: Storages outside the package: FP32 state is rounded through them after each step. The arithmetic is the same.
EMULATED: dict[str, Callable[[Tensor], Tensor]] = {
    "fp8 amax": _fp8_amax,
    "fp8 tensor": _fp8_tensorwise,
    "fp8 tensor power of two": partial(_fp8_tensorwise, power_of_two=True),
    "fp8 square root": _fp8_square_root,
    "int8 nearest": _through(torch.int8),
    "uint8 nearest": _through(torch.uint8),
    "int8 linear": _linear(127),
    "uint8 linear": _linear(255),
    "int8 softsign": _int8_softsign,
    "uint8 square root": _uint8_square_root,
}


class State:
    """Flat state [n] in the storage a setting names."""

    def __init__(self, value: Tensor, storage: str, tensors: dict[str, slice]) -> None:
        self.round_trip = EMULATED.get(storage)
        self.tensors = tensors.values() if storage.startswith("fp8 tensor") else [slice(None)]
        dtype = StorageDtype.FP32 if self.round_trip else StorageDtype(storage)
        self.payload = torch.zeros(value.numel(), dtype=dtype.torch_dtype)
        self.scales = torch.ones(value.numel() // STATE_BLOCK) if dtype.is_scaled else None
        store_state_(value, self.payload, self.scales)
        self.emulate()

    def emulate(self) -> None:
        """Round the step's result to an emulated storage."""
        if self.round_trip:
            for tensor in self.tensors:
                self.payload[tensor] = self.round_trip(self.payload[tensor])

    def load(self) -> Tensor:
        """FP32 [n]."""
        return ops.load_state(self.payload, self.scales)


class Space:
    """Parameters of one storage class, flat: what they are computed with, and AdamW's step on them."""

    def __init__(
        self, shapes: dict[str, tuple[int, int]], values: dict[str, Tensor], setting: Setting, *, is_linear: bool
    ) -> None:
        self.setting = setting
        self.shapes = shapes
        self.is_fp8 = setting.fp8_model and is_linear
        self.is_split = setting.master == "split" and is_linear
        self.tensors: dict[str, slice] = {}
        end = 0
        for name, (rows, columns) in shapes.items():
            self.tensors[name] = slice(end, end + -(-rows * columns // CHUNK) * CHUNK)
            end = self.tensors[name].stop
        sizes = torch.tensor([(place.stop - place.start) // CHUNK for place in self.tensors.values()])
        self.chunk_tensor = torch.repeat_interleave(torch.arange(len(shapes)), sizes).int()
        self.chunk_amax = torch.zeros(end // CHUNK)
        master = torch.zeros(end)
        for name, place in self.tensors.items():
            master[place][: values[name].numel()] = values[name].view(-1)
        self.exp_avg = State(torch.zeros(end), setting.exp_avg, self.tensors)
        self.exp_avg_sq = State(torch.zeros(end), setting.exp_avg_sq, self.tensors)
        if self.is_split:
            torch.amax(master.abs().view(-1, CHUNK), dim=1, out=self.chunk_amax)
            self.weight_scales = ops.scale_from_amax(self._tensor_amax(), E4M3, power_of_two=True)
            weight, correction = ops.split_master(master.view(-1, CHUNK), self._chunk_scales(self.weight_scales))
            self.weight, self.correction = weight.view(-1), correction.view(-1)
        else:
            # As in the package, only FP8 weights have a split master; the 16-bit rest has a separate FP16 master.
            storage = "fp16" if setting.master == "split" else setting.master
            self.master = State(master, storage, self.tensors)

    def _tensor_amax(self) -> Tensor:
        amax = torch.zeros(len(self.shapes))
        return amax.scatter_reduce_(0, self.chunk_tensor.long(), self.chunk_amax, "amax")

    def _chunk_scales(self, tensor_scales: Tensor) -> Tensor:
        return tensor_scales[self.chunk_tensor.long()][:, None]

    def master_value(self) -> Tensor:
        """FP32 [n]."""
        if not self.is_split:
            return self.master.load()
        shape = (len(self.chunk_tensor), CHUNK)
        scales = self._chunk_scales(self.weight_scales)
        return ops.join_master(self.weight.view(shape), self.correction.view(shape), scales).view(-1)

    def compute_value(self) -> Tensor:
        """What the model computes with, FP32 [n]: FP8 or BF16 weights from the master, or the master itself."""
        value = self.master_value()
        if not self.setting.fp8_model:
            return value
        if not self.is_fp8:
            return value.bfloat16().float()
        chunks = value.view(-1, CHUNK)
        if self.is_split:
            return ops.decode(self.weight.view(chunks.shape), self._chunk_scales(self.weight_scales)).view(-1)
        torch.amax(chunks.abs(), dim=1, out=self.chunk_amax)
        scales = self._chunk_scales(ops.scale_from_amax(self._tensor_amax(), E4M3, power_of_two=False))
        return ops.decode(ops.encode(chunks, scales, E4M3), scales).view(-1)

    def stored_grad(self, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        """`grad` as the optimizer reads it."""
        if not self.setting.fp8_model:
            return grad, None
        if not self.is_fp8:
            return grad.bfloat16(), None
        payload, scales = torch.empty(grad.numel(), dtype=E4M3), torch.empty(grad.numel() // GRAD_BLOCK)
        ops.quantize_blockwise_(grad, payload, scales)
        return payload, scales

    def step(self, grad: tuple[Tensor, Tensor | None], factor: Tensor, step: int, lr: float) -> None:
        """One AdamW step on all parameters."""
        operands = [ops.FlatState(*grad)]
        operands += [ops.FlatState(moment.payload, moment.scales) for moment in (self.exp_avg, self.exp_avg_sq)]
        hyper = ops.AdamHyper(lr, BETA1, self.setting.beta2, EPS, WEIGHT_DECAY, decoupled=True)
        count = torch.tensor([float(step)])
        if self.is_split:
            scales = ops.next_weight_scales(self._tensor_amax(), lr=lr, beta1=hyper.beta1, beta2=hyper.beta2)
            split = (self.weight, self.correction, self.weight_scales, scales, self.chunk_tensor)
            state = ops.SplitAdamState(*operands, *split)
            ops.adamw_split_step_(state, hyper, grad_factor=factor, step=count, chunk_amax=self.chunk_amax)
        else:
            master = ops.FlatState(self.master.payload, self.master.scales)
            ops.adamw_step_(ops.AdamState(*operands, master), hyper, grad_factor=factor, step=count)
            self.master.emulate()
        self.exp_avg.emulate()
        self.exp_avg_sq.emulate()
