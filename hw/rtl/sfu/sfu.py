"""The SFU: scores of the PE array to FP16 p, with the online softmax of every query row.

The numeric contract is `plora.sim.golden.softmax`.
"""

from __future__ import annotations

import functools
import operator

from amaranth import Module, Signal
from amaranth.hdl import Cat, Mux
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out, connect, flipped

from plora.hw.build.platform import add_shared
from plora.hw.defs.config import SOFTMAX_BANKS, SOFTMAX_MAX_ROWS, NdpConfig
from plora.hw.defs.queue import NUMERIC_NAN, NUMERIC_OVERFLOW
from plora.hw.rtl.interfaces import NUMERIC_BITS
from plora.hw.rtl.pe.drain import score_layout
from plora.hw.rtl.pe.product import FP16_BITS
from plora.hw.rtl.sfu.exp2_fraction import Exp2Fraction
from plora.hw.rtl.sfu.pipeline import delayed
from plora.hw.rtl.sfu.row_state import READERS, RowState, StateRead
from plora.hw.rtl.sfu.score_scale import ANCHOR_BITS, FP32_BITS, ScoreScale
from plora.hw.rtl.sfu.unit_maximum import UnitMaximum
from plora.hw.rtl.sfu.unit_sum import UnitSum
from plora.hw.rtl.sfu.weight_round import WeightRound

BANK_BITS = (SOFTMAX_BANKS - 1).bit_length()


def unit_layout(config: NdpConfig, rows: int, tag_bits: int) -> data.StructLayout:
    """Scores of up to ``channels`` consecutive tokens for one query row.

    ==============  ====================================================================================
    scores          of the drains
    overflow        their overflow flags
    exists          lanes that hold a score; p of others is 0 and counts nowhere
    row             query row
    begin           the row's first unit: what was known of the row is forgotten
    scale           FP32 bits of the softmax scale
    tag             returned with the p
    ==============  ====================================================================================
    """
    return data.StructLayout(
        {
            "scores": data.ArrayLayout(score_layout, config.channels),
            "overflow": config.channels,
            "exists": config.channels,
            "row": (rows - 1).bit_length(),
            "begin": 1,
            "scale": FP32_BITS,
            "tag": tag_bits,
        }
    )


def weights_layout(config: NdpConfig, tag_bits: int) -> data.StructLayout:
    """The p of a unit.

    ==============  ====================================================================================
    p               FP16 bit patterns
    numeric         flags of `plora.hw.defs.queue`, of all lanes together
    anchor          under which they were made, signed; `plora.hw.rtl.sfu.row_state.NO_ANCHOR` if none
    tag             of the unit
    ==============  ====================================================================================
    """
    return data.StructLayout(
        {
            "p": data.ArrayLayout(FP16_BITS, config.channels),
            "numeric": NUMERIC_BITS,
            "anchor": ANCHOR_BITS,
            "tag": tag_bits,
        }
    )


