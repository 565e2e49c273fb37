"""Experts of a mixture of experts whose weights are parameters with three dimensions, as in transformers 5, in FP8.

Such a module holds W1 [E, Z, H] and W2 [E, H, F] and computes Σ_e p_e · W2_e · activation(W1_e · x) over each token's
experts. Weights may be transposed, and have biases [E, Z] and [E, H], as in gpt-oss. A module is known by what it holds
and computes: `form_of` calls it with small weights. So neither transformers nor the names of its classes are needed.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from ..activation_functions import KINDS, Activation
from ..dtypes import StorageDtype
from ..errors import UserError
from ..kernels.ops import Groups
from ..nn.compiled import new_token
from ..nn.compiled_experts import compiled_experts
from ..nn.experts import fp8_experts, grouped_by_expert
from ..nn.gemms import LinearParams, note_forward
from ..nn.operands import as_rows
from ..nn.recomputed import Recomputations
from ..nn.scaled_module import Layout, ScaledModule, stored
from ..quantization import unfused
from ..quantization.recipe import LinearQuantizers, Recipe
from ..quantization.scaled_tensor import ScaledTensor
from ..quantization.weight_shards import stored_part
from ..quantization.weight_views import Home
from ..sharding.partition import CHUNK
from .module_swap import Swap, has_hooks, keep_notes


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


def _rows_apart(value: Tensor) -> Tensor:
    """[E, 2F, …] with rows in turns (gate, up, gate, …) → gate, then up."""
    return value.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def _rows_in_turns(value: Tensor) -> Tensor:
    return value.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def _transposed(value: Tensor) -> Tensor:
    return value.transpose(1, 2)


_TRANSPOSED = Layout(_transposed, _transposed)
_INTERLEAVED_ROWS = Layout(_rows_apart, _rows_in_turns)
_INTERLEAVED_COLUMNS = Layout(
    lambda value: _rows_apart(_transposed(value)), lambda value: _transposed(_rows_in_turns(value))
)


class FP8Experts(ScaledModule):
    """Experts in FP8; `fp8_class` makes classes that are also of the module's own class.

    The parameters keep their names and the module its arguments. Weights are [E, Z, H] and [E, H, F], gate before up;
    state dicts have them as the module's own class has. Biases stay as they are.

    Attributes:
        derived_from: the module's own class. Plain copies have it.
        form: what it computes.
        quantizers: of both projections.
        token: for `torch.compile` (`nn.compiled`).
        recomputations: given if backward computes the first projection's output again; None: it is kept.
    """

    fp8_attributes: ClassVar = ScaledModule.fp8_attributes | {"form", "token", "recomputations", "_row_multiple"}
    derived_from: ClassVar[type[torch.nn.Module]]
    form: ExpertForm
    quantizers: tuple[LinearQuantizers, LinearQuantizers]
    token: Tensor
    recomputations: Recomputations | None = None
    _row_multiple: int

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """[T, H] in the dtype of the tokens. With plain weights (``functional_call``) nothing is in FP8."""
        weights = [self._parameters.get(name) for name in self.scaled_names]
        if not any(isinstance(weight, ScaledTensor) for weight in weights):
            if self.home is not None and None in weights:
                raise UserError(
                    f"{self.name}: a weight is no parameter since initialize, and would be multiplied in 16 bits: "
                    f"parametrise or prune before initialize, and the experts stay as they are"
                )
            output: Tensor = super().forward(*args, **kwargs)
            return output
        given = dict(zip(self.form.arguments, args, strict=False)) | kwargs
        return self._multiply(*(given[name] for name in self.form.arguments))

    def layout(self, name: str) -> Layout | None:
        """See `ScaledModule.layout`."""
        return self.form.layout(name)

    def all_quantizers(self) -> tuple[LinearQuantizers, ...]:
        """See `ScaledModule.all_quantizers`."""
        return self.quantizers

    def plain_class(self) -> type[torch.nn.Module]:
        """See `ScaledModule.plain_class`."""
        return self.derived_from

    @property
    def activation(self) -> Activation:
        """Between both projections."""
        return self.form.activation

    def linear_params(self, *, evaluates: bool) -> tuple[LinearParams, LinearParams]:
        """Both projections without biases, for the function that computes them.

        Args:
            evaluates: their casts leave no amax behind.
        """
        first, second = (one.evaluating() if evaluates else one for one in self.quantizers)
        weight1, weight2 = (cast(ScaledTensor, self._parameters[name]) for name in self.scaled_names)
        return LinearParams(weight1, None, first), LinearParams(weight2, None, second)

    def _multiply(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """[T, H] in x's dtype, of tokens [T, H] with their experts and probabilities [T, k]."""
        form, (num_tokens, top_k) = self.form, index.shape
        rows = as_rows(x.to(torch.bfloat16), self._row_multiple)
        # One more expert: that of choices that count for nothing.
        shape = (rows.shape[0], form.num_experts + 1)
        probs = torch.zeros(shape, device=x.device).scatter_add(1, index, weights.float())[:, :-1].contiguous()
        chosen = torch.zeros(shape, dtype=torch.bool, device=x.device).scatter(1, index, True)[:, :-1].contiguous()
        groups = grouped_by_expert(chosen, top_k)
        bias1, bias2 = (None, None) if form.biases is None else (getattr(self, name) for name in form.biases)
        if bias1 is not None and form.is_interleaved:
            bias1 = _rows_apart(bias1)
        if torch.compiler.is_compiling():
            y = self._compiled(rows, probs, groups, bias1)
            y = y if bias2 is None else y + probs.to(y.dtype) @ bias2.to(y.dtype)
        else:
            y = self._computed(rows, probs, groups, bias1, bias2)
        return y[:num_tokens].to(x.dtype)

    def _computed(
        self, rows: Tensor, probs: Tensor, groups: Groups, bias1: Tensor | None, bias2: Tensor | None
    ) -> Tensor:
        fc1, fc2 = self.linear_params(evaluates=self.evaluates)
        if torch.is_grad_enabled():
            note_forward(fc1)
            note_forward(fc2)
        recomputes = self.recomputations is not None
        if self.recomputations is not None:
            self.recomputations.were_found = True
        fc1, fc2 = fc1._replace(bias=bias1), fc2._replace(bias=bias2)
        return fp8_experts(rows, probs, groups, fc1, fc2, self.activation, recomputes=recomputes)

    def _compiled(self, rows: Tensor, probs: Tensor, groups: Groups, bias1: Tensor | None) -> Tensor:
        if self.recomputations is not None:
            raise UserError(
                f"{self.name}: recompute_activations does nothing under torch.compile, which decides itself what "
                f"backward computes again: leave it out"
            )
        if torch.compiler._is_exporting_flag:  # torch 2.11's is_exporting() is true under torch.compile too
            raise UserError(
                f"{self.name}: torch.export takes no FP8 layer: export fp8_megatron.any_model.plain_model(model)"
            )
        if any(getattr(self, name).home is not self.home for name in self.scaled_names):
            raise UserError(
                f"{self.name}: torch.compile knows the experts' own FP8 weights alone: give functional_call plain ones"
            )
        columns, evaluates = self.form.num_columns, self.evaluates
        return compiled_experts(rows, probs, groups, self.token, bias1, columns=columns, evaluates=evaluates)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.token = new_token(self)  # a copy is a layer of its own

    def __reduce_ex__(self, protocol: Any) -> Any:
        state: Any = super().__reduce_ex__(2)[2:]
        return (_new, (self.derived_from, self.scaled_names), *state)  # pickle finds a class by its name

    def extra_repr(self) -> str:
        """Sizes and casts."""
        shapes = ", ".join(f"{name}={tuple(getattr(self, name).shape)}" for name in self.scaled_names)
        return f"{shapes}, {self.form.activation.kind}, {self.quantizers[0]}"


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


