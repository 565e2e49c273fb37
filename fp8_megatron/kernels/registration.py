"""Registers the ``fp8_megatron::`` operators: one declaration beside each specification.

`operator` decorates a specification, the plain PyTorch function that a variant is tested against. The declaration gives

- the **name** and the **schema**: those of the function. A parameter that is a named tuple is a bundle of operands. The
  specification and the GPU variant get it whole; it is flattened for the dispatcher, which takes single operands;
- the **CPU** implementation: the specification itself;
- the **GPU** implementation: a function of the same name and signature in another module, imported by the first call on
  a GPU, because a machine without one has no Triton;
- the **fake** version, which gives outputs their shapes and dtypes for FakeTensor and torch.compile;
- the **check** of what a caller passes, on every device.

The device of the first operand selects the implementation. A device without a variant is an error that names the
operator; no call falls back to another variant. `callable_of` makes what the rest of the package calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, update_wrapper
from importlib import import_module
from typing import Any, NoReturn, ParamSpec, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling  # noqa: F401 (in _SOURCE)

from ..device.device import UnsupportedDeviceError

NAMESPACE = "fp8_megatron"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")

_Function = TypeVar("_Function", bound=Callable[..., Any])
_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True)
class Operator:
    """A declared operator.

    Attributes:
        reference: its specification.
        gpu_module: the absolute name of the module with the GPU function of the same name; None if there is none.
        mutates: parameters, or fields of bundles, that are written.
        fake: outputs from those arguments that it names; None if the operator returns nothing.
        check: what refuses wrong arguments; it names those that it reads, too.
    """

    reference: Callable[..., Any]
    gpu_module: str | None
    mutates: tuple[str, ...]
    fake: Callable[..., Any] | None
    check: Callable[..., Any] | None = None
    annotations: dict[str, Any] = field(init=False)
    keyword_only: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        hints = get_type_hints(self.reference)
        hints["return"] = None if hints["return"] is type(None) else hints["return"]
        object.__setattr__(self, "annotations", hints)
        parameters = inspect.signature(self.reference).parameters.values()
        keyword_only = tuple(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)
        object.__setattr__(self, "keyword_only", keyword_only)

    @property
    def name(self) -> str:
        """Of the operator in its namespace, and of its functions."""
        return self.reference.__name__

    @property
    def parameters(self) -> dict[str, Any]:
        """Name → type of what the specification takes."""
        return {name: kind for name, kind in self.annotations.items() if name != "return"}

    @property
    def has_bundles(self) -> bool:
        """Whether the dispatcher takes more operands than the specification."""
        return any(_is_bundle(kind) for kind in self.parameters.values())

    def schema(self) -> str:
        """What `torch.library` takes, every written tensor marked."""
        leaves = [leaf for name, kind in self.parameters.items() for leaf in _leaves(kind, (name,))]
        parameters = [inspect.Parameter(_flat_name(path), _POSITIONAL, annotation=kind) for path, kind in leaves]
        mutated = [
            _flat_name(path) for path, kind in leaves if _is_tensor(kind) and not set(path).isdisjoint(self.mutates)
        ]

        def prototype() -> None: ...

        prototype.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            parameters, return_annotation=self.annotations["return"]
        )
        return torch.library.infer_schema(prototype, op_name=self.name, mutates_args=mutated)

    def bundled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, which takes bundles, as the dispatcher calls it."""
        if not self.has_bundles:
            return function
        kinds = tuple(self.parameters.values())

        def call(*operands: Any) -> Any:
            rest = iter(operands)
            return function(*(_take(kind, rest) for kind in kinds))

        return call

    def specification(self, *arguments: Any) -> Any:
        """The specification, in the dtypes that it names: a caller's autocast would round its products to 16 bits."""
        count = len(arguments) - len(self.keyword_only)
        named = dict(zip(self.keyword_only, arguments[count:], strict=True))
        if not torch.is_autocast_enabled("cpu"):
            return self.reference(*arguments[:count], **named)
        with torch.autocast("cpu", enabled=False):
            return self.reference(*arguments[:count], **named)

    def outputs(self, *arguments: Any) -> Any:
        """The fake version."""
        if self.fake is None:
            return None
        given = dict(zip(self.parameters, arguments, strict=True))
        return self.fake(**{name: given[name] for name in _named(self.fake)})

    def gpu_variant(self) -> Callable[..., Any]:
        """Import it.

        Raises:
            UnsupportedDeviceError: there is none, or what it needs is not installed.
        """
        if self.gpu_module is None:
            raise self.unsupported("cuda")
        try:
            module = import_module(self.gpu_module)
        except ImportError as error:
            raise self.unsupported("cuda", f": {error}") from error
        variant: Callable[..., Any] = getattr(module, self.name)
        return variant

    def unsupported(self, device: str, reason: str = "") -> Exception:
        """The error of a call on a device without a variant."""
        there = "cpu" if self.gpu_module is None else "cpu and cuda"
        return UnsupportedDeviceError(
            f"{NAMESPACE}::{self.name} has no variant for {device} tensors{reason}; it has one for {there}"
        )


_POSITIONAL, _EMPTY = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
_operators: dict[str, Operator] = {}


