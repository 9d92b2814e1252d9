"""The benchmark of the simulation runs and measures something."""

from __future__ import annotations

from tests.bench.rtl_rate import measure


def test_rates_are_positive() -> None:
    rates = measure("tiny", layers="layers.0.self_attn.q_proj")
    assert len(rates) == 3
    assert all(rate > 0 for rate in rates.values()), rates
