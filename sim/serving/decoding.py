"""The requests that decode together: their contexts, their adapters, and the manager's decisions about both."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from plora.sim.manager.online import Manager
from plora.sim.serving.outcome import Outcome
from plora.sim.serving.steps import EMPTY, StepTimer
from plora.sim.system.clock import PS_PER_US
from plora.sim.system.config import Resolved
from plora.sim.system.decide import AttentionModel, cost_model
from plora.sim.system.decode import TYPICAL_RANK
from plora.sim.system.fastwave import Wave
from plora.sim.system.spec import STRATEGIES
from plora.sim.system.work import IntArray
from plora.sim.workload.requests import NO_ADAPTER

DECISION_US = 80
"""Processor time of a decision, as measured (`python -m tests.bench.manager`)."""

_NONE = np.zeros(0, dtype=np.int64)


class Decoding:
    """The running requests of one replica.

    Attributes:
        requests: their numbers, in the order in which they began to decode.
        contexts, remaining: (requests,) tokens of each, and tokens still to come.
        near: (requests,) leading tokens whose keys and values the GPU reads from HBM.
        wave: their adapters as a step sees them.
        due: steps until the manager ranks all adapters again, from its last decision on.
        undecided: steps since then.
        owed_ps: transfers and merges that were ordered and that no step has paid for yet.
        merged: the adapter that is added to the weights, or `NO_ADAPTER`.
    """

    def __init__(
        self,
        resolved: Resolved,
        timer: StepTimer,
        *,
        seats: int,
        weight_bytes: int,
        ranks: IntArray,
        adapters: Sequence[int],
        outcome: Outcome,
    ) -> None:
        self._timer, self._spec, self._outcome = timer, timer.spec, outcome
        self._weights, self._ranks, self._adapter = weight_bytes, ranks, adapters
        self.requests: list[int] = []
        self.contexts, self.remaining, self.near = _NONE, _NONE, _NONE
        self.wave: Wave = EMPTY
        self.due = self.undecided = self.owed_ps = 0
        self.merged = NO_ADAPTER
        self.manager = self._make_manager(resolved, seats)
        self._attention = AttentionModel(timer.setting(1))
        self._came: list[int] = []
        self._left: list[int] = []
        self._changed = True

    def __len__(self) -> int:
        return len(self.requests)

    def _make_manager(self, resolved: Resolved, seats: int) -> Manager | None:
        """Return the manager, or None where nothing is to be decided."""
        spec, machine = self._spec, self._timer.machine
        allowed = [STRATEGIES.index(s) for s in spec.adapters.strategies]
        if len(allowed) == 1 and not spec.kv.hbm_copies:
            return None
        model = cost_model(self._timer.setting(min(seats, 64)), resolved.options.composition, TYPICAL_RANK)
        devices = np.arange(len(self._ranks)) % max(1, machine.far_devices)
        budget = float(machine.hbm_budget_bytes - self._weights)
        return Manager(
            model,
            self._ranks,
            devices,
            allowed,
            budget,
            caches_free=spec.adapters.assume_fits,
            decision_time=DECISION_US * PS_PER_US,
        )

    def join(self, request: int, context: int, left: int) -> None:
        """Let `request` decode from now on; `context` counts its newest token, `left` those to come."""
        self.requests.append(request)
        self.contexts = np.append(self.contexts, context)
        self.remaining = np.append(self.remaining, left)
        self.near = np.append(self.near, 0)
        if self._adapter[request] >= 0:
            self._came.append(self._adapter[request])
        self._changed = True

    def remove(self, positions: list[int]) -> None:
        """Take requests out of the batch."""
        self._left += [a for a in (self._adapter[self.requests[p]] for p in positions) if a >= 0]
        keep = np.ones(len(self.requests), dtype=bool)
        keep[positions] = False
        for position in reversed(positions):
            del self.requests[position]
        self.contexts, self.remaining, self.near = self.contexts[keep], self.remaining[keep], self.near[keep]
        self._changed = True

    def grow(self, steps: int) -> list[int]:
        """Give every request `steps` tokens; return the positions of those that have all of theirs."""
        self.contexts = self.contexts + steps
        self.remaining = self.remaining - steps
        self.undecided += steps
        done: list[int] = (self.remaining == 0).nonzero()[0].tolist()
        return done

    def cached(self, adapter: int) -> bool:
        """Return whether both matrices of `adapter` are in HBM."""
        if self._spec.adapters.home == "hbm":
            return adapter >= 0
        return adapter >= 0 and self.manager is not None and int(self.manager.cached[adapter]) == 2

    def decide(self) -> int:
        """Let the manager look at a changed batch, or at one whose time has come; return the time of its loads."""
        served = self.manager
        if served is None:
            if self._changed:
                self._fixed_wave()
                self._changed = False
            return 0
        if not self._changed and self.undecided < self.due:
            return 0
        total = int(np.add.reduce(self.contexts))
        cost = self._attention.cost(len(self.requests), total, self._attended(total))
        change = served.step(self._came, self._left, cost, steps=self.undecided)
        self.undecided, self.due = 0, served.due_in
        self._came, self._left = [], []
        self.near = np.floor(self.contexts * change.kv_share).astype(np.int64)
        ids = served.serving()
        self._new_wave(Wave(served.rows[ids], served.ranks[ids], served.devices[ids], served.strategies[ids]))
        self._changed = False
        gpus = self._timer.machine.gpus
        self._outcome.loaded_bytes += change.loaded_bytes * gpus
        self._outcome.ahead_bytes += change.ahead_bytes * gpus
        return self._timer.load_ps(change.loaded_bytes)

    def _attended(self, total: int) -> float:
        """Return the tokens that a mean layer attends to."""
        work = self._timer.work
        seen = total * work.layers
        for kind in work.kinds:
            if kind.window is not None:
                seen -= kind.count * (total - int(np.minimum(self.contexts, kind.window).sum()))
        return max(seen / work.layers, 1.0)

    def merge(self, requests: Sequence[int]) -> None:
        """Merge the adapter that all `requests` share, or take the merged one out of the weights."""
        if not self._spec.adapters.merge:
            return
        used = {self._adapter[request] for request in requests}
        wanted = used.pop() if len(used) == 1 else NO_ADAPTER
        if wanted != self.merged:
            passes = (self.merged >= 0) + (wanted >= 0)
            self.owed_ps += passes * self._timer.switch_ps(self._weights)
            self.merged = wanted
            self._changed = True

    def owed(self) -> int:
        """Return the time that transfers and merges add to the step that is about to run."""
        time, self.owed_ps = self.owed_ps, 0
        return time

    def _fixed_wave(self) -> None:
        """Set the wave of a system with one strategy."""
        adapters = np.array([self._adapter[r] for r in self.requests], dtype=np.int64)
        ids, rows = np.unique(adapters[(adapters >= 0) & (adapters != self.merged)], return_counts=True)
        strategy = STRATEGIES.index(self._spec.adapters.strategies[0])
        devices = ids % max(1, self._timer.machine.far_devices)
        self._new_wave(Wave(rows, self._ranks[ids], devices, np.full(len(ids), strategy)))
        self.near = np.zeros_like(self.contexts)
        self._came, self._left = [], []

    def _new_wave(self, wave: Wave) -> None:
        old = self.wave
        same = len(old.rows) == len(wave.rows) and all(
            np.array_equal(getattr(old, name), getattr(wave, name))
            for name in ("rows", "ranks", "devices", "strategies")
        )
        if not same:
            self.wave = wave

    def count_strategies(self, steps: int) -> None:
        """Note that every request has taken `steps` steps under its adapter's strategy."""
        counts = np.bincount(self.wave.strategies, weights=self.wave.rows, minlength=len(STRATEGIES))
        steps_of = self._outcome.adapter_steps
        for name, rows in zip(STRATEGIES, counts.tolist(), strict=True):
            if rows:
                steps_of[name] = steps_of.get(name, 0) + int(rows) * steps
