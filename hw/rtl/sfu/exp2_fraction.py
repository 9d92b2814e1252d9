"""2**f for a fraction f, by table and line."""

from __future__ import annotations

from amaranth import Module, Signal
from amaranth.hdl import Cat, Const
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from plora.hw.defs.exp2 import FRACTION_BITS, LINES, OFFSET_BITS, SLOPE_BITS, VALUE_BITS
from plora.hw.rtl.pe.carry_save import reduce
from plora.hw.rtl.sfu.pipeline import delayed


class Exp2Fraction(wiring.Component):
    """``value = 2**f``, see `plora.hw.defs.exp2`.

    Cycle behaviour: an argument of cycle t is there from cycle ``t + LATENCY`` on. Three steps, each
    ending in registers: table; base and product, as two numbers; their sum.

    Ports:
        fraction: f in steps of ``2**-FRACTION_BITS``.
        value: its ``VALUE_BITS`` bits after the binary point; the bit before it is one.
    """

    LATENCY = 3

    def __init__(self) -> None:
        super().__init__({"fraction": In(FRACTION_BITS), "value": Out(VALUE_BITS)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        base, slope = Signal(VALUE_BITS, reset_less=True), Signal(SLOPE_BITS, reset_less=True)
        with m.Switch(self.fraction[OFFSET_BITS:]):
            for segment, (start, rise) in enumerate(LINES):
                with m.Case(segment):
                    m.d.sync += [base.eq(start), slope.eq(rise)]
        offset = delayed(m, "offset", self.fraction[:OFFSET_BITS], 1)
        rows = [Cat(Const(0, place), slope & bit.replicate(SLOPE_BITS)) for place, bit in enumerate(offset)]
        rows.append(Cat(Const(0, OFFSET_BITS), base))
        parts, _ = reduce(m, "sum", rows, [], 2, VALUE_BITS + OFFSET_BITS)
        one, other = (delayed(m, f"part{index}", part, 1) for index, part in enumerate(parts))
        value = Signal(VALUE_BITS, reset_less=True)
        m.d.sync += value.eq((one + other)[OFFSET_BITS:])
        m.d.comb += self.value.eq(value)
        return m
