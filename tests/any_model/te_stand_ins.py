"""Stand-ins for Transformer Engine's modules, which need a GPU: the same class names, attributes, names of parameters
and extra state, with forwards in plain torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class _Base(torch.nn.Module):
    """What Transformer Engine's modules have in common."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.name, self.fp8_meta = None, {"fp8_group": None}
        self.quantizers = {"scaling_fwd": {}, "scaling_bwd": {}}
        self.tp_size, self.sequence_parallel, self.fuse_wgrad_accumulation = 1, False, False
        self.wgrad_store = SimpleNamespace(delay_wgrad_compute=lambda: False)
        self.return_bias = self.return_layernorm_output = self.zero_centered_gamma = False
        self.eps, self.normalization = 1e-5, "LayerNorm"
        for name, value in settings.items():
            assert hasattr(self, name), name
            setattr(self, name, value)

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        assert state.numel() == 0

    def _add_norm(self, size: int) -> None:
        self.layer_norm_weight = torch.nn.Parameter(torch.randn(size) * 0.1 + (not self.zero_centered_gamma))
        has_bias = self.normalization == "LayerNorm"
        self.layer_norm_bias = torch.nn.Parameter(torch.randn(size) * 0.1) if has_bias else None

    def _norm(self, x: Tensor) -> Tensor:
        weight = self.layer_norm_weight + self.zero_centered_gamma
        if self.layer_norm_bias is None:
            return F.rms_norm(x, x.shape[-1:], weight, self.eps)
        return F.layer_norm(x, x.shape[-1:], weight, self.layer_norm_bias, self.eps)

    def _outputs(self, y: Tensor, bias: Tensor | None, normed: Tensor | None = None) -> Any:
        if not self.return_bias and bias is not None:
            y = y + bias
        outputs = (y, *([bias] if self.return_bias else []), *([normed] if self.return_layernorm_output else []))
        return outputs if len(outputs) > 1 else y


class Linear(_Base):
    """``te.Linear``."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = True, split: tuple[str, ...] = (), **settings: Any
    ) -> None:
        super().__init__(**settings)
        self.use_bias, self.in_features, self.out_features = bias, in_features, out_features
        self.weight_names = [f"{part}_weight" for part in split] or ["weight"]
        self.bias_names = [f"{part}_bias" for part in split] or ["bias"]
        rows = out_features // len(self.weight_names)
        whole = torch.randn(out_features, in_features) * in_features**-0.5
        for index, (weight_name, bias_name) in enumerate(zip(self.weight_names, self.bias_names, strict=True)):
            part = whole[index * rows : (index + 1) * rows]
            self.register_parameter(weight_name, torch.nn.Parameter(part))
            if bias:
                self.register_parameter(bias_name, torch.nn.Parameter(torch.randn(rows) * 0.1))
            else:
                setattr(self, bias_name, torch.Tensor())

    def _multiply(self, x: Tensor, normed: Tensor | None = None) -> Any:
        weight = torch.cat([getattr(self, name) for name in self.weight_names])
        bias = torch.cat([getattr(self, name) for name in self.bias_names]) if self.use_bias else None
        return self._outputs(x @ weight.t(), bias, normed)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        return self._multiply(inp)


class LayerNormLinear(Linear):
    """``te.LayerNormLinear``."""

    def __init__(self, in_features: int, out_features: int, **settings: Any) -> None:
        super().__init__(in_features, out_features, **settings)
        self._add_norm(in_features)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        normed = self._norm(inp)
        return self._multiply(normed, normed)


def _gated(activation: Any) -> Any:
    return lambda z: activation(z.chunk(2, dim=-1)[0]) * z.chunk(2, dim=-1)[1]


def _clamped(z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    return torch.minimum(gate, gate.new_tensor(7.0)).mul((1.702 * gate.clamp(max=7.0)).sigmoid()) * (
        up.clamp(-7, 7) + 1
    )


FORMULAS: dict[str, Any] = {
    "gelu": lambda z: F.gelu(z, approximate="tanh"),
    "qgelu": lambda z: z / (1 + (-1.702 * z).exp()),
    "relu": lambda z: z.clamp(min=0),
    "srelu": lambda z: z.clamp(min=0) ** 2,
    "silu": lambda z: z / (1 + (-z).exp()),
    "clamped_swiglu": _clamped,
}
for _name, _plain in (
    ("geglu", "gelu"),
    ("qgeglu", "qgelu"),
    ("reglu", "relu"),
    ("sreglu", "srelu"),
    ("swiglu", "silu"),
):
    FORMULAS[_name] = _gated(FORMULAS[_plain])


class LayerNormMLP(_Base):
    """``te.LayerNormMLP``."""

    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, *, activation: str = "gelu", bias: bool = True, **settings: Any
    ) -> None:
        self.activation_params, self.checkpoint = None, False
        super().__init__(**settings)
        self.activation, self.use_bias = activation, bias
        self._add_norm(hidden_size)
        inner = ffn_hidden_size * (2 if "glu" in activation else 1)
        sizes = {"fc1": (inner, hidden_size), "fc2": (hidden_size, ffn_hidden_size)}
        for fc, (rows, columns) in sizes.items():
            self.register_parameter(f"{fc}_weight", torch.nn.Parameter(torch.randn(rows, columns) * columns**-0.5))
            if bias:
                self.register_parameter(f"{fc}_bias", torch.nn.Parameter(torch.randn(rows) * 0.1))
            else:
                setattr(self, f"{fc}_bias", torch.Tensor())

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        normed = self._norm(inp)
        z = normed @ self.fc1_weight.t()
        y = FORMULAS[self.activation](z + self.fc1_bias if self.use_bias else z) @ self.fc2_weight.t()
        return self._outputs(y, self.fc2_bias if self.use_bias else None, normed)


class GroupedLinear(_Base):
    """``te.GroupedLinear``, which stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight0 = torch.nn.Parameter(torch.randn(32, 32))


class QuantizedTensor(torch.Tensor):
    """Transformer Engine's base class of weights in its FP8."""


for _kind in (Linear, LayerNormLinear, LayerNormMLP, GroupedLinear, QuantizedTensor):
    _kind.__module__ = f"transformer_engine.pytorch.module.{_kind.__name__.lower()}"