def operator(
    *,
    gpu: str | None,
    fake: Callable[..., Any] | None = None,
    mutates: Sequence[str] = (),
    check: Callable[..., Any] | None = None,
) -> Callable[[_Function], _Function]:
    """Declare the decorated specification as the operator of its name; the function stays as it is.

    The specification takes tensors, lists of tensors, numbers, strings, dtypes, and bundles of these: named tuples,
    which may hold bundles again. Its outputs are new tensors.

    Args:
        gpu: the module of the GPU variant, relative to the specification's (".triton"); None if there is none.
        fake: outputs of the right shapes, dtypes and device, from those of the specification's arguments that it has a
            parameter for; None if it returns nothing.
        mutates: parameters, or fields of bundles, whose tensors are written in place.
        check: called before every call of `callable_of`, with the arguments that it has a parameter for.
    """

    def declare(reference: _Function) -> _Function:
        package = reference.__module__.rpartition(".")[0]
        module = None if gpu is None else _absolute(gpu, package)
        _define(Operator(reference, module, tuple(mutates), fake, check))
        return reference

    return declare


def _define(declared: Operator) -> None:
    name = declared.name
    _operators[name] = declared
    _LIBRARY.define(declared.schema(), tags=torch.Tag.pt2_compliant_tag)
    _LIBRARY.impl(name, declared.bundled(declared.specification), "CPU")
    _LIBRARY.impl(name, declared.bundled(_on_first_call(declared)), "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", declared.bundled(declared.outputs), lib=_LIBRARY)

    def on_another_device(*operands: Any) -> NoReturn:
        raise declared.unsupported(_first_tensor(operands).device.type)

    _LIBRARY.impl(name, on_another_device, "CompositeExplicitAutograd")


def operators() -> dict[str, Operator]:
    """Those declared so far, by name."""
    return dict(_operators)


def callable_of(reference: Callable[_P, _R]) -> Callable[_P, _R]:
    """The operator of a specification, for callers inside this package; it takes what the specification does.

    A plain CUDA tensor goes to its variant directly: the dispatcher would choose the same variant and cost the host 4
    to 8 µs a call. All other cases (tracing, fake tensors, other devices) use the operator.
    """
    declared = _operators[reference.__name__]
    assert declared.reference is reference, reference
    scope: dict[str, Any] = {}
    exec(compile(_source(declared), f"<{NAMESPACE}::{declared.name}>", "exec"), globals(), scope)
    dispatched = getattr(getattr(torch.ops, NAMESPACE), declared.name).default
    call = scope["make"](declared.check, declared.gpu_variant, dispatched)
    call.__kwdefaults__, call.__defaults__ = reference.__kwdefaults__, reference.__defaults__
    made: Callable[_P, _R] = update_wrapper(call, reference)
    return made


#: Written out for each operator, because taking arguments apart at a call costs the host more than the rest of it.
_SOURCE = """
def make(check, gpu_variant, dispatched):
    def on_gpu(*operands):
        nonlocal on_gpu
        on_gpu = gpu_variant()
        return on_gpu(*operands)

    def call({parameters}):
        {check}
        if type({first}) is Tensor and {first}.is_cuda and not is_dynamo_compiling():
            return on_gpu({operands})
        return dispatched({leaves})

    return call
"""


def _source(declared: Operator) -> str:
    signature = inspect.signature(declared.reference)
    parameters = [parameter.replace(annotation=_EMPTY, default=_EMPTY) for parameter in signature.parameters.values()]
    leaves = [".".join(path) for name, kind in declared.parameters.items() for path, _ in _leaves(kind, (name,))]
    first_kind = next(kind for name, kind in declared.parameters.items() for _, kind in _leaves(kind, (name,)))
    return _SOURCE.format(
        parameters=str(signature.replace(parameters=parameters, return_annotation=_EMPTY))[1:-1],
        check=f"check({', '.join(_named(declared.check))})" if declared.check else "",
        first=leaves[0] if first_kind is Tensor else f"{leaves[0]}[0]",
        operands=", ".join(declared.parameters),
        leaves=", ".join(leaves),
    )


def _on_first_call(declared: Operator) -> Callable[..., Any]:
    variant: Callable[..., Any] | None = None

    def call(*arguments: Any) -> Any:
        nonlocal variant
        if variant is None:
            variant = declared.gpu_variant()
        return variant(*arguments)

    return call


def _absolute(module: str, package: str) -> str:
    """``.triton`` in a family's package → its full name."""
    return module if not module.startswith(".") else package + module


def _named(function: Callable[..., Any]) -> tuple[str, ...]:
    """Its parameters."""
    return tuple(inspect.signature(function).parameters)


def _is_bundle(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


def _is_tensor(kind: Any) -> bool:
    """A tensor, a list of them, or one that may be None."""
    return kind is Tensor or Tensor in get_args(kind)


@cache
def _fields(bundle: Any) -> tuple[tuple[str, Any], ...]:
    hints = get_type_hints(bundle)
    return tuple((name, hints[name]) for name in bundle._fields)


def _leaves(kind: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Path and type of every operand that a parameter stands for."""
    if not _is_bundle(kind):
        yield path, kind
        return
    for name, field_kind in _fields(kind):
        yield from _leaves(field_kind, (*path, name))


def _flat_name(path: tuple[str, ...]) -> str:
    """Of an operand in the schema: that of its field, with the bundle's where one holds another."""
    return path[0] if len(path) == 1 else "_".join(path[1:])


def _take(kind: Any, operands: Iterator[Any]) -> Any:
    """The next operands, put together again."""
    if not _is_bundle(kind):
        return next(operands)
    return kind(*(_take(field_kind, operands) for _, field_kind in _fields(kind)))


def _first_tensor(operand: Any) -> Any:
    while isinstance(operand, (tuple, list)):
        operand = operand[0]
    return operand
