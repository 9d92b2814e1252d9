"""Expected waits agree with what dice say."""

from __future__ import annotations

import numpy as np
import pytest

from plora.sim.core.waits import TABLE, geometric, largest_normal, stream_waits


@pytest.mark.parametrize("p", [0.1, 0.3, 0.7])
def test_one_wait_is_geometric(p: float) -> None:
    assert geometric(p) == pytest.approx(p / (1 - p), abs=1e-9)


def test_a_memory_that_is_always_ready_never_waits() -> None:
    assert geometric(0.0, 16) == 0.0
    assert not stream_waits(0.0, 16).any()


@pytest.mark.parametrize(("p", "channels"), [(0.1, 4), (0.3, 4), (0.3, 16), (0.6, 2)])
def test_the_slowest_channel_waits_as_long_as_in_random_trials(p: float, channels: int) -> None:
    rng = np.random.default_rng(1)
    trials = rng.geometric(1 - p, (4000, channels, 100)) - 1
    waits = np.cumsum(trials, axis=2).max(axis=1).mean(axis=0)
    table = stream_waits(p, channels)
    for events in (1, 2, 10, 100):
        assert table[events] == pytest.approx(waits[events - 1], rel=0.03)
    assert table[1] == pytest.approx(geometric(p, channels), rel=1e-6)


@pytest.mark.parametrize(("p", "channels"), [(0.1, 4), (0.3, 16)])
def test_the_normal_limit_continues_the_table(p: float, channels: int) -> None:
    limit = TABLE * p / (1 - p) + largest_normal(channels) * (TABLE * p) ** 0.5 / (1 - p)
    assert stream_waits(p, channels)[TABLE] == pytest.approx(limit, rel=0.02)


def test_largest_of_normals() -> None:
    # Tabulated expected order statistics of 2 and 4 standard normals.
    assert largest_normal(1) == pytest.approx(0.0, abs=1e-6)
    assert largest_normal(2) == pytest.approx(0.5642, abs=2e-4)
    assert largest_normal(4) == pytest.approx(1.0294, abs=2e-4)
