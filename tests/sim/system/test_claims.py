from __future__ import annotations

import math

from plora.sim.system.claims import CLAIMS, Claim


def test_the_figures_that_follow_from_stated_parameters_are_met() -> None:
    floors = next(claim for claim in CLAIMS if claim.text.startswith("HBM floor"))
    assert floors.verdict(floors.ours()) == "within 5 %"
    cached = next(claim for claim in CLAIMS if claim.text.startswith("E4's matrices"))
    assert round(cached.ours()[0], 1) == 91.0


def test_demand_on_the_link_climbs_with_naive_waves_and_falls_with_sharded_ones() -> None:
    naive, sharded = (c.ours() for c in CLAIMS if c.section == "VIII-5" and c.text.startswith("saturating"))
    assert naive[0] < naive[1] < naive[2]
    assert sharded[0] > sharded[1] >= sharded[2]


def test_the_worst_figure_of_a_row_decides() -> None:
    claim = Claim("-", "two figures", (10.0, 0.0), lambda: [10.0, 0.0])
    assert claim.verdict([10.4, 0.0]) == "within 5 %"
    assert claim.verdict([10.0, 0.09]) == "within 20 %"
    assert claim.verdict([13.0, 0.0]) == "differs"
    assert Claim("-", "not stated", (math.nan,), lambda: [1.0]).verdict([1.0]) == "-"
