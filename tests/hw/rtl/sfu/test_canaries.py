"""Deliberate faults in the SFU's sources: each must be seen by a test of this folder, or that test is blind."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from plora.hw.rtl.sfu import exp2_fraction, p_scaler, score_scale, unit_maximum, unit_sum, weight_round
from tests.hw.rtl.formal import mutated
from tests.hw.rtl.sfu import test_units


class Fault(NamedTuple):
    """A change of one line of a component's module, and what must fail of it."""

    module: types.ModuleType
    component: str
    right: str
    wrong: str
    run: Callable[[], Any]


FAULTS = {
    "the sign of t lost in its floor": Fault(
        score_scale, "ScoreScale", "Mux(negative & ~uneven, following, here)", "Mux(negative, following, here)",
        lambda: test_units.test_scores_are_scaled_to_floor_ceiling_and_fraction("moderate"),
    ),
    "a t of 32767 taken for finite": Fault(
        score_scale, "ScoreScale", "integer.all() | ", "",
        lambda: test_units.test_scores_are_scaled_to_floor_ceiling_and_fraction("special"),
    ),
    "the drain's overflow believed of a finite score": Fault(
        score_scale, "ScoreScale", "exists & overflowed & (score.infinite | score.nan)",
        "exists & overflowed",
        lambda: test_units.test_scores_are_scaled_to_floor_ceiling_and_fraction("special"),
    ),
    "the scale of the cycle before": Fault(
        score_scale, "ScoreScale", "Cat(fraction, Const(1, 1))", "Cat(delayed(m, 'old', fraction, 1), Const(1, 1))",
        lambda: test_units.test_scores_are_scaled_to_floor_ceiling_and_fraction("any"),
    ),
    "the line without its offset's lowest bit": Fault(
        exp2_fraction, "Exp2Fraction", "in enumerate(offset)]", "in enumerate(offset) if place]",
        test_units.test_exp2_is_table_and_line,
    ),
    "ties rounded away from even": Fault(
        weight_round, "WeightRound", "(rest_register[0] | kept_register[0])", "1",
        test_units.test_exponentials_are_rounded_once,
    ),
    "a far smaller number wraps": Fault(
        weight_round, "WeightRound", "~finite | down[5:].any()", "~finite",
        test_units.test_exponentials_are_rounded_once,
    ),
    "a number that is larger than one other taken for the largest": Fault(
        unit_maximum, "UnitMaximum", ".all().replicate", ".any().replicate",
        lambda: test_units.test_the_largest_of_any_count(5),
    ),
    "a NaN counted in the sum": Fault(
        unit_sum, "UnitSum", "normal & ~exponent[-1]", "normal",
        lambda: test_units.test_p_are_summed_exactly(4),
    ),
    "a subnormal one place too high": Fault(
        unit_sum, "UnitSum", "(exponent - normal)", "exponent",
        lambda: test_units.test_p_are_summed_exactly(2),
    ),
    "a subnormal rescaled as a normal number": Fault(
        p_scaler, "PScaler", "- normal - self.delta", "- self.delta",
        lambda: test_units.test_p_are_brought_to_the_last_anchor("two"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_deliberate_fault_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    fault.run()  # it passes as it should
    faulty = mutated(fault.module, fault.right, fault.wrong)
    monkeypatch.setattr(test_units, fault.component, getattr(faulty, fault.component))
    with pytest.raises(AssertionError):
        fault.run()
