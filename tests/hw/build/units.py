"""Small components for tests of emission."""

from __future__ import annotations

from amaranth import Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from plora.hw.build.platform import add_shared


class Accumulate(wiring.Component):
    """Adds ``a`` to ``total`` every cycle."""

    def __init__(self, width: int) -> None:
        self._width = width
        super().__init__({"a": In(width), "total": Out(width)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.d.sync += self.total.eq(self.total + self.a)
        return m


class Invert(wiring.Component):
    """Has neither clock nor reset."""

    def __init__(self) -> None:
        super().__init__({"a": In(8), "b": Out(8)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.d.comb += self.b.eq(~self.a)
        return m


class Three(wiring.Component):
    """Sums its input three times over: each lane accumulates the input plus its own number, inverted."""

    def __init__(self, clash: bool = False) -> None:
        self._clash = clash
        super().__init__({"a": In(8), "total": Out(8)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        total = Signal(8)
        lanes = []
        for i in range(3):
            lane, invert = Accumulate(8 + (i if self._clash else 0)), Invert()
            add_shared(m, platform, f"lane_{i}", "accumulate", lane)
            add_shared(m, platform, f"invert_{i}", "invert", invert)
            m.d.comb += [invert.a.eq(self.a + i), lane.a.eq(invert.b)]
            lanes.append(lane)
        m.d.comb += [total.eq(sum(lane.total for lane in lanes)), self.total.eq(total)]
        return m
