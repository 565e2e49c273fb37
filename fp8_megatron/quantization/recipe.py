"""The FP8 operands of a linear layer's three GEMMs: the format of each role, and the source of its scale.

fprop: y = x·Wᵀ; dgrad: grad_input = g·W; wgrad: grad_weight = gᵀ·x.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from torch import Tensor

from ..formats.format import Format, Roles
from ..formats.recipes import RecipeName, roles_of
from ..kernels import ops
from .amax_history import AmaxHistory
from .cast_health import CastProbe
from .cast_report import Role
from .sources import Cast, Source
from .weight_grad import DelayedGradScale

#: A weight gradient may exceed the amaxes of the last steps by this factor before it saturates.
WEIGHT_GRAD_HEADROOM = 4.0

#: Raises an amax FP32 [1], in place, to its maximum over the ranks that will share the scale.
AmaxSync = Callable[[Tensor], None]


@dataclass(frozen=True)
class Quantizer:
    """Casts one role of one layer. With a history the scale is delayed; otherwise it comes from the values.

    `probe` measures casts on sampled steps; None if nobody samples.
    """

    format: Format
    history: AmaxHistory | None = None
    slot: int = 0
    probe: CastProbe | None = field(default=None, repr=False, compare=False)

    def quantize(self, source: Source[Cast], *, sync: AmaxSync | None = None) -> Cast:
        """Cast `source`.

        Args:
            sync: shares the amax over a tensor-parallel group whose ranks hold parts of one tensor. Not used for
                delayed scales (the history is reduced over that group) and for blocks (ranks share no scales).
        """
        history = self.history
        if history is not None and history.knows(self.slot):
            scale, amax_out = history.scale_of(self.slot), history.record_of(self.slot)
            cast = source.quantize(self.format, scale, amax_out=amax_out)
        else:
            cast = self._cast_by_values(source, sync)
        if self.probe is not None and self.probe.is_due:
            self.probe.measure_source(source, cast)
        return cast

    def _cast_by_values(self, source: Source[Cast], sync: AmaxSync | None) -> Cast:
        history, format = self.history, self.format
        if (sync is None and history is None) or not format.shares_amax:
            return source.quantize(format, None)
        amax = source.amax()
        if sync is not None:
            sync(amax)
        self.record(amax)
        return source.quantize(format, ops.scale_from_amax(amax, format.dtype, power_of_two=format.power_of_two))

    def record(self, amax: Tensor) -> None:
        """Record an amax FP32 [1] of this step, if there is a history: of a cast that takes another scale."""
        if self.history is not None and self.history.record is not None:
            self.history.raise_amax(self.slot, amax)

    def known_scale(self) -> tuple[Tensor, Tensor] | None:
        """The delayed scale FP32 [1], and where to record what the cast saw; None if the values give the scale."""
        if self.history is None or not self.history.knows(self.slot):
            return None
        return self.history.scale_of(self.slot), self.history.record_of(self.slot)

    def slots(self) -> Iterator[int]:
        """Its slot of the history, if it has one."""
        if self.history is not None:
            yield self.slot

    def __str__(self) -> str:
        return f"{self.format}, {'delayed' if self.history is not None else 'current'}"


@dataclass(frozen=True)
class LinearQuantizers:
    """A linear layer's quantisers, by GEMM role. If `weight_grad` is None, the gradient's storage casts it.

    `weight_probe` and `weight_grad_probe` are as `Quantizer.probe`; the storage holds the latter, too.
    """

    input: Quantizer
    weight: Format
    grad_output: Quantizer
    weight_grad: DelayedGradScale | None = None
    weight_probe: CastProbe | None = field(default=None, repr=False, compare=False)
    weight_grad_probe: CastProbe | None = field(default=None, repr=False, compare=False)

    def evaluating(self) -> LinearQuantizers:
        """Those of a forward that does not train the layer, and of its backward: scales come from the values, and the
        history stays."""
        return replace(
            self, input=replace(self.input, history=None), grad_output=replace(self.grad_output, history=None)
        )

    def fallen_back(self, name: RecipeName) -> LinearQuantizers:
        """Those of the layer from now on, if it leaves delayed scaling for another recipe."""
        roles, history = roles_of(name, self.input.format.power_of_two), self.input.history
        assert history is not None, self
        history.leave(self.slots())
        return replace(
            self,
            input=replace(self.input, format=roles.input, history=None),
            weight=roles.weight,
            grad_output=replace(self.grad_output, format=roles.grad_output, history=None),
            weight_grad=None,
        )

    def slots(self) -> Iterator[int]:
        """The layer's slots of the history."""
        yield from self.input.slots()
        yield from self.grad_output.slots()
        if self.weight_grad is not None:
            yield self.weight_grad.slot

    def __str__(self) -> str:
        stored = "by its storage" if self.weight_grad is None else "E4M3 per tensor, delayed"
        return f"input=({self.input}), weight=({self.weight}), grad_output=({self.grad_output}), weight_grad=({stored})"


