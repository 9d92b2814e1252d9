"""The benchmark of the front end runs, and what docs/architecture.md says of shares and turns is so."""

from __future__ import annotations

import pytest

from plora.hw.defs.config import preset
from tests.bench.front import measure_share, measure_turns

TINY = preset("tiny")


@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (1, 7)])
def test_turns_are_as_the_weights(weights: tuple[int, int]) -> None:
    shares = measure_turns(TINY, weights, cycles=3000)
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - weight / sum(weights)) < 0.02, shares


def test_the_share_register_moves_bandwidth_between_core_and_host_and_starves_neither() -> None:
    core_first, host_first = measure_share(TINY, 0, 1), measure_share(TINY, 8, 0)
    assert core_first.core > 1.3 * host_first.core and host_first.host > 1.3 * core_first.host
    for one in (core_first, host_first):
        assert one.core > 1 and one.host > 1, one
    # A bound on the host costs the core nothing.
    assert core_first.core_alone == pytest.approx(measure_share(TINY, 0, 0).core_alone, rel=0.02)
