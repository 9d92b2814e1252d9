"""What bounds the decode steps of a serving run: a few of them, evenly spaced, played as events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from plora.sim.serving.decoding import Decoding
from plora.sim.serving.steps import StepTimer
from plora.sim.system.compose import StepModel
from plora.sim.system.fastwave import Wave
from plora.sim.system.tasks import Load
from plora.sim.system.work import Batch, IntArray, Placement, Serving

MOST = 4
"""Steps that are kept of a run; then every second one goes, and twice as many lie between the next."""


@dataclass(frozen=True)
class Snapshot:
    """One decode step: contexts and copied tokens of its requests (requests,), and their adapters."""

    contexts: IntArray
    near: IntArray
    wave: Wave


@dataclass
class Snapshots:
    """Evenly spaced decode steps of a run whose length is not known before, however many pass at once."""

    kept: list[Snapshot] = field(default_factory=list)
    _stride: int = 1
    _next: int = 0

    def note(self, passed: int, steps: int, batch: Decoding) -> None:
        """Keep those of the next `steps` decode steps that are due; `passed` came before."""
        while self._next < passed + steps:
            grown = batch.contexts + (self._next - passed)
            self.kept.append(Snapshot(grown, batch.near, batch.wave))
            if len(self.kept) == MOST:
                self.kept = self.kept[::2]
                self._next += self._stride
                self._stride *= 2
            else:
                self._next += self._stride


def bound_shares(timer: StepTimer, snapshots: Iterable[Snapshot]) -> dict[str, float]:
    """Return the share of the steps' time that each limit took, largest first."""
    limits: dict[str, int] = {}
    for snapshot in snapshots:
        for limit, time in _limits(timer, snapshot).items():
            limits[limit] = limits.get(limit, 0) + time
    total = sum(limits.values())
    ordered = sorted(limits.items(), key=lambda item: (-item[1], item[0]))
    return {limit: time / total for limit, time in ordered} if total else {}


def _limits(timer: StepTimer, snapshot: Snapshot) -> dict[str, int]:
    """Play one step, and return its time by what bounded it."""
    wave, rows = snapshot.wave, len(snapshot.contexts)
    served = Serving(np.arange(len(wave.rows)), wave.rows, wave.ranks, wave.devices)
    batch = Batch(snapshot.contexts, np.full(rows, -1, dtype=np.int64))
    load = Load(batch, served, Placement(wave.strategies, snapshot.near))
    return StepModel(timer.setting(rows), [load], "dependency").step().demand.limit_ps
