from __future__ import annotations

from plora.sim.system.claims import CLAIMS, Claim


def test_the_figures_that_follow_from_stated_parameters_are_met() -> None:
    floors = next(claim for claim in CLAIMS if claim.text.startswith("HBM floor"))
    assert floors.verdict(floors.ours()) == "within 5 %"
    cached = next(claim for claim in CLAIMS if claim.text.startswith("E4's matrices"))
    assert round(cached.ours()[0], 1) == 91.0


def test_the_worst_figure_of_a_row_decides() -> None:
    claim = Claim("-", "two figures", (10.0, 0.0), lambda: [10.0, 0.0])
    assert claim.verdict([10.4, 0.0]) == "within 5 %"
    assert claim.verdict([10.0, 0.09]) == "within 20 %"
    assert claim.verdict([13.0, 0.0]) == "differs"
