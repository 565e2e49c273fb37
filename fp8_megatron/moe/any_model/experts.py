"""Experts of a mixture of experts whose weights are parameters with three dimensions, as in transformers 5, in FP8.

`expert_form` says which modules they are, and what they compute.
"""

from __future__ import annotations

import types
from collections.abc import Container, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from ...activation_functions import Activation
from ...any_model.module_swap import WEIGHT_DTYPES, Kind, Swap, has_hooks, keep_notes
from ...dtypes import CHUNK, StorageDtype
from ...errors import UserError
from ...kernels.ops import Groups
from ...nn.compiled import new_token
from ...nn.gemms import LinearParams, note_forward
from ...nn.operands import as_rows
from ...nn.recomputed import Recomputations
from ...nn.scaled_module import Layout, ScaledModule, stored
from ...quantization.recipe import LinearQuantizers, Recipe
from ...quantization.scaled_tensor import ScaledTensor
from ...quantization.weight_shards import stored_part
from ...quantization.weight_views import Home
from ..layers.compiled import compiled_experts
from ..layers.experts import fp8_experts, grouped_by_expert, with_biases
from .forms import ExpertForm, ExpertNames, expert_names, form_of, rows_apart


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
            bias1 = rows_apart(bias1)
        compute = self._compiled if torch.compiler.is_compiling() else self._computed
        y = compute(rows, probs, groups, bias1)
        if bias2 is not None:
            y = with_biases(y, probs, bias2)
        return y[:num_tokens].to(x.dtype)

    def _computed(self, rows: Tensor, probs: Tensor, groups: Groups, bias1: Tensor | None) -> Tensor:
        fc1, fc2 = self.linear_params(evaluates=self.evaluates)
        if torch.is_grad_enabled():
            note_forward(fc1)
            note_forward(fc2)
        recomputes = self.recomputations is not None
        if self.recomputations is not None:
            self.recomputations.were_found = True
        return fp8_experts(rows, probs, groups, fc1._replace(bias=bias1), fc2, self.activation, recomputes=recomputes)

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
        call = (self.form.num_columns, self.quantizers[0].input.format.scale_shape(*rows.shape), self.evaluates)
        return compiled_experts(rows, probs, groups, self.token, bias1, *call)

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


class Experts(Kind):
    """Experts whose weights have three dimensions."""

    is_layer = False
    #: transformers' own, of DeepSeek-V3's and Qwen3's folders.
    stored_as = frozenset(("FP8Experts",))

    def finds(self, module: torch.nn.Module) -> bool:
        """See `Kind.finds`."""
        return expert_names(module) is not None

    def weights(self, module: torch.nn.Module) -> Sequence[torch.nn.Parameter]:
        """See `Kind.weights`."""
        return [getattr(module, name) for name in _names(module)]

    def why_stays(self, name: str, module: torch.nn.Module, recipe: Recipe, scaled: Container[Tensor]) -> str | None:
        """See `Kind.why_stays`."""
        names, weights = _names(module), self.weights(module)
        if "forward" in module.__dict__:
            return "its forward is patched"
        if getattr(module, "_is_expert_parallel", False) or any(hasattr(one, "_local_tensor") for one in weights):
            return "ranks share its experts"
        if any(stored_part(one) is not None for one in weights):
            return "its weights are in FP8 already"
        is_known = weights[0].dtype in WEIGHT_DTYPES or weights[0] in scaled
        if not is_known or weights[0].dtype != weights[1].dtype:
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

    def convert(self, name: str, module: torch.nn.Module, swap: Swap) -> dict[str, FP8Experts]:
        """See `Kind.convert`."""
        names = _names(module)
        form = form_of(module, names)
        assert form is not None
        module.__class__ = fp8_class(type(module), tuple(names))
        assert isinstance(module, FP8Experts)
        module.form, module.name, module.home = form, name, Home(name)
        module.token, module._row_multiple = new_token(module), swap.recipe.size_multiple
        module.quantizers = (swap.recipe.grouped_quantizers(), swap.recipe.grouped_quantizers())
        for key in names:
            old: Any = module._parameters[key]
            value, module.weight_dtype = swap.value(old)
            storage = swap.weight if old.requires_grad else StorageDtype.FP8
            layout = form.layout(key)
            value = value if layout is None else layout.to_stored(value)
            new: Any = torch.nn.Parameter(stored(value, storage, module.weight_dtype), old.requires_grad)
            new.home = module.home
            keep_notes(old, new)
            module._parameters[key] = new
            swap.replaced[old] = new
        return {name: module}

    def make_plain(self, module: torch.nn.Module, weights: Sequence[str]) -> None:
        """See `Kind.make_plain`. The forward takes an expert's scale, and does not read it beside a plain weight."""
        for name in weights:
            module.__dict__[f"{name}_scale_inv"] = (None,) * len(getattr(module, name))
        module.__dict__["activation_scheme"] = "dynamic"


def _names(module: torch.nn.Module) -> ExpertNames:
    names = expert_names(module)
    assert names is not None
    return names


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
