"""`torch.nn.Linear` and transformers' ``Conv1D`` become FP8 layers."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch import Tensor

from ..errors import UserError
from ..nn.conv1d import FP8Conv1D
from ..nn.derived import fp8_class, multiplies_as_linear
from ..nn.module import NO_TENSOR_PARALLELISM, FP8Linear
from ..quantization.recipe import Recipe
from ..quantization.weight_shards import stored_part
from .module_swap import Kind, Swap, check_dtype, has_hooks
from .optimizer import is_sharded

#: What compressed-tensors adds to a layer: a forward that casts, and notes for it.
_ATTRIBUTES = ("forward", "quantization_scheme", "quantization_status", "quantization_enabled")


class TorchLinear(Kind):
    """`torch.nn.Linear`, and classes derived from it that multiply as it does."""

    stored_as = frozenset(("Linear", "FP8Linear", "FbgemmFp8Linear", "CompressedLinear", "CompressedTensorsFP8Linear"))
    #: Whether the weight is [in_features, out_features].
    is_transposed = False

    def finds(self, module: torch.nn.Module) -> bool:
        """See `Kind.finds`."""
        return isinstance(module, torch.nn.Linear)

    def weights(self, module: torch.nn.Module) -> Sequence[torch.nn.Parameter]:
        """See `Kind.weights`."""
        weight = module._parameters["weight"]
        return [] if weight is None else [weight]

    def why_other(self, module: torch.nn.Module) -> str | None:
        """See `Kind.why_other`."""
        if not self._multiplies(module):
            return f"the forward of {type(module).__name__} is not F.linear(x, weight, bias), even without its casts"
        if module._parameters.get("weight") is None:
            return "its weight is computed by a hook"
        return "its forward is patched" if "forward" in module.__dict__ else None

    def _multiplies(self, module: torch.nn.Module) -> bool:
        return multiplies_as_linear(module) or is_plain_again(module)

    def why_stays(self, name: str, module: torch.nn.Module, recipe: Recipe, scaled: Container[Tensor]) -> str | None:
        """See `Kind.why_stays`."""
        (weight,) = self.weights(module)
        if is_sharded(weight):
            raise UserError(
                f"{name}.weight is a DTensor already: call replace_linears before fully_shard (docs/fsdp2.md). "
                f"{NO_TENSOR_PARALLELISM}"
            )
        if weight.is_complex():
            return "its weight is complex"
        if self.is_transposed and has_hooks(weight):
            return "a hook waits for its weight's gradient, which FP8 has transposed"
        if weight not in scaled:
            check_dtype(f"{name}.weight", weight)
        for size in weight.shape:
            if size % recipe.size_multiple or not size:
                return f"its size {size} is not a multiple of {recipe.size_multiple}"
        return None

    def convert(self, name: str, module: torch.nn.Module, swap: Swap) -> dict[str, FP8Linear]:
        """See `Kind.convert`. Layers that share a weight share the new one."""
        old, bias = module._parameters.pop("weight"), module._parameters.pop("bias", None)
        assert old is not None
        if not isinstance(module, FP8Linear):
            module.__class__ = self._fp8_class(module)
            assert isinstance(module, FP8Linear)
        shared = swap.replaced.get(old)
        swap.give_weight(module, name, old, bias, old.detach().t() if self.is_transposed else None)
        if shared is not None:
            module.hold(shared)
            swap.replaced[old] = shared
        return {name: module}

    def _fp8_class(self, module: torch.nn.Module) -> type[FP8Linear]:
        return fp8_class(type(module))

    def make_plain(self, module: torch.nn.Module, weights: Sequence[str]) -> None:
        """See `Kind.make_plain`."""
        for name in _ATTRIBUTES:
            module.__dict__.pop(name, None)
        module.__class__ = torch.nn.Linear


class TransformersConv1D(TorchLinear):
    """transformers' ``Conv1D``, which multiplies with a transposed weight."""

    stored_as = frozenset()
    is_transposed = True

    def finds(self, module: torch.nn.Module) -> bool:
        """See `Kind.finds`."""
        # By name, because transformers need not be installed.
        return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"

    def _multiplies(self, module: torch.nn.Module) -> bool:
        return True

    def _fp8_class(self, module: torch.nn.Module) -> type[FP8Linear]:
        return FP8Conv1D


def is_plain_again(module: torch.nn.Module) -> bool:
    """Whether `module` is a copy of an FP8 layer that kept its class, with a plain weight (`FP8Linear.plain_class`)."""
    weight = module._parameters.get("weight")
    return isinstance(module, FP8Linear) and weight is not None and stored_part(weight) is None