@dataclass(frozen=True)
class HeadQuantizers:
    """The LM head's casts, by GEMM role. The scale of `grad_output` follows from the upstream gradient.

    `weight_probe` and `grad_output_probe` are as `Quantizer.probe`.
    """

    input: Quantizer
    weight: Format
    grad_output: Format
    weight_probe: CastProbe | None = field(default=None, repr=False, compare=False)
    grad_output_probe: CastProbe | None = field(default=None, repr=False, compare=False)

    def fallen_back(self) -> HeadQuantizers:
        """As `LinearQuantizers.fallen_back`; a head keeps its formats."""
        assert self.input.history is not None, self
        self.input.history.leave(self.slots())
        return replace(self, input=replace(self.input, history=None))

    def slots(self) -> Iterator[int]:
        """The head's slots of the history."""
        return self.input.slots()

    def __str__(self) -> str:
        return f"input=({self.input}), weight=({self.weight}), grad_output=({self.grad_output})"


@dataclass(frozen=True)
class Recipe:
    """Formats and scaling of the GEMMs' operands, shared by all layers of a model chunk.

    `history` is None unless scaling is delayed. `delays_weight_grads`: each weight gradient has a delayed scale too.
    `has_probes`: casts can be measured (`cast_health`).
    """

    name: RecipeName
    power_of_two: bool
    history: AmaxHistory | None = None
    delays_weight_grads: bool = False
    has_probes: bool = False

    @property
    def roles(self) -> Roles:
        """The format of each role."""
        return roles_of(self.name, self.power_of_two)

    @property
    def size_multiple(self) -> int:
        """Both sizes of a weight, and the tokens of a micro-batch, are multiples of this."""
        return self.roles.input.size_multiple

    def linear_quantizers(self) -> LinearQuantizers:
        """Quantisers of a new layer. Under delayed scaling they take two or three slots of the history."""
        roles = self.roles
        return LinearQuantizers(
            self.quantizer(roles.input),
            roles.weight,
            self.quantizer(roles.grad_output, Role.GRAD_OUTPUT),
            self._weight_grad_scale(),
            self._probe(),
            self._probe(),
        )

    def grouped_quantizers(self) -> LinearQuantizers:
        """Quantisers of a linear layer whose rows come in groups, each with a matrix of its own. All groups share the
        scales of input and output gradient. Weight gradients have scales of their own blocks, and no cast of weights is
        measured."""
        roles = self.roles
        return LinearQuantizers(
            self.quantizer(roles.input), roles.weight, self.quantizer(roles.grad_output, Role.GRAD_OUTPUT)
        )

    def head_quantizers(self) -> HeadQuantizers:
        """Quantisers of an LM head. They use one scale per tensor under every recipe, because the kernel that casts the
        logits' gradient writes one. Under delayed scaling they take one slot of the history."""
        roles = roles_of("tensorwise", self.power_of_two)
        return HeadQuantizers(
            self.quantizer(roles.input, Role.HEAD_INPUT), roles.weight, roles.grad_output, self._probe(), self._probe()
        )

    def _probe(self) -> CastProbe | None:
        return CastProbe() if self.has_probes else None

    def _weight_grad_scale(self) -> DelayedGradScale | None:
        if self.history is None or not self.delays_weight_grads:
            return None
        dtype = self.roles.weight_grad.dtype
        slot = self.history.add_slot(dtype, headroom=WEIGHT_GRAD_HEADROOM, role=Role.WEIGHT_GRAD)
        return DelayedGradScale(self.history, slot)

    def quantizer(self, format: Format, role: Role = Role.INPUT, *, headroom: float = 1.0) -> Quantizer:
        """A new quantiser. Under delayed scaling it takes a slot of the history, for a tensor of `role`
        (`AmaxHistory.add_slot`)."""
        if self.history is None:
            return Quantizer(format, probe=self._probe())
        slot = self.history.add_slot(format.dtype, headroom=headroom, role=role)
        return Quantizer(format, self.history, slot, self._probe())
