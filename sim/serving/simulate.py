"""The serving loop: one iteration is one step of the engine, or as many as nothing can interrupt.

No request ends in such steps, none could be admitted, memory suffices, and the manager is not due. They
are advanced together, exactly: the number taken at once changes nothing in the results. Replicas that
share their experts step together, since each needs the others' tokens in every layer; others go on alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from plora.sim.serving.bounds import bound_shares
from plora.sim.serving.options import ServeOptions
from plora.sim.serving.outcome import Outcome, merged
from plora.sim.serving.replica import IDLE_ITERATIONS, NEVER, Plan, Replica
from plora.sim.serving.steps import StepTimer
from plora.sim.system.clock import PS_PER_S
from plora.sim.system.config import Resolved
from plora.sim.system.engine import NoProgressError
from plora.sim.system.spec import SystemSpec
from plora.sim.workload.requests import Requests


class Simulation:
    """One serving run of one system. Requests go to its replicas in turn."""

    def __init__(self, resolved: Resolved, spec: SystemSpec, options: ServeOptions, requests: Requests) -> None:
        """Set everything up.

        Raises:
            UserError: the weights, or a single request, do not fit; experts that cannot be shared out.
        """
        count = min(options.data_parallel_size, len(requests))
        timer = StepTimer(resolved, spec, options.data_parallel_size if options.enable_expert_parallel else 1)
        self._timer = timer
        self._places = [slice(number, None, count) for number in range(count)]
        self._replicas = [Replica(resolved, spec, options, requests.part(place), timer) for place in self._places]
        self._together = options.enable_expert_parallel
        self._count = len(requests)

    def run(self) -> Outcome:
        """Serve every request and return what happened.

        Raises:
            NoProgressError: the loop went round without anything happening.
        """
        for group in [self._replicas] if self._together else [[one] for one in self._replicas]:
            _serve(group)
        for one in self._replicas:
            one.close()
        return merged([one.outcome for one in self._replicas], self._places, self._count)

    def decode_bounds(self) -> dict[str, float]:
        """Return, after the run, what bounded its decode steps: shares of the time of some of them."""
        return bound_shares(self._timer, (one for replica in self._replicas for one in replica.snapshots.kept))


def _serve(replicas: Sequence[Replica]) -> None:
    """Serve every request of `replicas`, which step together."""
    idle = 0
    while True:
        before = [one.state() for one in replicas]
        for one in replicas:
            one.take_arrivals()
        plans = [one.plan() for one in replicas]
        if any(plan is not None for plan in plans):
            _advance(replicas, plans)
        else:
            wake = min(one.next_event() for one in replicas)
            if wake == NEVER and not any(one.waiting for one in replicas):
                return
            if wake != NEVER:
                for one in replicas:
                    one.now = max(one.now, wake)
        idle = idle + 1 if [one.state() for one in replicas] == before else 0
        if idle > IDLE_ITERATIONS:
            where = "; ".join(one.standing() for one in replicas)
            raise NoProgressError(f"serving stands still at {replicas[0].now / PS_PER_S:.3f} s with {where}")


def _advance(replicas: Sequence[Replica], plans: Sequence[Plan | None]) -> None:
    """Let the steps pass that nothing interrupts on any replica; the slowest decides how long each takes."""
    working = [(one, plan) for one, plan in zip(replicas, plans, strict=True) if plan is not None]
    steps = min(plan.most for _, plan in working)
    everyone = sum(one.plan_tokens(plan) for one, plan in working) if len(replicas) > 1 else None
    times = np.maximum.reduce([one.times(plan, steps, everyone) for one, plan in working])
    wake = min(plan.wake for _, plan in working)
    if len(working) < len(replicas):
        wake = min(wake, *(one.next_event() for one, plan in zip(replicas, plans, strict=True) if plan is None))
    now = replicas[0].now
    if wake != NEVER:
        steps = min(steps, int(np.searchsorted(np.cumsum(times) + now, wake, side="left")) + 1)
    for one, plan in zip(replicas, plans, strict=True):
        if plan is not None:
            one.advance(plan, times[:steps])
        else:
            one.now = now + int(times[:steps].sum())
