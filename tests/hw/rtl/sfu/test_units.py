"""The SFU's units in Amaranth's simulator, each against the golden step that it is; new operands every cycle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from amaranth.hdl import Value

from plora.hw.defs.config import NdpConfig
from plora.hw.defs.exp2 import FRACTION_BITS, VALUE_BITS
from plora.hw.rtl.sfu.exp2_fraction import Exp2Fraction
from plora.hw.rtl.sfu.p_scaler import PScaler
from plora.hw.rtl.sfu.score_scale import ANCHOR_BITS, ANCHOR_OFFSET, ScoreScale, scaled_layout
from plora.hw.rtl.sfu.sfu import Sfu
from plora.hw.rtl.sfu.unit_maximum import UnitMaximum
from plora.hw.rtl.sfu.unit_sum import UnitSum
from plora.hw.rtl.sfu.weight_round import WeightRound
from plora.sim.golden.softmax import exp2_fp16, exp2_fraction, fp16_steps, rescale_weights, scale_scores
from tests.hw.rtl.core.bench import simulate
from tests.hw.rtl.sfu.bench import CONFIGS, ReadSfu
from tests.hw.rtl.sfu.compiled import Run, check_run, scores_of
from tests.hw.rtl.sfu.stimuli import KINDS, fp32, noise, random_unit, random_units, score_of

NAN = 0x7E00
ENDS = (0.0, 2.0**-18, 2.0**-19, 1.0, 1 - 2.0**-18, 32766.0, 32766.5, 32767.0, 32767.5, 32768.0)
"""Where floor, ceiling and the range of t change."""


def pipelined(dut: Any, stimuli: Sequence[dict[str, int]], output: str) -> list[int]:
    """Give a set of operands every cycle; return the output of each, ``LATENCY`` cycles later."""
    answers: list[int] = []

    async def bench(ctx: Any) -> None:
        if isinstance(dut, PScaler):
            ctx.set(dut.enable, 1)
        for cycle in range(len(stimuli) + dut.LATENCY):
            for port, value in stimuli[cycle % len(stimuli)].items():
                ctx.set(Value.cast(getattr(dut, port)), int(value))
            if cycle >= dut.LATENCY:
                answers.append(ctx.get(Value.cast(getattr(dut, output))))
            await ctx.tick()

    simulate(dut, bench)
    return answers


def joined(values: Sequence[int], bits: int) -> int:
    """Return array elements as one integer."""
    return sum(int(value) << bits * index for index, value in enumerate(values))


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_scaled_to_floor_ceiling_and_fraction(kind: str) -> None:
    rng = np.random.default_rng(1)
    units = [random_unit(rng, CONFIGS["two"], kind, index, 0, begin=True) for index in range(150)]
    if kind == "special":
        units += [
            replace(units[0], scores=(score_of(t),), exists=1, scale=fp32(1.0)) for t in (*ENDS, *(-t for t in ENDS))
        ]
    stimuli = [
        {"score": u.scores[0], "overflow": u.overflow & 1, "exists": u.exists & 1, "scale": u.scale} for u in units
    ]
    for unit, bits in zip(units, pipelined(ScoreScale(), stimuli, "scaled"), strict=True):
        got = {name: bits >> f.offset & (1 << f.width) - 1 for name, f in scaled_layout}
        t = scale_scores(
            scores_of([replace(unit, scores=unit.scores[:1])]), float(np.array(unit.scale, np.uint32).view(np.float32))
        )
        finite, steps = bool(t.finite[0, 0]), int(t.steps[0, 0])
        no_number = bool((t.nan | t.positive_infinity)[0, 0])
        case = f"{unit}"
        assert (got["finite"], got["nan"], got["overflow"]) == (finite, no_number, bool(t.overflow[0, 0])), case
        assert got["ceiling"] == (ANCHOR_OFFSET - (-steps >> FRACTION_BITS) if finite else 0), case
        if finite:
            assert got["floor"] == ANCHOR_OFFSET + (steps >> FRACTION_BITS), case
            assert got["fraction"] == steps % (1 << FRACTION_BITS), case


def test_exp2_is_table_and_line() -> None:
    f = np.random.default_rng(2).integers(0, 1 << FRACTION_BITS, 500)
    got = pipelined(Exp2Fraction(), [{"fraction": int(value)} for value in f], "value")
    np.testing.assert_array_equal(np.array(got) | 1 << VALUE_BITS, exp2_fraction(f))


def test_exponentials_are_rounded_once() -> None:
    rng = np.random.default_rng(3)
    count = 600
    down = np.append(np.arange(40), rng.integers(0, 28, count - 40))
    down[-20:] = rng.integers(28, 1 << ANCHOR_BITS - 1, 20)
    floor = rng.integers(0, (1 << ANCHOR_BITS) - down)
    f = np.where(rng.random(count) < 0.3, 0, rng.integers(0, 1 << FRACTION_BITS, count))
    finite, nan = rng.random(count) < 0.9, rng.random(count) < 0.1
    stimuli = [
        {"floor": floor[i], "anchor": floor[i] + down[i], "value": value, "finite": int(finite[i]), "nan": int(nan[i])}
        for i, value in enumerate(exp2_fraction(f) & (1 << VALUE_BITS) - 1)
    ]
    expected = np.where(nan, NAN, np.where(finite, exp2_fp16(f - (down << FRACTION_BITS)), 0))
    np.testing.assert_array_equal(pipelined(WeightRound(), stimuli, "p"), expected)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 16])
def test_the_largest_of_any_count(count: int) -> None:
    rng = np.random.default_rng(count)
    values = rng.integers(0, 1 << ANCHOR_BITS, (100, count))
    values[::3] = rng.integers(0, 3, (34, count))  # ties
    values[1::3] = ANCHOR_OFFSET + rng.integers(-2, 2, (33, count))
    stimuli = [{"values": joined(row, ANCHOR_BITS)} for row in values]
    got = pipelined(UnitMaximum(count, ANCHOR_BITS), stimuli, "largest")
    np.testing.assert_array_equal(got, values.max(axis=1))


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_p_are_summed_exactly(count: int) -> None:
    rng = np.random.default_rng(count)
    p = rng.integers(0, 0x3C01, (100, count)).astype(np.uint16)
    p[0] = 0x3C00
    p[1::4] = rng.choice(np.array([0, 1, 0x3FF, 0x400, 0x3C00, NAN], np.uint16), (25, count))
    got = pipelined(UnitSum(count), [{"p": joined(row, 16)} for row in p], "total")
    np.testing.assert_array_equal(got, np.where(p == NAN, 0, fp16_steps(p)).sum(axis=1))


def scaler_stimuli(config: NdpConfig) -> tuple[list[dict[str, int]], np.ndarray]:
    """Return beats for a p scaler, and what it makes of them."""
    rng = np.random.default_rng(4)
    beats = 60
    p = rng.integers(0, 0x3C01, (beats, 16)).astype(np.uint16)
    p[::5] = NAN
    last = rng.integers(-30000, 30000, beats)
    anchors = last[:, None] - rng.integers(0, 30, (beats, 16 // config.channels))
    stimuli = [
        {
            "p": joined(p[i], 16),
            "anchors": joined(anchors[i] & 0xFFFF, ANCHOR_BITS),
            "last": int(last[i]) & 0xFFFF,
        }
        for i in range(beats)
    ]
    return stimuli, rescale_weights(p.view(np.float16), anchors, last, config).view(np.uint16)


@pytest.mark.parametrize("name", CONFIGS)
def test_p_are_brought_to_the_last_anchor(name: str) -> None:
    stimuli, expected = scaler_stimuli(CONFIGS[name])
    got = pipelined(PScaler(CONFIGS[name]), stimuli, "scaled")
    assert got == [joined(row, 16) for row in expected]


@pytest.mark.parametrize("kind", ["rising", "special"])
def test_the_whole_sfu_as_compiled(kind: str) -> None:
    rng, config = np.random.default_rng(5), CONFIGS["two"]
    units = random_units(rng, config, kind, 80, 3)
    units += [noise(rng, config) for _ in range(Sfu.LATENCY + Sfu.SETTLE + 8)]
    rows = [cycle % 3 for cycle in range(len(units))]
    dut = ReadSfu(config)
    run = Run([], [], [], [])

    async def bench(ctx: Any) -> None:
        for unit, row in zip(units, rows, strict=True):
            ctx.set(dut.valid, int(unit.valid))
            ctx.set(Value.cast(dut.unit), unit.bits(config))
            ctx.set(dut.read_row, row)
            run.valid.append(bool(ctx.get(dut.weights_valid)))
            run.weights.append(ctx.get(Value.cast(dut.weights)))
            run.busy.append(bool(ctx.get(dut.busy)))
            run.states.append(ctx.get(Value.cast(dut.state)))
            await ctx.tick()

    simulate(dut, bench)
    check_run("two", units, run, rows)


@pytest.mark.parametrize("count", [0, 17])
def test_a_maximum_of_too_few_or_too_many_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"not {count}"):
        UnitMaximum(count, ANCHOR_BITS)
