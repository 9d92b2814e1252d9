"""The largest of some unsigned numbers."""

from __future__ import annotations

from functools import reduce
from operator import or_

from amaranth import Module, Signal
from amaranth.hdl import Cat, Const, Value
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

_WAYS = 4


class UnitMaximum(wiring.Component):
    """``largest`` of up to sixteen ``values``.

    Cycle behaviour: values of cycle t are there from cycle ``t + LATENCY`` on: two steps, each ending
    in registers, of up to four numbers compared each with each.

    Parameters:
        count: numbers, 1 ... 16.
        width: their bits.
    """

    LATENCY = 2

    def __init__(self, count: int, width: int) -> None:
        if not 1 <= count <= _WAYS**self.LATENCY:
            raise ValueError(f"count must be 1 ... {_WAYS**self.LATENCY}, not {count!r}")
        self._width = width
        super().__init__({"values": In(data.ArrayLayout(width, count)), "largest": Out(width)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        values: list[Value] = list(self.values)
        for step in range(self.LATENCY):
            groups = [values[start : start + _WAYS] for start in range(0, len(values), _WAYS)]
            values = []
            for index, group in enumerate(groups):
                values.append(Signal(self._width, name=f"largest{step}_{index}", reset_less=True))
                m.d.sync += values[-1].eq(self._largest(group))
        m.d.comb += self.largest.eq(values[0])
        return m

    def _largest(self, group: list[Value]) -> Value:
        at_least = {
            (one, other): group[one] >= group[other]
            for one in range(len(group))
            for other in range(one + 1, len(group))
        }
        gated = []
        for one, value in enumerate(group):
            # The first of equal numbers is the one that is taken.
            wins = [~at_least[other, one] for other in range(one)]
            wins += [at_least[one, other] for other in range(one + 1, len(group))]
            gated.append(value & Cat(wins, Const(1, 1)).all().replicate(self._width))
        return reduce(or_, gated)