def reason_to_stay(module: torch.nn.Module, names: ExpertNames, recipe: Recipe) -> str | None:
    """Why experts stay as they are; None if nothing speaks against FP8."""
    weights = [getattr(module, name) for name in names]
    if parametrize.is_parametrized(module):
        return "it is parametrised"
    if "forward" in module.__dict__:
        return "its forward is patched"
    if getattr(module, "_is_expert_parallel", False) or any(hasattr(one, "_local_tensor") for one in weights):
        return "ranks share its experts"
    if any(stored_part(one) is not None for one in weights):
        return "its weights are in FP8 already"
    if weights[0].dtype not in _DTYPES or weights[0].dtype != weights[1].dtype:
        return f"its weights are {weights[0].dtype} and {weights[1].dtype}"
    if not recipe.roles.input.takes_groups:
        return f"recipe {recipe.name!r} has no products of experts"
    for weight in weights:
        for size in weight.shape[1:]:
            if size % recipe.size_multiple:
                return f"its size {size} is not a multiple of {recipe.size_multiple}"
        if weight[0].numel() % CHUNK:
            return f"a matrix of {weight.shape[1]} x {weight.shape[2]} elements is no multiple of {CHUNK:,}"
    form = form_of(module, names)
    if form is None:
        return "its forward is not that of experts with a known activation function"
    if any(form.layout(name) is not None and has_hooks(one) for name, one in zip(names, weights, strict=True)):
        return "a hook waits for its weight's gradient, which FP8 has in another layout"
    return None


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def convert_experts(name: str, module: torch.nn.Module, names: ExpertNames, swap: Swap) -> FP8Experts:
    """Turn `module` into FP8 experts, in place."""
    form = form_of(module, names)
    assert form is not None
    module.__class__ = fp8_class(type(module), tuple(names))
    assert isinstance(module, FP8Experts)
    module.form, module.name, module.home = form, name, Home(name)
    module.token, module._row_multiple = new_token(module), swap.recipe.size_multiple
    module.quantizers = (swap.recipe.expert_quantizers(), swap.recipe.expert_quantizers())
    for key in names:
        old: Any = module._parameters[key]
        module.weight_dtype = old.dtype
        storage = swap.weight if old.requires_grad else StorageDtype.FP8
        layout = form.layout(key)
        value = old.detach() if layout is None else layout.to_stored(old.detach())
        new: Any = torch.nn.Parameter(stored(value, storage), old.requires_grad)
        new.home = module.home
        keep_notes(old, new)
        module._parameters[key] = new
        swap.replaced[old] = new
    return module


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
            z += (_rows_apart(bias1) if form.is_interleaved else bias1)[self.index]
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


def fp8_class(kind: type[torch.nn.Module], names: tuple[str, ...]) -> type[FP8Experts]:
    """The class of FP8 experts of a class whose weights have these names; always the same one."""
    key = kind, names
    if key not in _CLASSES:
        own = {"derived_from": kind, "scaled_names": names, "__module__": kind.__module__, "__doc__": kind.__doc__}
        _CLASSES[key] = types.new_class(
            f"FP8{kind.__name__}", (FP8Experts, kind), exec_body=lambda namespace: namespace.update(own)
        )
    return _CLASSES[key]


_CLASSES: dict[Any, type[FP8Experts]] = {}


def _new(kind: type[torch.nn.Module], names: tuple[str, ...]) -> FP8Experts:
    made = fp8_class(kind, names)
    return made.__new__(made)
