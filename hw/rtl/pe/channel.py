"""What one memory channel feeds: its operand registers and the dot units of both rows."""

from __future__ import annotations

from amaranth import Module, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from plora.hw.build.platform import add_shared
from plora.hw.defs.config import DOT_LANES, DOTS_PER_WORD, PE_ROWS, WORD_VALUES, AccumulatorConfig
from plora.hw.rtl.interfaces import WORD_BITS
from plora.hw.rtl.pe.dot_unit import DotUnit, dot_sum_layout, grid_name
from plora.hw.rtl.pe.product import FP16_BITS


class PeChannel(wiring.Component):
    """``PE_ROWS`` x ``WORD_VALUES`` multiply-adds on one weight word.

    Cycle behaviour: operands of cycle t are in ``sums`` from cycle ``t + LATENCY`` on. A cycle with
    no lane enabled and ``first`` low changes nothing.

    Parameters:
        accumulator: the grid.

    Ports:
        weights: the channel's word.
        inputs: the word that it is multiplied with, for every row.
        enable: lanes that count.
        first: begin new sums.
        sums: accumulators by row and dot unit; dot unit d has lanes ``DOT_LANES * d`` and up.
    """

    LATENCY = 1 + DotUnit.LATENCY

    def __init__(self, accumulator: AccumulatorConfig) -> None:
        self._accumulator = accumulator
        sums = data.ArrayLayout(data.ArrayLayout(dot_sum_layout(accumulator), DOTS_PER_WORD), PE_ROWS)
        super().__init__(
            {
                "weights": In(WORD_BITS),
                "inputs": In(data.ArrayLayout(WORD_BITS, PE_ROWS)),
                "enable": In(WORD_VALUES),
                "first": In(1),
                "sums": Out(sums),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build it."""
        m = Module()
        weights = Signal(WORD_BITS, reset_less=True)
        enable = Signal(WORD_VALUES)
        first = Signal()
        m.d.sync += [weights.eq(self.weights), enable.eq(self.enable), first.eq(self.first)]
        name = f"dot_unit_{grid_name(self._accumulator)}"
        for row in range(PE_ROWS):
            inputs = Signal(WORD_BITS, name=f"inputs{row}", reset_less=True)
            m.d.sync += inputs.eq(self.inputs[row])
            for dot in range(DOTS_PER_WORD):
                unit = DotUnit(self._accumulator)
                add_shared(m, platform, f"row{row}_dot{dot}", name, unit)
                m.d.comb += [
                    unit.a.as_value().eq(inputs.word_select(dot, DOT_LANES * FP16_BITS)),
                    unit.b.as_value().eq(weights.word_select(dot, DOT_LANES * FP16_BITS)),
                    unit.enable.eq(enable.word_select(dot, DOT_LANES)),
                    unit.first.eq(first),
                    self.sums[row][dot].eq(unit.sum),
                ]
        return m
