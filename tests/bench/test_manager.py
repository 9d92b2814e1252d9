from __future__ import annotations

import pytest

from tests.bench.manager import COMPOSITIONS, Latency, gaps, latency, main


def test_the_study_counts_gaps_and_times(capsys: pytest.CaptureFixture[str]) -> None:
    for composition in COMPOSITIONS:
        found = gaps(composition, 5)
        assert len(found) == 5 and (found > -1e-9).all() and found.max() < 0.05
    one = latency(32, steps=20)
    assert 0 < one.decision_us < 5000
    assert 5 < one.step_ms < 10
    assert Latency(1, 50.0, 10.0).share == pytest.approx(0.005)
    main(["--cases", "3", "--steps", "5"])
    assert capsys.readouterr().out.count("|---") == 9
