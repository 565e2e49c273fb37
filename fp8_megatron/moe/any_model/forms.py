"""What a module of experts computes: known by what it holds, and by what it makes of small weights.

Such a module holds W1 [E, Z, H] and W2 [E, H, F] and computes Σ_e p_e · W2_e · activation(W1_e · x) over each token's
experts. Weights may be transposed, and have biases [E, Z] and [E, H], as in gpt-oss. `form_of` calls the module with
small weights. So neither transformers nor the names of its classes are needed.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...activation_functions import KINDS, Activation
from ...nn.scaled_module import Layout
from ...quantization import unfused


class ExpertNames(NamedTuple):
    """The parameters of experts: the first and the second projection."""

    fc1: str
    fc2: str


class ExpertForm(NamedTuple):
    """What a module of experts holds and computes.

    Attributes:
        names: of the weights.
        biases: of the biases, if there are any.
        arguments: the names of what ``forward`` takes: tokens [T, H], their experts int64 [T, k], where the number of
            experts stands for none, and the probabilities [T, k].
        is_transposed: the weights are [E, H, Z] and [E, F, H].
        is_interleaved: columns of gate and up take turns, as in gpt-oss.
        num_experts, num_columns: E, and Z of the first projection.
        activation: between both projections.
    """

    names: ExpertNames
    biases: ExpertNames | None
    arguments: tuple[str, ...]
    is_transposed: bool
    is_interleaved: bool
    num_experts: int
    num_columns: int
    activation: Activation

    def layout(self, name: str) -> Layout | None:
        """How a weight lies (`ScaledModule.layout`)."""
        if name not in self.names:
            return None
        if not (self.is_interleaved and name == self.names.fc1):
            return _TRANSPOSED if self.is_transposed else None
        return _INTERLEAVED_COLUMNS if self.is_transposed else _INTERLEAVED_ROWS


def rows_apart(value: Tensor) -> Tensor:
    """[E, 2F, …] with rows in turns (gate, up, gate, …) → gate, then up."""
    return value.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def _rows_in_turns(value: Tensor) -> Tensor:
    return value.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def _transposed(value: Tensor) -> Tensor:
    return value.transpose(1, 2)


_TRANSPOSED = Layout(_transposed, _transposed)
_INTERLEAVED_ROWS = Layout(rows_apart, _rows_in_turns)
_INTERLEAVED_COLUMNS = Layout(
    lambda value: rows_apart(_transposed(value)), lambda value: _transposed(_rows_in_turns(value))
)


def expert_names(module: torch.nn.Module) -> ExpertNames | None:
    """The names of both weights if `module` looks like experts, else None: its only parameters with three dimensions
    are [E, Z, H] and [E, H, F], or the transposes of such, with E above 1 and Z either F or 2F."""
    matrices = [name for name, param in module._parameters.items() if param is not None and param.ndim == 3]
    if len(matrices) != 2:
        return None
    names = ExpertNames(*matrices)
    first, second = _shapes(module, names)
    return names if _orientations(first, second) and first[0] == second[0] > 1 else None


def _shapes(module: torch.nn.Module, names: ExpertNames) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(getattr(module, names.fc1).shape), tuple(getattr(module, names.fc2).shape)


def _orientations(first: tuple[int, ...], second: tuple[int, ...]) -> list[bool]:
    """Whether weights of these shapes may be transposed: both where all sizes are equal."""

    def fits(z: int, h: int, h2: int, f: int) -> bool:
        return h == h2 and z in (f, 2 * f)

    plain, transposed = fits(*first[1:], *second[1:]), fits(*first[:0:-1], *second[:0:-1])
    return [turned for turned, is_possible in ((False, plain), (True, transposed)) if is_possible]


def form_of(module: torch.nn.Module, names: ExpertNames) -> ExpertForm | None:
    """What `module` computes, if `FP8Experts` can; else None.

    It is called once with small weights on the CPU, and compared with every form. Some tokens are large, so that limits
    of an activation are seen.
    """
    arguments, biases = tuple(_arguments(type(module))), _bias_names(module, names)
    is_alone = {name for name, _ in module.named_parameters()} <= {*names, *(biases or ())}
    if len(arguments) != 3 or not is_alone:
        return None
    small = _small_params(module, names, (*names, *(biases or ())))
    trial = _Trial(small[names.fc1], small[names.fc2], *((small[k] for k in biases) if biases else (None, None)))
    call = _with_weights(module, names, small)
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            found = call(trial.x, trial.index, trial.probs)
    except Exception:  # whatever it needs, it is no such module
        return None
    if not isinstance(found, Tensor) or found.shape != trial.x.shape:
        return None
    first, second = _shapes(module, names)
    for is_transposed, is_interleaved in itertools.product(_orientations(first, second), (False, True)):
        sizes = first[0], first[2 if is_transposed else 1]
        for activation in _activations(module):
            form = ExpertForm(names, biases, arguments, is_transposed, is_interleaved, *sizes, activation)
            wanted = trial.output(form)
            if wanted is not None and ((found - wanted).norm(dim=1) <= _TOLERANCE * wanted.norm(dim=1)).all():
                return form
    return None


#: How much of its norm a token's output may differ. Sums of FP32 in another order differ by 10⁻⁶, the two forms of GELU
#: by 10⁻³.
_TOLERANCE = 1e-5


def _bias_names(module: torch.nn.Module, names: ExpertNames) -> ExpertNames | None:
    """The names of the biases [E, Z] and [E, H], if there are two matrices beside the weights."""
    own = [name for name, param in module._parameters.items() if param is not None and name not in names]
    is_pair = len(own) == 2 and all(getattr(module, name).ndim == 2 for name in own)
    return ExpertNames(*own) if is_pair else None


def _activations(module: torch.nn.Module) -> Iterator[Activation]:
    """Those of the table, with the parameters that the module has as attributes."""
    for kind, row in KINDS.items():
        own = {key: getattr(module, key, None) for key in row.parameters}
        known = {key: float(value) for key, value in own.items() if isinstance(value, (int, float))}
        yield Activation(kind).with_parameters(known)


class _Trial:
    """Small weights and biases of experts, and tokens, drawn once; `output` is what a form makes of them."""

    def __init__(self, weight1: Tensor, weight2: Tensor, bias1: Tensor | None, bias2: Tensor | None) -> None:
        self._weights, self._biases = (weight1, weight2), (bias1, bias2)
        count = len(weight1)
        random = torch.Generator("cpu").manual_seed(1)
        sizes = torch.tensor([0.1, 0.5, 2.0, 8.0], device="cpu").repeat(2)[:, None]
        self.x = torch.randn(8, _HIDDEN, generator=random, device="cpu") * sizes
        self.index = torch.rand(8, count, generator=random, device="cpu").topk(min(2, count)).indices
        self.probs = torch.rand(self.index.shape, generator=random, device="cpu") + 0.1

    def output(self, form: ExpertForm) -> Tensor | None:
        """[8, H]; None: the weights have not the sizes that the form needs."""
        layouts = [form.layout(name) for name in form.names]
        weight1, weight2 = (
            weight if layout is None else layout.to_stored(weight)
            for weight, layout in zip(self._weights, layouts, strict=True)
        )
        bias1, bias2 = self._biases
        width, row = weight2.shape[2], form.activation.row
        if weight1.shape[1] != row.num_inputs * width or (form.is_interleaved and not row.is_gated):
            return None
        z = torch.einsum("th,tkzh->tkz", self.x, weight1[self.index])
        if bias1 is not None:
            z += (rows_apart(bias1) if form.is_interleaved else bias1)[self.index]
        activated = unfused.activated(z.flatten(0, 1), form.activation).view(*self.index.shape, width)
        y = torch.einsum("tkf,tkhf->tkh", activated, weight2[self.index])
        return torch.einsum("tkh,tk->th", y if bias2 is None else y + bias2[self.index], self.probs)


#: The size of small tokens.
_HIDDEN = 32


def _sizes(module: torch.nn.Module, names: ExpertNames) -> dict[int, int]:
    """A small size for each size of the weights, with the same relations between them."""
    first, second = _shapes(module, names)
    is_transposed = _orientations(first, second)[0]
    (z, hidden), width = (first[:0:-1], second[1]) if is_transposed else (first[1:], second[2])
    small = _HIDDEN if width == hidden else _HIDDEN // 2 if z == hidden else 24
    return {hidden: _HIDDEN, width: small, z: small * (z // width)}


def _small_params(module: torch.nn.Module, names: ExpertNames, params: Sequence[str]) -> dict[str, Tensor]:
    """Small values for these parameters, with which outputs are about 1."""
    sizes, random = _sizes(module, names), torch.Generator("cpu").manual_seed(0)
    small = {}
    for name in params:
        count, *own = getattr(module, name).shape
        shape = [sizes.get(size, size) for size in own]
        small[name] = 0.7 * torch.randn(count, *shape, generator=random, device="cpu")
    return small


def _with_weights(module: torch.nn.Module, names: ExpertNames, small: Mapping[str, Tensor]) -> Callable[..., Any]:
    """The forward of a copy of `module` with other parameters; numbers that it keeps of their sizes follow.

    A copy of transformers' experts is told to take none of its kernels.
    """
    tried = copy.copy(module)
    tried._parameters = {name: torch.nn.Parameter(value, requires_grad=False) for name, value in small.items()}
    sizes, count = _sizes(module, names), len(small[names.fc1])
    for key, value in module.__dict__.items():
        if type(value) is int and value in sizes and value != count:
            tried.__dict__[key] = sizes[value]
    if hasattr(module, "config"):
        tried.__dict__["config"] = _Eager(module.config)
    forward: Callable[..., Any] = tried.forward
    return forward


class _Eager:
    """A configuration of transformers that asks for no kernel of experts."""

    _experts_implementation = "eager"

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _arguments(kind: type[torch.nn.Module]) -> list[str]:
    """The names of what a class's forward takes behind ``self``."""
    return list(inspect.signature(kind.forward).parameters)[1:]
