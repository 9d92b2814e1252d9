"""The p scaler, compiled, against the golden function: every p and every growth of the anchor."""

from __future__ import annotations

import numpy as np
import pytest

from plora.sim.golden.softmax import NO_ANCHOR, rescale_weights
from tests.hw.rtl.pe.compiled import Array
from tests.hw.rtl.sfu.bench import CONFIGS
from tests.hw.rtl.sfu.compiled import SfuUnits

EVERY_P = np.append(np.arange(0x3C01), 0x7E00).astype(np.uint16)


def check(units: SfuUnits, name: str, p: Array, anchors: Array, last: Array, stall: float = 0.0) -> None:
    """Compare beats of p (beats, 16) under anchors (beats, units) with ``last`` (beats,)."""
    got = units.scaler(name, p, anchors, last, stall)
    expected = rescale_weights(p.view(np.float16), anchors, last, CONFIGS[name]).view(np.uint16)
    wrong = np.argwhere(got != expected)
    if len(wrong):
        beat, lane = wrong[0]
        pytest.fail(
            f"beat {beat}, lane {lane}: p {p[beat, lane]:#06x} under {anchors[beat].tolist()}, last {last[beat]}:"
            f" {got[beat, lane]:#06x}, not {expected[beat, lane]:#06x} ({len(wrong)} wrong ones)"
        )


@pytest.mark.parametrize("name", CONFIGS)
def test_every_p_by_every_growth(units: SfuUnits, name: str) -> None:
    beats = np.resize(EVERY_P, (-(-EVERY_P.size // 16), 16))
    per_beat = 16 // CONFIGS[name].channels
    growths = np.append(np.arange(34), [63, 64, 255, 32767])
    p = np.tile(beats, (len(growths), 1))
    last = np.full(len(p), 77)
    anchors = np.repeat(77 - growths, len(beats))[:, None] + np.zeros((1, per_beat), np.int64)
    check(units, name, p, anchors, last)


@pytest.mark.parametrize("name", CONFIGS)
def test_anchors_change_from_beat_to_beat_and_from_unit_to_unit(units: SfuUnits, name: str) -> None:
    rng = np.random.default_rng(3)
    beats, per_beat = 3000, 16 // CONFIGS[name].channels
    p = rng.choice(EVERY_P, (beats, 16))
    last = rng.integers(-32766, 32768, beats)
    anchors = np.maximum(last[:, None] - rng.integers(0, 40, (beats, per_beat)), -32767)
    check(units, name, p, anchors, last)


@pytest.mark.parametrize("name", CONFIGS)
def test_it_stands_still_whatever_is_at_its_ports(units: SfuUnits, name: str) -> None:
    rng = np.random.default_rng(4)
    p = rng.choice(EVERY_P, (300, 16))
    last = rng.integers(0, 40, 300)
    check(units, name, p, np.zeros((300, 16 // CONFIGS[name].channels), np.int64), last, stall=0.5)


def test_units_without_an_anchor_hold_zeros_and_nan(units: SfuUnits) -> None:
    p = np.resize(np.array([0, 0x7E00], np.uint16), (4, 16))
    last = np.array([NO_ANCHOR, 32767, 0, -32766])
    check(units, "two", p, np.full((4, 8), NO_ANCHOR), last)
