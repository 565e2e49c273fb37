"""Layers leave delayed scaling for --fp8-fallback-recipe in mid-run: all at an iteration, or one by one by the health
watch. A run that is resumed goes on with what has left; the amax histories of its checkpoint say so.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch

from ..mcore.lm_head import FP8OutputLayer
from ..mcore.tensor_parallel import FallsBack
from ..reporting.cast_statistics import HealthSample
from ..reporting.run_log import EventKind, event
from .build import TrainingState
from .cast_sampling import fp8_layers

logger = logging.getLogger(__name__)

_Layer = FallsBack | FP8OutputLayer


class RecipeFallback:
    """Changes the recipe of layers between steps. All ranks call it for the same steps, with the same samples.

    Recorded steps are recorded anew (`StepGraph`).

    Args:
        iteration: that the run stands at; layers that had left by then leave at once.
    """

    def __init__(self, state: TrainingState, *, iteration: int) -> None:
        self._state, precision = state, state.config.precision
        self._recipe, self._at = precision.fp8_fallback_recipe, precision.fp8_fallback_iter
        self._most_underflow = precision.fp8_fallback_underflow
        self._interval = state.config.logging.fp8_health_interval
        self._fallen: set[str] = set()
        if self._recipe is None:
            return
        own = {unit for unit, _ in self._layers()}
        self._all = self._over_ranks(own)
        had_left = {unit for unit, layer in self._layers() if _has_left(layer)}
        self._leave(self._over_ranks(had_left), "as before it was saved", iteration)

    def before(self, iteration: int) -> None:
        """Called before an iteration begins."""
        if self._recipe is not None and self._at is not None and iteration >= self._at:
            self._leave(self._all, f"--fp8-fallback-iter {self._at}", iteration)

    def decides_after(self, iteration: int) -> bool:
        """Whether the casts of an iteration say which layers leave. They leave before the next one, whether or not the
        run is saved or ends in between: so a resumed run has the bits of one that was not interrupted."""
        return self._most_underflow is not None and iteration % self._interval == 0

    def sampled(self, sample: HealthSample) -> None:
        """Called with the casts of a sampled step: layers leave that lose too many small values to their outliers."""
        if self._most_underflow is None or not self.decides_after(sample.iteration):
            return
        lost = {
            _unit(cast.name.layer)
            for cast in sample.casts
            if cast.name.role in ("input", "grad_output") and cast.underflowed > self._most_underflow
        }
        self._leave(lost, f"--fp8-fallback-underflow {self._most_underflow:g}", sample.iteration)

    def _layers(self) -> Iterator[tuple[str, _Layer]]:
        """Each layer that a rank holds, with what leaves together with it."""
        for chunk in self._state.model:
            for name, layer in fp8_layers(chunk.module):
                yield _unit(name), layer

    def _over_ranks(self, units: set[str]) -> set[str]:
        """The union over all ranks, whose stages hold different layers."""
        found = [units] * self._state.topology.world_size
        if len(found) > 1:
            torch.distributed.all_gather_object(found, units)
        return set().union(*found)

    def _leave(self, units: set[str], why: str, iteration: int) -> None:
        units = units - self._fallen
        if not units:
            return
        assert self._recipe is not None
        self._fallen |= units
        for unit, layer in self._layers():
            if unit in units and layer.quantizers.input.history is not None:
                layer.fall_back(self._recipe)
        if self._state.sampler is not None:
            self._state.sampler.find_casts()
        if self._state.topology.rank == 0:
            names = ", ".join(sorted(units))
            mark = event(EventKind.FALLBACK, iteration=iteration, layers=sorted(units), recipe=self._recipe)
            logger.warning(
                "iteration %d: fp8_recipe(%s) from now on for %s (%s)", iteration, self._recipe, names, why, extra=mark
            )


def _unit(layer: str) -> str:
    """What changes its recipe together: a transformer layer, or the head. An MLP's activation is cast for both of its
    projections."""
    parts = layer.split(".")
    return ".".join(parts[: parts.index("layers") + 2]) if "layers" in parts else layer


def _has_left(layer: _Layer) -> bool:
    history = layer.quantizers.input.history
    return history is not None and history.left.issuperset(layer.quantizers.slots())
