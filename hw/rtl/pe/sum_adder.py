"""Adds two accumulators."""

from __future__ import annotations

from itertools import pairwise

from amaranth import Module, Signal
from amaranth.hdl import Cat, Const, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from plora.hw.defs.config import AccumulatorConfig
from plora.hw.rtl.pe.carry_save import add3
from plora.hw.rtl.pe.dot_unit import dot_sum_layout, segment_starts


class SumAdder(wiring.Component):
    """``sum = a + b``, one cycle later; sticky flags are ORed.

    As in the accumulators, carries between the pieces of a sum are not waited for but handed on.

    Parameters:
        accumulator: the grid.

    Ports:
        a, b, sum: see `dot_sum_layout`. ``sum`` is a register.
    """

    def __init__(self, accumulator: AccumulatorConfig) -> None:
        self._accumulator = accumulator
        layout = dot_sum_layout(accumulator)
        super().__init__({"a": In(layout), "b": In(layout), "sum": Out(layout)})

    def elaborate(self, platform: object) -> Module:
        """Build it."""
        m = Module()
        starts = [*segment_starts(self._accumulator), self._accumulator.bits]
        # The carries that both operands hold back meet at the same bits: two bits for each pair.
        held: list[Value] = []
        for index, start in enumerate(starts[1:-1]):
            held.append(Const(0, start - sum(map(len, held))))
            held.append(self.a.carries[index] + self.b.carries[index])
        low, high = add3(m, "operands", [self.a.value, self.b.value, Cat(held)], Const(0, 1), starts[-1])
        total = Signal(self.sum.shape(), name="total", reset_less=True)
        for piece, (start, end) in enumerate(pairwise(starts)):
            piece_sum = Signal(end - start + 1, name=f"piece{piece}")
            m.d.comb += piece_sum.eq(low[start:end] + high[start:end])
            m.d.sync += total.value[start:end].eq(piece_sum)
            if end != starts[-1]:
                m.d.sync += total.carries[piece].eq(piece_sum[-1])
        m.d.sync += total.sticky.eq(self.a.sticky.as_value() | self.b.sticky.as_value())
        m.d.comb += self.sum.eq(total)
        return m
