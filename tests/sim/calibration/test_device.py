"""The committed comparison of model and RTL is current and within its limits."""

from __future__ import annotations

from collections import Counter

import pytest

from plora.hw.defs.errors import UserError
from plora.hw.defs.status import Status
from plora.sim.calibration import device as calibration
from plora.sim.calibration.device import Comparison, committed, figures, repredicted, stream_of, summary, within_limits
from plora.sim.calibration.device_cases import KINDS, LATENCIES, STALLS, cases
from plora.sim.device.predict import statuses


def test_the_committed_errors_are_within_limits() -> None:
    comparisons = committed()
    for name, count in calibration.CASES.items():
        own = [c for c in comparisons if c.preset == name]
        assert len(own) == count
        assert within_limits(own), figures(own)


def test_the_committed_picture_shows_the_committed_errors() -> None:
    assert calibration.PICTURE.read_text() == calibration.picture(committed())


def test_every_kind_latency_and_stall_was_compared() -> None:
    comparisons = [c for c in committed() if c.preset == "small"]
    found = Counter((c.kind, c.read_latency_cycles, c.stall) for c in comparisons)
    assert set(found) == {(kind, read, stall) for kind in KINDS for read, _ in LATENCIES for stall in STALLS}


def test_the_model_still_predicts_what_was_committed() -> None:
    changed = repredicted(committed())
    assert not changed, f"{len(changed)} predictions changed, e.g. {changed[0]}: run `plora calibrate --write`"


def test_cases_are_legal_but_for_those_meant_not_to_be() -> None:
    for name in ("tiny", "small", "full"):
        for case in cases(name, 24):
            found = Counter(statuses(stream_of(case)))
            assert set(found) <= {Status.OK, Status.SIZE_MISMATCH}, f"{name} {case.number}: {found}"
            assert found[Status.OK]
            if case.kind != "backlog":
                assert found[Status.SIZE_MISMATCH] == 0


def test_the_same_number_is_the_same_case() -> None:
    first, again = (list(cases("small", 12)), list(cases("small", 7, first=5)))
    assert again == first[5:12]


def comparison(rtl: float, model: float) -> Comparison:
    return Comparison(0, "small", "gemv", 40, 0.0, 1, rtl, 0.0, model, 0.0, rtl, model)


@pytest.mark.parametrize(
    ("rtl", "model", "good"),
    [(1000, 1029, True), (1000, 1031, False), (100, 108, True), (100, 109, False), (100, 91, False)],
)
def test_a_case_may_be_off_by_three_percent_or_eight_cycles(rtl: float, model: float, good: bool) -> None:
    assert comparison(rtl, model).within_limits is good


def test_a_mean_error_above_one_percent_is_too_much() -> None:
    assert within_limits([comparison(1000, 1005), comparison(1000, 990)])
    assert not within_limits([comparison(1000, 1012), comparison(1000, 990)])
    found = summary([comparison(1000, 1012), comparison(1000, 990)])
    assert found["mean_abs_error"] == pytest.approx(0.011)
    assert sum(found["histogram_percent"]["counts"]) == 2


def test_a_missing_result_is_named(tmp_path: object) -> None:
    from pathlib import Path

    with pytest.raises(UserError, match="plora calibrate --write"):
        committed(Path(str(tmp_path)) / "none.json")
