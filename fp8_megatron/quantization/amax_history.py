"""Delayed scaling: the amax histories of a rank's activations and output gradients, and the scales derived from them
(FP8 Formats for Deep Learning, arXiv 2209.05433, section 5; FP8-LM, arXiv 2310.18313, section 2.1).

One object per model chunk holds all slots in flat tensors. The end of a step therefore costs one all-reduce and a few
small kernels, for any number of layers.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NewType

import torch
from torch import Tensor

from ..device.group import Group
from ..device.memory import HostCopy
from ..dtypes import CLAMPED_ABOVE, MAX_FINITE
from ..kernels import ops
from .cast_report import Role, SlotName, causes

#: Written amaxes of a slot that one step keeps. With more micro-batches, the last ones count.
_WRITTEN_AMAXES = 8
#: FP32 values from one scale to the next: cuBLASLt needs 16-byte alignment.
_STRIDE = 4
#: A step is skipped if a cast clamps more than this fraction of a tensor (docs/fp8_health.md). Normal values that
#: grow by a factor of 5 between two steps reach it; in the first steps of a small model, 1% is an everyday event.
MOST_SATURATED = 0.5
#: Steps within which another cast of that kind is no accident: its amaxes count. From the third on the step counts too.
RECURS_WITHIN = 16
#: Steps after which slots that still saw no value are not waited for (`AmaxHistory.is_settled`).
_SETTLED = 16
#: Roles of tensors that are in proportion to the gradient of the loss.
_OF_GRADIENTS = (Role.GRAD_OUTPUT, Role.WEIGHT_GRAD, Role.ATTENTION_GRAD)

#: FP32 [1], the squares of a step's gradients, to which `AmaxHistory.examine` adds what casts saw. Ranks sum theirs in
#: place. Finite: the step counts. inf: it is skipped, and its amaxes are kept, for the next scales to fit. NaN: it is
#: skipped, and its amaxes are dropped.
SquareSum = NewType("SquareSum", Tensor)


class AmaxHistory:
    """Amaxes of the last `length` steps for a set of slots, and each slot's current scale.

    Slots are added while the model is built; `allocate` then makes the tensors. Within a step, each slot's record
    collects the amaxes of all micro-batches and of recomputed forwards, so a recomputed forward sees the same scale.
    `examine` looks at the records before the gradient norm is reduced, and `update` closes the step.

    A slot is cold until a closed step has seen a value other than 0 in it. It has no scale then, on the device inf, and
    quantisers use current scaling (`knows`). The host learns of a slot's first value one step late, because it waits
    for no step. The first step of all is the exception: the next one's casts depend on it.

    Args:
        length: steps.
        algo: the amax of a scale: the largest of the history, or the last.
        power_of_two: scales are rounded up to powers of two.
        margin: the format's largest value represents 2 to this power times the amax, in every slot at least.
    """

    def __init__(
        self, length: int, algo: Literal["max", "most_recent"], *, power_of_two: bool, margin: int = 0
    ) -> None:
        self.length = length
        self.margin = margin
        self.algo = algo
        self.power_of_two = power_of_two
        #: Whether a step has been closed.
        self.is_warm = False
        #: By slot, whether the host knows that it has a scale.
        self._known: list[bool] = []
        #: Slots whose layers have left delayed scaling (`leave`).
        self.left: set[int] = set()
        #: Slots that were cast without a delayed scale.
        self._cast_cold: set[int] = set()
        #: Closed steps since a slot has become known.
        self._num_unchanged = 0
        #: The scales behind the last step, on their way to the host; None if it knows every slot's.
        self._scales_of_last_step: HostCopy | None = None
        #: The slots' names, in the order in which they are blamed (`cast_report.causes`). `allocate` sets it.
        self.suspects: list[SlotName] = []
        #: FP32, the last result of `examine`; see `kernels.scales.reference.examine_records_`.
        self.report: Tensor | None = None
        self._keeps_addresses = False
        self._largest: list[float] = []
        self._clamped_above: list[float] = []
        self._names: list[tuple[int, SlotName]] = []
        self.record: Tensor | None = None
        #: FP32 [num_slots], this step's scales (a view).
        self.scale: Tensor | None = None
        self.history: Tensor | None = None
        self._examined: Tensor | None = None
        self._fp_max: Tensor | None = None
        self._amaxes: Sequence[Tensor] = ()
        self._records: Sequence[Tensor] = ()
        self._scales: Sequence[Tensor] = ()
        self._inverses: Sequence[Tensor] = ()
        self._padded_scales = self._padded_inverses = torch.empty(0)
        self._written: Tensor | None = None
        self._written_amaxes: Sequence[Iterator[Tensor]] = ()
        self._num_written: list[int] = []
        self._leaders: dict[int, int] = {}

    def add_slot(self, dtype: torch.dtype, *, headroom: float = 1.0, role: Role = Role.INPUT) -> int:
        """Reserve a slot for a tensor quantised to `dtype`; returns its index.

        Args:
            headroom: the format's largest value represents this many times the amax seen, or 2 to the power of `margin`
                times if that is more.
            role: what the tensor is to its layer.
        """
        assert self.record is None, "slots are added before allocate()"
        slot = len(self._largest)
        self._largest.append(MAX_FINITE[dtype] / max(headroom, 2.0**self.margin))
        self._clamped_above.append(CLAMPED_ABOVE[dtype])
        self._names.append((slot, SlotName(f"the layer of slot {slot}", role)))
        return slot

    def name_layers(self, layers: Mapping[str, Sequence[int]]) -> None:
        """Name the slots for messages, before `allocate`.

        Args:
            layers: a layer's name in the whole model → its slots; in the order in which forward runs the layers.
        """
        for position, (layer, slots) in enumerate(layers.items()):
            for slot in slots:
                self._names[slot] = (position, SlotName(layer, self._names[slot][1].role))

    def allocate(self, device: torch.device) -> None:
        """Make the tensors: record FP32 [num_slots, 4], scales and fp_max FP32 [num_slots], history FP32 [length,
        num_slots]."""
        num_slots = len(self._largest)
        self.record = torch.zeros(num_slots, ops.RECORD_SIZE, device=device)
        self._amaxes = self.record[:, :1].unbind()
        self._records = self.record[:, :3].unbind()
        self._take_scales(*_padded(torch.full((num_slots,), math.inf, device=device)))
        self._known = [False] * num_slots
        self.history = torch.zeros(self.length, num_slots, device=device)
        self._fp_max = torch.tensor(self._largest, device=device)
        self._limits = torch.full((num_slots,), math.inf, device=device)
        blamed = causes(self._names)
        self.suspects = [self._names[slot][1] for slot in blamed]
        order = sorted(range(num_slots), key=blamed.__getitem__)
        self._order = torch.tensor([place + 1 for place in order], dtype=torch.int32, device=device)
        self._roles = torch.tensor([name.role for _, name in self._names], dtype=torch.int32, device=device)
        self._streak = torch.zeros(1, device=device)
        self._square_sum: SquareSum | None = None
        self._written = torch.zeros(num_slots, _WRITTEN_AMAXES, _STRIDE, device=device)
        self._written_amaxes = [itertools.cycle(places[:, :1].unbind()) for places in self._written]
        self._num_written = [0] * num_slots

    @property
    def num_slots(self) -> int:
        """Slots added so far."""
        return len(self._largest)

    def knows(self, *slots: int) -> bool:
        """Whether all of these slots have a delayed scale. If not, their tensors' values give the scales."""
        return all(self._known[slot] for slot in slots)

    @property
    def num_known(self) -> int:
        """How many slots have a delayed scale."""
        return sum(self._known)

    @property
    def is_settled(self) -> bool:
        """Whether the next steps are expected to cast as this one: they may be recorded."""
        return not self.num_slots or (self.is_warm and (not self.has_cold_casts or self._num_unchanged >= _SETTLED))

    @property
    def has_cold_casts(self) -> bool:
        """Whether a tensor was cast whose slot has no delayed scale yet. Slots that nobody uses do not count."""
        return not self.knows(*self._cast_cold)

    @property
    def amax(self) -> Tensor:
        """FP32 [num_slots], the amaxes recorded in this step so far (a view)."""
        assert self.record is not None, "allocate() comes first"
        return self.record[:, 0]

    def amax_of(self, slot: int) -> Tensor:
        """FP32 [1], where this step's amax of `slot` is recorded (a view)."""
        return self._amaxes[slot]

    def record_of(self, slot: int) -> Tensor:
        """FP32 [3], where a cast of `slot` records what it saw (a view; `kernels.quantize.reference.record_`)."""
        return self._records[slot]

    def raise_amax(self, slot: int, amax: Tensor) -> None:
        """Record an amax of `slot` in this step, FP32 [1], of a cast that takes another scale."""
        self._cast_cold.add(slot)
        recorded = self.amax_of(slot)
        torch.maximum(recorded, amax, out=recorded)

    def follow(self, slot: int, leader: int) -> None:
        """From now on `slot` is for a tensor that `leader` casts too: each step raises its amax to the leader's. So its
        history is as if it had cast the tensor itself.
        """
        self._leaders[slot] = leader

    def stop_following(self, slot: int) -> None:
        """`slot` casts for itself again."""
        self._leaders.pop(slot, None)

    def leave(self, slots: Iterable[int]) -> None:
        """The layers of these slots take scales from values from now on. Nobody waits for the slots, and a run that is
        resumed with delayed scales for them begins with cold ones."""
        self.left.update(slots)
        self._cast_cold -= self.left

    def written_amax_of(self, slot: int) -> Tensor:
        """FP32 [1], where a GEMM writes an amax of `slot` instead of raising one; each call gives another place."""
        if self._num_written[slot] == _WRITTEN_AMAXES:
            self._keep_non_finite()
        self._num_written[slot] += 1
        return next(self._written_amaxes[slot])

    def _keep_non_finite(self) -> None:
        """Mark the slots with a written amax that is not finite, before the amax is overwritten."""
        assert self.record is not None and self._written is not None
        # 0 · x is NaN where x is not finite. abs: atomic maxima of casts order magnitudes by their bits.
        self.record[:, 0].add_((self._written[:, :, 0].amax(dim=1) * 0.0).abs_())
        self._num_written = [0] * len(self._num_written)

    def inverse_of(self, slot: int) -> Tensor:
        """FP32 [1], 1 / `scale_of`, with the same alignment."""
        return self._inverses[slot]

    def scale_of(self, slot: int) -> Tensor:
        """FP32 [1], the scale of `slot` in this step, 16-byte aligned for cuBLASLt.

        Each step has its scales in new memory, so a late backward still reads the scale of its forward. After
        `keep_addresses` the memory stays the same.
        """
        return self._scales[slot]

    def keep_addresses(self) -> None:
        """Keep the scales of all following steps in the same memory, for a recorded step. No backward may be late."""
        self._keeps_addresses = True

    def _take_scales(self, scales: Tensor, inverses: Tensor) -> None:
        """Scales for the next step and their reciprocals, FP32 [num_slots, _STRIDE] in column 0."""
        if self._keeps_addresses:
            self._padded_scales.copy_(scales)
            self._padded_inverses.copy_(inverses)
            return
        self._padded_scales, self._padded_inverses, self.scale = scales, inverses, scales[:, 0]
        self._scales, self._inverses = scales[:, :1].unbind(), inverses[:, :1].unbind()

    def examine(self, square_sum: SquareSum) -> None:
        """Look at the records of this step: sets `report`. Call it once a step, before the gradient norm is reduced.

        Args:
            square_sum: this rank's part. A number that is not finite is added if a cast saw one, or clamped more than
                `MOST_SATURATED` of a tensor. Ranks sum it in place behind this call, and `update` reads it there.
        """
        if self.record is None or not self._largest:
            return
        self._square_sum = square_sum
        assert self._written is not None
        if self._leaders:
            amaxes = self._amaxes
            torch._foreach_maximum_(
                [amaxes[slot] for slot in self._leaders], [amaxes[slot] for slot in self._leaders.values()]
            )
        self._examined, self.report = ops.examine_records_(
            self.record,
            self._written,
            self._padded_scales,
            self._limits,
            self._roles,
            self._order,
            square_sum,
            self._streak,
            num_roles=len(Role),
            most_saturated=MOST_SATURATED,
            recurs_within=RECURS_WITHIN,
        )

    def share_amaxes(self, group: Group) -> None:
        """MAX of the amaxes of this step over `group`, behind `examine`. `update` does so with one group. Also of
        whether a step clamped too much, so that another one is told from the first on all ranks."""
        if self._examined is not None:
            shared = torch.cat([self._examined, self._streak])
            torch.distributed.all_reduce(shared, op=torch.distributed.ReduceOp.MAX, group=group)
            self._examined = shared[:-1]
            self._streak.copy_(shared[-1:])

    def update(self, group: Group | None, square_sum: SquareSum | None = None) -> None:
        """Close a step: MAX of the amaxes over `group`, push them into the history, take the new scales.

        The sum of squares says whether the amaxes count. Before the history is warm the host reads it, because the
        next step's casts depend on it, and an inf drops the amaxes too. Later it never does.

        Args:
            group: the ranks that share these tensors or hold replicas of the layer: tensor × data parallel. It excludes
                the pipeline, because its stages hold other layers.
            square_sum: the ranks' sum, or its root; None: what `examine` was given. Without both the step counts.
        """
        if self.record is None or not self._largest:
            return
        if self._examined is None:  # nobody has asked: the step counts
            self.examine(SquareSum(torch.zeros(1, device=self.record.device)))
            self._square_sum = SquareSum(torch.zeros(1, device=self.record.device))
        square_sum = self._square_sum if square_sum is None else square_sum
        assert self.history is not None and self._fp_max is not None and self._written is not None
        assert self._examined is not None and square_sum is not None
        # On the meta device, where a build counts memory, there are no values.
        if not self.is_warm and not self.record.is_meta and not bool(square_sum.isfinite()):
            self._examined = None
            self.discard_current_step()
            return
        if group is not None and group.size() > 1:
            self.share_amaxes(group)
        amax, self._examined = self._examined, None
        scales = ops.update_amax_history_(
            amax,
            self.record,
            self._written,
            self.history,
            self._fp_max,
            self._padded_scales,
            square_sum,
            keeps_largest=self.algo == "max",
            power_of_two=self.power_of_two,
        )
        self._take_scales(*scales)
        self._num_written = [0] * len(self._num_written)
        self._learn()

    def _learn(self) -> None:
        """Learn which slots have seen a value: behind the first step at once, later a step late."""
        is_first, self.is_warm = not self.is_warm, True
        self._num_unchanged += 1
        assert self.scale is not None
        if self.scale.is_meta:
            self._know([True] * self.num_slots)
        if self.num_known == self.num_slots:
            return
        before, self._scales_of_last_step = self._scales_of_last_step, HostCopy(self.scale)
        latest = self._scales_of_last_step if is_first else before
        if latest is not None:
            self._know([scale < math.inf for scale in latest.read()])
        if self.num_known == self.num_slots:
            self._scales_of_last_step = None

    def _know(self, known: list[bool]) -> None:
        """Take on which slots have a scale."""
        if known != self._known:
            self._known, self._num_unchanged = known, 0
            limits = [limit if has else math.inf for limit, has in zip(self._clamped_above, known, strict=True)]
            self._limits = torch.tensor(limits, device=self._limits.device)

    def discard_current_step(self) -> None:
        """Forget what was recorded since the last update (a validation pass)."""
        if self.record is not None and self._written is not None:
            self.record.zero_()
            self._written.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """All that the next step reads, for a checkpoint, FP32; empty without slots: history, scales (1 where there is
        none), which slots have a delayed scale (`knows`; 2: `left`; −1 before the first step), and for how many steps
        another one that clamps too much is no accident. All ranks that share the amaxes have the same."""
        if self.history is None or self.scale is None or not self._largest:
            return {}
        states = [2.0 if slot in self.left else float(known) for slot, known in enumerate(self._known)]
        known = torch.tensor(states if self.is_warm else [-1.0] * self.num_slots, device=self.scale.device)
        scale = self.scale.nan_to_num(posinf=1.0)
        return {"history": self.history, "scale": scale, "known": known, "streak": self._streak}

    def slot_keys(self) -> Tensor:
        """int64 [num_slots], what each slot is for: a checksum of its layer, its role, and its number among these."""
        numbers: Counter[str] = Counter()
        keys = []
        for _, name in self._names:
            text = f"{name.layer} {name.role.name}"
            keys.append(zlib.crc32(f"{text} {numbers[text]}".encode()))
            numbers[text] += 1
        return torch.tensor(keys, dtype=torch.int64, device="cpu")

    def load_state_dict(self, state: dict[str, Tensor], *, gradient_factor: float = 1.0) -> None:
        """Restore the result of `state_dict`.

        Args:
            gradient_factor: a power of two by which gradients are now larger than when they were recorded.
        """
        if not state:
            return
        assert self.history is not None and self.scale is not None
        factors = torch.tensor(
            [gradient_factor if name.role in _OF_GRADIENTS else 1.0 for _, name in self._names], device="cpu"
        )
        history, scale = (state[key].cpu() * factors for key in ("history", "scale"))
        saved = state.get("known", torch.tensor([-1.0])).cpu()
        has_left = (saved == 2.0).expand(self.num_slots)
        history = history.masked_fill(has_left, 0.0)
        has_value = (history.isfinite() & (history > 0.0)).any(dim=0)
        known = saved == 1.0
        if bool((saved < 0.0).any()):  # of an earlier version, or of a run before its first step
            known = has_value | ((scale != factors) & (scale > 0.0))  # without a value it was 1, or 0
            if not known.any():
                return
        self.history.copy_(history)
        self._take_scales(*_padded(torch.where(known | has_value, scale, math.inf).to(self.scale)))
        self._streak.copy_(state.get("streak", torch.zeros(1)))
        self._know(known.tolist())
        self._scales_of_last_step = None if bool(known.all()) else HostCopy(self.scale)
        self.left = {*has_left.nonzero().flatten().tolist()}
        self.is_warm = True


def _padded(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Scales FP32 [n] and their reciprocals, FP32 [n, _STRIDE] each."""
    columns = [torch.nn.functional.pad(value[:, None], (0, _STRIDE - 1)) for value in (scale, scale.reciprocal())]
    return columns[0], columns[1]
