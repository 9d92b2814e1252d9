from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plora.sim.serving.bounds import MOST, Snapshots, _limits, bound_shares
from plora.sim.serving.options import ServeOptions
from plora.sim.serving.simulate import Simulation
from plora.sim.serving.steps import EMPTY, StepTimer
from plora.sim.system.config import RunOptions, resolve
from plora.sim.workload.popularity import Popularity
from plora.sim.workload.requests import synthetic


class Growing:
    """A batch of one request with one token more at every step."""

    def __init__(self, first: int) -> None:
        self.contexts = np.array([first])
        self.near, self.wave = np.zeros(1, dtype=np.int64), EMPTY


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_the_same_steps_are_kept_however_many_pass_at_once(pieces: list[int]) -> None:
    many, one = Snapshots(), Snapshots()
    passed = 0
    for steps in pieces:
        many.note(passed, steps, Growing(passed))  # type: ignore[arg-type]
        for k in range(steps):
            one.note(passed + k, 1, Growing(passed + k))  # type: ignore[arg-type]
        passed += steps
    found = [int(s.contexts[0]) for s in many.kept]
    assert found == [int(s.contexts[0]) for s in one.kept]
    assert 1 <= len(found) < MOST
    assert len({b - a for a, b in pairwise(found)}) <= 1, "evenly spaced"
    assert found[0] == 0 and passed - found[-1] <= max(passed // 2 + 1, 1)


@pytest.mark.parametrize(("system", "limit"), [("plora", "hbm"), ("plora-nocxl", "host launches"), ("ns", "link up")])
def test_shares_say_what_the_decode_steps_waited_for(system: str, limit: str) -> None:
    resolved = resolve(RunOptions(systems=(system,), num_adapters=100))
    requests = synthetic(
        count=30, rate_per_s=50.0, popularity=Popularity("uniform", 100), input_tokens=200, output_tokens=40
    )
    simulation = Simulation(resolved, resolved.systems[0], ServeOptions(), requests)
    assert simulation.decode_bounds() == {}
    simulation.run()
    shares = simulation.decode_bounds()
    assert next(iter(shares)) == limit
    assert sum(shares.values()) == pytest.approx(1.0)


def test_a_step_that_is_played_takes_what_the_timer_says() -> None:
    resolved = resolve(RunOptions(num_adapters=50))
    timer = StepTimer(resolved, resolved.systems[0])
    snapshots = Snapshots()
    batch = Growing(500)
    snapshots.note(0, 1, batch)  # type: ignore[arg-type]
    played = sum(_limits(timer, snapshots.kept[0]).values())
    assert played == int(timer.decode_ps(batch.contexts, batch.near, batch.wave, 1)[0])
    assert bound_shares(timer, []) == {}
