"""The benchmark of the host runs and measures something."""

from __future__ import annotations

from tests.bench.host import measure


def test_every_rate_is_positive() -> None:
    rates = measure(rounds=1, descriptors=20)
    assert len(rates) == 12
    assert all(rate > 0 for rate in rates.values()), rates
