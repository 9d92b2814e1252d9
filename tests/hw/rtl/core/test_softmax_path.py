"""Results pass the softmax path as they are, scores become softmax terms with their anchors, row by row."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from plora.hw.defs.config import PE_ROWS
from plora.hw.defs.queue import NUMERIC_NAN, NUMERIC_OVERFLOW, softmax_scale
from plora.hw.rtl.core.job import SCALE_IGNORED_BITS, SOFTMAX_PAIRS, result_tag_bits, result_tag_layout
from plora.hw.rtl.core.softmax_path import SoftmaxPath
from plora.hw.rtl.pe.array import results_layout
from plora.hw.rtl.pe.drain import score_layout
from plora.hw.rtl.sfu.sfu import Sfu
from plora.sim.golden.numerics import Scores
from plora.sim.golden.softmax import RowState, softmax_tile
from tests.hw.rtl.core.bench import TINY, simulate

CHANNELS = TINY.channels
APPROACH = 7
"""Cycles that a beat needs from its issue until its result is at the unit; the real ones differ."""
LAYOUT, TAGS = results_layout(TINY, result_tag_bits(TINY)), result_tag_layout(TINY)
NAMES = [name for name, _ in score_layout]


def random_scores(rng: np.random.Generator, rows: int, tokens: int) -> Scores:
    """Scores around 1, a few of them not finite."""
    shape = (rows, tokens)
    kind = rng.choice(20, shape)
    finite = kind > 2
    return Scores(
        np.where(finite, rng.integers(1 << 21, 1 << 22, shape), 0),
        np.where(finite, rng.integers(12, 18, shape), 0),
        rng.integers(0, 2, shape) == 1,
        kind < 2,
        kind == 2,
        (kind == 1) | ((kind == 2) & (rng.random(shape) < 0.5)),
    )


@pytest.mark.parametrize("bank", [0, 1])
@pytest.mark.parametrize("rows", [1, 2, 3, 6])
def test_scores_become_what_the_golden_softmax_makes_of_them(rows: int, bank: int) -> None:
    dut = SoftmaxPath(TINY, approach=APPROACH)
    rng, gaps = np.random.default_rng(rows), random.Random(rows)
    tokens, scale = 9, softmax_scale(0.7)
    scores = random_scores(rng, rows, tokens)
    terms, state = softmax_tile(scores, float(np.uint32(scale).view(np.float32)), RowState.start(rows), TINY)
    pairs, units = -(-rows // PE_ROWS), -(-tokens // CHANNELS)
    # One unit of a chain that comes to nothing, then all of another: it must know nothing of that one.
    order = [0, *range(units)]
    given: list[int] = []
    taken: list[tuple[int, Any]] = []
    ahead: list[int] = []
    done = False

    def payload(unit: int, pair: int) -> dict[str, Any]:
        exists = min(CHANNELS, tokens - unit * CHANNELS)
        here = [range(unit * CHANNELS, unit * CHANNELS + exists)] * min(PE_ROWS, rows - pair * PE_ROWS)
        lanes = [[{name: int(getattr(scores, name)[PE_ROWS * pair + row, j]) for name in NAMES} for j in tokens_here]
                 for row, tokens_here in enumerate(here)]  # fmt: skip
        flags = [[int(NUMERIC_OVERFLOW * scores.overflow[PE_ROWS * pair + row, j] | NUMERIC_NAN) for j in tokens_here]
                 for row, tokens_here in enumerate(here)]  # fmt: skip
        tag = {"rows": exists, "state": bank * SOFTMAX_PAIRS + pair, "softmax": 1, "begins": unit == 0,
               "scale": scale >> SCALE_IGNORED_BITS, "word": unit}  # fmt: skip
        return {
            "scores": lanes, "score_numeric": flags, "second_row": len(here) - 1, "last_tap": 1,
            "tag": TAGS.const(tag).as_bits(),
        }  # fmt: skip

    async def source(ctx: Any) -> None:
        nonlocal done
        now = 0
        for unit in order:
            for pair in range(pairs):
                ctx.set(dut.results.payload, LAYOUT.const(payload(unit, pair)))
                ctx.set(dut.results.valid, 1)
                given.append(now)
                await ctx.tick()
                ctx.set(dut.results.valid, 0)
                pause = 1 + (gaps.random() < 0.3)
                await ctx.tick().repeat(pause)
                now += 1 + pause
        while busy := ctx.get(dut.busy):
            assert busy == 1 << bank
            await ctx.tick()
        for pair in range(pairs):
            for read in dut.reads:
                ctx.set(read.pair, bank * SOFTMAX_PAIRS + pair)
                ctx.set(read.enable, 1)
            await ctx.tick()
            for read in dut.reads:
                for place, row in enumerate(range(PE_ROWS * pair, min(rows, PE_ROWS * (pair + 1)))):
                    known = ctx.get(read.states)[place]
                    signed = known.anchor - ((known.anchor >> 15) << 16)
                    wanted = (state.anchor[row], state.total[row], state.shift[row], state.nan[row])
                    assert (signed, known.total, known.shift, known.nan) == wanted, f"row {row}"
        done = True

    async def sink(ctx: Any) -> None:
        cycle = 0
        while not done:
            *_, valid, values, is_ahead = await ctx.tick().sample(dut.values.valid, dut.values.payload, dut.ahead)
            if valid:
                taken.append((cycle, values))
            if is_ahead:
                ahead.append(cycle)
            cycle += 1

    simulate(dut, source, sink)
    assert [at for at, _ in taken] == [at + SoftmaxPath.LATENCY for at in given]
    # The result of a beat that is issued in the next cycle is there in the one after the last terms.
    assert [at + 1 + APPROACH for at in ahead] == [at + 1 for at, _ in taken]
    for number, (_, values) in enumerate(taken):
        unit, pair = order[number // pairs], number % pairs
        assert values.second_row == (PE_ROWS * pair + 1 < rows)
        assert TAGS.from_bits(values.tag).word == unit
        here = slice(unit * CHANNELS, min(tokens, (unit + 1) * CHANNELS))
        for place, row in enumerate(range(PE_ROWS * pair, min(rows, PE_ROWS * (pair + 1)))):
            where = f"unit {unit} of row {row}"
            wanted = terms.p[row, here].view(np.uint16).tolist()
            assert list(values.values[place])[: len(wanted)] == wanted, where
            anchor = values.anchors[place]
            assert anchor - ((anchor >> 15) << 16) == terms.anchors[row, unit], where
            flags = int(NUMERIC_NAN * terms.nan[row, here].any() | NUMERIC_OVERFLOW * terms.overflow[row, here].any())
            # The flags of a unit are those of its first lane, which always exists.
            assert list(values.numeric[place]) == [flags, *[0] * (CHANNELS - 1)], where


def test_other_results_pass_in_the_same_cycle() -> None:
    dut = SoftmaxPath(TINY, approach=APPROACH)
    rng = random.Random(1)

    async def bench(ctx: Any) -> None:
        for _ in range(20):
            values = [[rng.getrandbits(16) for _ in range(CHANNELS)] for _ in range(PE_ROWS)]
            numeric = [[rng.getrandbits(2) for _ in range(CHANNELS)] for _ in range(PE_ROWS)]
            side = {"tap_index": rng.getrandbits(2), "last_tap": rng.getrandbits(1), "second_row": rng.getrandbits(1),
                    "tag": TAGS.const({"word": rng.getrandbits(5), "end": 1}).as_bits()}  # fmt: skip
            ctx.set(dut.results.payload, LAYOUT.const({"values": values, "numeric": numeric, **side}))
            ctx.set(dut.results.valid, 1)
            passed = ctx.get(dut.values.payload)
            assert ctx.get(dut.values.valid)
            assert [list(row) for row in passed.values] == values
            assert [list(row) for row in passed.numeric] == numeric
            assert {name: passed[name] for name in side} == side
            assert not ctx.get(dut.ahead)
            await ctx.tick()
        ctx.set(dut.results.valid, 0)
        await ctx.tick().repeat(Sfu.LATENCY + 5)
        assert not ctx.get(dut.values.valid)
        assert not ctx.get(dut.busy)

    simulate(dut, bench)
