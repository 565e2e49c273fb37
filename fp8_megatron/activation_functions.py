"""The activation functions of an MLP: one table, which the configuration, kernels and megatron-core's layers read.

A function is a row of `KINDS`, and its formula for GPUs in `kernels/activation/triton.py`. Where `ModelConfig` has a
field of the row's name, a flag chooses it. Formulas are methods of tensors: this module imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

_TWO_SQRT_2_OVER_PI = 2.0 * math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715
_SQRT_HALF, _ROOT_OF_2_PI = math.sqrt(0.5), math.sqrt(2.0 * math.pi)
#: The slope of Swish that is near to GELU (arXiv 1606.08415).
_QUICK = 1.702


class Activation(NamedTuple):
    """An activation function as kernels take it.

    Attributes:
        kind: its row in `KINDS`.
        given: values of the row's parameters; empty: their defaults.
    """

    kind: str
    given: Sequence[float] = ()

    @property
    def row(self) -> ActivationKind:
        """Its row."""
        return KINDS[self.kind]

    @property
    def parameters(self) -> tuple[float, ...]:
        """What the row's formulas take behind their input."""
        return tuple(self.given or self.row.parameters.values())

    def with_parameters(self, given: Mapping[str, float]) -> Activation:
        """The same with these of its parameters by name."""
        return Activation(self.kind, tuple({**self.row.parameters, **given}.values()))


@dataclass(frozen=True)
class ActivationKind:
    """A row of the table.

    Formulas take a tensor, then the activation's parameters. In FP32 they are the specification of the kernels.

    Attributes:
        title: its name in text.
        value, derivative: of the function, element by element.
        is_gated: the MLP's input has two halves (gate, up), and the activation is value(gate) · up.
        up_value, up_derivative: a function of up, for value(gate) · up_value(up).
        parameters: names and defaults.
        torch_name, torch_arguments: `torch.nn.functional`'s function with a kernel for `value`, if there is one.
        core_fusion: for which layers megatron-core has a kernel that adds the bias and computes the function.
        te_name: of ``te.LayerNormMLP``.
    """

    title: str
    value: Callable[..., Tensor]
    derivative: Callable[..., Tensor]
    is_gated: bool = False
    up_value: Callable[..., Tensor] | None = None
    up_derivative: Callable[..., Tensor] | None = None
    parameters: Mapping[str, float] = field(default_factory=dict)
    torch_name: str | None = None
    torch_arguments: Mapping[str, Any] = field(default_factory=dict)
    core_fusion: Literal["none", "biased", "all"] = "none"
    te_name: str | None = None

    @property
    def num_inputs(self) -> int:
        """Columns of the MLP's input to the activation for one of its output."""
        return 2 if self.is_gated else 1


def _tanh_gelu_gate(x: Tensor, squared: Tensor) -> Tensor:
    return (_TWO_SQRT_2_OVER_PI * x * (1.0 + _CUBIC * squared)).sigmoid()


def _tanh_gelu(x: Tensor) -> Tensor:
    """x · σ(2u), u = √(2/π) · (x + 0.044715 x³)."""
    return x * _tanh_gelu_gate(x, x * x)


def _tanh_gelu_derivative(x: Tensor) -> Tensor:
    squared = x * x
    gate = _tanh_gelu_gate(x, squared)
    return gate + x * gate * (1.0 - gate) * (_TWO_SQRT_2_OVER_PI * (1.0 + 3.0 * _CUBIC * squared))


def _normal_distribution(x: Tensor) -> Tensor:
    """Φ(x) = (1 + erf(x / √2)) / 2; by erfc, which keeps its tail."""
    return 0.5 * (-_SQRT_HALF * x).erfc()


def _gelu(x: Tensor) -> Tensor:
    return x * _normal_distribution(x)


def _gelu_derivative(x: Tensor) -> Tensor:
    return _normal_distribution(x) + x * (-0.5 * x * x).exp() / _ROOT_OF_2_PI


def _squared_relu(x: Tensor) -> Tensor:
    return x.relu().square()


def _squared_relu_derivative(x: Tensor) -> Tensor:
    return 2.0 * x.relu()


def _swish(x: Tensor, *, slope: float) -> Tensor:
    return x * (slope * x).sigmoid()


def _swish_derivative(x: Tensor, *, slope: float) -> Tensor:
    sigmoid = (slope * x).sigmoid()
    return sigmoid * (1.0 + slope * x * (1.0 - sigmoid))


def _clamped_swish(x: Tensor, limit: float, alpha: float, offset: float) -> Tensor:
    return _swish(x.clamp(max=limit), slope=alpha)


def _clamped_swish_derivative(x: Tensor, limit: float, alpha: float, offset: float) -> Tensor:
    return _swish_derivative(x.clamp(max=limit), slope=alpha).masked_fill(x > limit, 0.0)


def _clamped_up(x: Tensor, limit: float, alpha: float, offset: float) -> Tensor:
    return x.clamp(-limit, limit) + offset


def _clamped_up_derivative(x: Tensor, limit: float, alpha: float, offset: float) -> Tensor:
    return x.new_ones(x.shape).masked_fill(x.abs() > limit, 0.0)


KINDS: Mapping[str, ActivationKind] = MappingProxyType(
    {
        # arXiv 1606.08415, as in GPT-2
        "gelu": ActivationKind(
            "GELU",
            _tanh_gelu,
            _tanh_gelu_derivative,
            torch_name="gelu",
            torch_arguments={"approximate": "tanh"},
            core_fusion="biased",
            te_name="gelu",
        ),
        "gelu_erf": ActivationKind("GELU (erf)", _gelu, _gelu_derivative, torch_name="gelu"),
        # arXiv 2109.08668, as in Nemotron
        "squared_relu": ActivationKind("squared ReLU", _squared_relu, _squared_relu_derivative, te_name="srelu"),
        # arXiv 2002.05202, as in Llama
        "swiglu": ActivationKind(
            "SwiGLU",
            partial(_swish, slope=1.0),
            partial(_swish_derivative, slope=1.0),
            is_gated=True,
            torch_name="silu",
            core_fusion="all",
            te_name="swiglu",
        ),
        "quick_geglu": ActivationKind(
            "quick GEGLU",
            partial(_swish, slope=_QUICK),
            partial(_swish_derivative, slope=_QUICK),
            is_gated=True,
            te_name="qgeglu",
        ),
        # as in gpt-oss; with alpha 1 and offset 0 SwiGLU of inputs within ± limit
        "clamped_swiglu": ActivationKind(
            "clamped SwiGLU",
            _clamped_swish,
            _clamped_swish_derivative,
            is_gated=True,
            up_value=_clamped_up,
            up_derivative=_clamped_up_derivative,
            parameters={"limit": 7.0, "alpha": _QUICK, "offset": 1.0},
            te_name="clamped_swiglu",
        ),
    }
)
#: The forms of GELU. A model has one unless a flag chooses another function.
GELUS = ("gelu", "gelu_erf")
