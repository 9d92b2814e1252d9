"""The sum of a unit's p, exactly."""

from __future__ import annotations

from amaranth import Module, Signal
from amaranth.hdl import Cat, Const, Value
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from plora.hw.rtl.pe.carry_save import reduce
from plora.hw.rtl.pe.product import EXPONENT_BITS, FP16_BITS, FRACTION_BITS

P_STEPS_BITS = 25
"""Bits of a p in steps of 2**-24: 1 is the largest."""
_FIRST_CUT = 8
"""Numbers that the adder tree is cut at by registers."""


class UnitSum(wiring.Component):
    """``total`` of the ``p`` in steps of 2**-24; a NaN adds nothing.

    Cycle behaviour: what is given in cycle t is in ``total`` from cycle ``t + LATENCY`` on. Three
    steps, each ending in registers: fixed point and the upper part of the adder tree; the rest of it; sum.

    Parameters:
        count: p in a unit, 1 ... 16.

    Ports:
        p: FP16 bit patterns, 0 ... 1 or NaN.
    """

    LATENCY = 3

    def __init__(self, count: int) -> None:
        self._count = count
        self.width = P_STEPS_BITS + (count - 1).bit_length()
        super().__init__({"p": In(data.ArrayLayout(FP16_BITS, count)), "total": Out(self.width)})

    def elaborate(self, platform: object) -> Module:
        m = Module()

        def registers(name: str, values: list[Value]) -> list[Value]:
            stage: list[Value] = []
            for index, value in enumerate(values):
                stage.append(Signal(len(value), name=f"{name}{index}", reset_less=True))
                m.d.sync += stage[-1].eq(value)
            return stage

        terms: list[Value] = []
        for index in range(self._count):
            bits = self.p[index]
            exponent = bits[FRACTION_BITS : FRACTION_BITS + EXPONENT_BITS]
            normal = exponent.any()
            # All ones: the exponent of NaN, and of no p.
            significand = Cat(bits[:FRACTION_BITS] & ~exponent[-1].replicate(FRACTION_BITS), normal & ~exponent[-1])
            terms.append(Signal(P_STEPS_BITS, name=f"term{index}"))
            m.d.comb += terms[-1].eq(significand << (exponent - normal)[: EXPONENT_BITS - 1])
        terms += [Const(0, P_STEPS_BITS)] * (2 - len(terms))
        upper, _ = reduce(m, "upper", terms, [], min(_FIRST_CUT, len(terms)), self.width)
        lower, _ = reduce(m, "lower", registers("upper_register", upper), [], 2, self.width)
        one, other = registers("lower_register", lower)
        total = Signal(self.width, name="sum", reset_less=True)
        m.d.sync += total.eq(one + other)
        m.d.comb += self.total.eq(total)
        return m