class Sfu(wiring.Component):
    """Softmax of ``channels`` scores a cycle::

        scores -> scale: 5 -+-> floor ------------ 3 ---------+-> difference, shift, round: 3 -+-> p
                            +-> fraction -> 2**f: 3 ----------+                                +-> sum: 3 -> l: 3
                            +-> ceiling -> largest: 2 -> M: 1 +

    Cycle behaviour. Everything is taken and given as it comes: the p of a unit given in cycle t are there in
    cycle ``t + LATENCY``. A unit a cycle; units of one row at most every second cycle. A row's
    state may be asked for when its bank is not ``busy``, or ``SETTLE`` cycles after its last p.

    Parameters:
        config: sizes.
        tag_bits: width of the tag, at least 1.
        rows: query rows with a state of their own, a power of two; each bank has an equal run of them.

    Ports:
        valid, unit: see `unit_layout`.
        weights_valid, weights: see `weights_layout`.
        busy: by bank: units given before this cycle are still on their way into the states.
        reads: of the rows' states, see `plora.hw.rtl.sfu.row_state.StateRead`.
    """

    _TO_ANCHOR = UnitMaximum.LATENCY + 1
    """Cycles from a scaled score to the anchor of its unit."""
    LATENCY = ScoreScale.LATENCY + _TO_ANCHOR + WeightRound.LATENCY
    SETTLE = UnitSum.LATENCY + RowState.SETTLE

    def __init__(self, config: NdpConfig, *, tag_bits: int, rows: int = SOFTMAX_BANKS * SOFTMAX_MAX_ROWS) -> None:
        if tag_bits < 1:
            raise ValueError(f"tag_bits must be at least 1, not {tag_bits!r}")
        self._config = config
        self._rows = rows
        super().__init__(
            {
                "valid": In(1),
                "unit": In(unit_layout(config, rows, tag_bits)),
                "weights_valid": Out(1),
                "weights": Out(weights_layout(config, tag_bits)),
                "busy": Out(SOFTMAX_BANKS),
                "reads": In(StateRead(rows)).array(READERS),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        channels, unit = self._config.channels, self.unit
        add_shared(m, platform, "maximum", f"unit_maximum_{channels}", maximum := UnitMaximum(channels, ANCHOR_BITS))
        add_shared(m, platform, "sum", f"unit_sum_{channels}", total := UnitSum(channels))
        # The state's row is read in the cycle before the unit's largest t is there.
        to_state = ScoreScale.LATENCY + UnitMaximum.LATENCY - 1
        rows = RowState(
            self._rows,
            total_bits=total.width,
            total_delay=self.LATENCY + UnitSum.LATENCY - to_state,
        )
        add_shared(m, platform, "rows", f"row_state_{self._rows}_{total.width}", rows)

        for inner, own in zip(rows.reads, self.reads, strict=True):
            connect(m, flipped(own), inner)

        nans, overflows = [], []
        for channel in range(channels):
            scale, exp2, weight = ScoreScale(), Exp2Fraction(), WeightRound()
            add_shared(m, platform, f"scale{channel}", "score_scale", scale)
            add_shared(m, platform, f"exp2_{channel}", "exp2_fraction", exp2)
            add_shared(m, platform, f"round{channel}", "weight_round", weight)
            scaled = scale.scaled
            nans.append(scaled.nan)
            overflows.append(scaled.overflow)
            m.d.comb += [
                scale.score.eq(unit.scores[channel]),
                scale.overflow.eq(unit.overflow[channel]),
                scale.exists.eq(unit.exists[channel]),
                scale.scale.eq(unit.scale),
                maximum.values[channel].eq(scaled.ceiling),
                exp2.fraction.eq(scaled.fraction),
                weight.floor.eq(delayed(m, f"floor{channel}", scaled.floor, self._TO_ANCHOR)),
                weight.value.eq(exp2.value),
                weight.finite.eq(delayed(m, f"finite{channel}", scaled.finite, self._TO_ANCHOR)),
                weight.nan.eq(delayed(m, f"nan{channel}", scaled.nan, self._TO_ANCHOR)),
                weight.anchor.eq(rows.anchor),
                self.weights.p[channel].eq(weight.p),
                total.p[channel].eq(weight.p),
            ]

        numeric = Signal(NUMERIC_BITS, reset_less=True)
        m.d.sync += numeric.eq(
            Mux(Cat(nans).any(), NUMERIC_NAN, 0) | Mux(Cat(overflows).any(), NUMERIC_OVERFLOW, 0),
        )
        # Bit i is a unit that was given i + 1 cycles ago; by bank, those of its rows.
        in_banks = [Signal(self.LATENCY + self.SETTLE - 1, name=f"in_bank_{bank}") for bank in range(SOFTMAX_BANKS)]
        inside = functools.reduce(operator.or_, in_banks)
        for bank, in_bank in enumerate(in_banks):
            m.d.sync += in_bank.eq(Cat(self.valid & (unit.row[-BANK_BITS:] == bank), in_bank))
            m.d.comb += self.busy[bank].eq(in_bank.any())
        m.d.comb += [
            rows.valid.eq(inside[to_state - 1]),
            rows.row.eq(delayed(m, "row", unit.row, to_state)),
            rows.begin.eq(delayed(m, "begin", unit.begin, to_state)),
            rows.largest.eq(maximum.largest),
            rows.nan.eq((delayed(m, "numeric_row", numeric, UnitMaximum.LATENCY - 1) & NUMERIC_NAN).any()),
            rows.total.eq(total.total),
            self.weights_valid.eq(inside[self.LATENCY - 1]),
            self.weights.numeric.eq(delayed(m, "numeric", numeric, self.LATENCY - ScoreScale.LATENCY - 1)),
            # Offset to signed.
            self.weights.anchor.eq(
                delayed(m, "anchor", rows.anchor, WeightRound.LATENCY) ^ (1 << ANCHOR_BITS - 1),
            ),
            self.weights.tag.eq(delayed(m, "tag", unit.tag, self.LATENCY)),
        ]
        return m
