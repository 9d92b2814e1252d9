"""Rounds an exact sum to FP16, once."""

from __future__ import annotations

from itertools import pairwise

from amaranth import Module, Signal
from amaranth.hdl import Cat, Const, Mux, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from plora.hw.defs.config import AccumulatorConfig
from plora.hw.defs.queue import NUMERIC_NAN, NUMERIC_OVERFLOW
from plora.hw.rtl.interfaces import NUMERIC_BITS
from plora.hw.rtl.pe.dot_unit import dot_sum_layout, segment_starts, sticky_layout
from plora.hw.rtl.pe.product import EXPONENT_BITS, FP16_BITS, FRACTION_BITS

MAX_EXPONENT = 15
"""Exponent of the largest finite FP16 values."""
MIN_EXPONENT = -14
"""Exponent of the smallest normal FP16 values."""
INFINITY = ((1 << EXPONENT_BITS) - 1) << FRACTION_BITS
NAN = INFINITY | 1 << FRACTION_BITS - 1


def leading_zeros(m: Module, name: str, value: Value) -> Value:
    """Return the number of zeros above the highest one of ``value``; if there is none, anything.

    A tree: the upper half's count where that has a one, else the lower half's and the bit above.
    """
    width = 1 << (len(value) - 1).bit_length()
    if width == 1:
        return Const(0, 0)
    value = Cat(Const(0, width - len(value)), value)
    lower, upper = value[: width // 2], value[width // 2 :]
    empty = Signal(name=f"{name}_empty{width}")
    m.d.comb += empty.eq(~upper.any())
    half = Signal(width // 2, name=f"{name}_half{width}")
    m.d.comb += half.eq(Mux(empty, lower, upper))
    return Cat(leading_zeros(m, name, half), empty)


class Drain(wiring.Component):
    """One FP16 result a cycle: nearest, ties to even, subnormals kept.

    ====================================  ==========  =============================================
    sum                                   result      numeric
    ====================================  ==========  =============================================
    a NaN term, or infinities of both
    signs                                 0x7E00      NaN; overflow if a term was clipped
    infinite terms of one sign            infinity    overflow if a term was clipped
    magnitude of 65520 or more            infinity    overflow
    zero                                  +0
    other                                 rounded     sign of the exact sum, also for a zero result
    ====================================  ==========  =============================================

    Cycle behaviour: the result of cycle t is there from cycle ``t + LATENCY`` on. Three steps, each
    ending in registers: magnitude; shift to the leading one or to the last bit of a subnormal; round.

    Parameters:
        accumulator: the grid.

    Ports:
        sum: see `dot_sum_layout`; must come from registers.
        value: FP16 bit pattern.
        numeric: flags of `plora.hw.defs.queue`.
    """

    LATENCY = 3

    def __init__(self, accumulator: AccumulatorConfig) -> None:
        self._accumulator = accumulator
        super().__init__(
            {
                "sum": In(dot_sum_layout(accumulator)),
                "value": Out(FP16_BITS),
                "numeric": Out(NUMERIC_BITS),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build it."""
        m = Module()
        lsb = self._accumulator.lsb_exponent

        # Magnitude.
        magnitude = Signal(self._accumulator.bits - 1, reset_less=True)
        sign = [Signal(name=f"sign{stage}", reset_less=True) for stage in range(2)]
        sticky = [Signal(sticky_layout, name=f"sticky{stage}", reset_less=True) for stage in range(2)]
        # Both additions take their carries past whole pieces of the sum, not through them.
        starts = [*segment_starts(self._accumulator), self._accumulator.bits]
        exact = Signal(self._accumulator.bits)
        carry: Value = Const(0, 1)
        for piece, (start, end) in enumerate(pairwise(starts)):
            bits = self.sum.value[start:end]
            held = self.sum.carries[piece - 1] if piece else Const(0, 1)
            m.d.comb += exact[start:end].eq(bits + held + carry)
            following = Signal(name=f"carry{end}")
            m.d.comb += following.eq(bits[1:].all() & Mux(bits[0], held | carry, held & carry))
            carry = following
        minus = exact[-1]
        inverted = exact ^ minus.replicate(len(exact))
        m.d.sync += [
            *(
                magnitude[start:end].eq(inverted[start:end] + (minus & ~exact[:start].any()))
                for start, end in pairwise(starts)
            ),
            sign[0].eq(minus),
            sign[1].eq(sign[0]),
            sticky[0].eq(self.sum.sticky),
            sticky[1].eq(sticky[0]),
        ]

        # Shift. A bit that stands for the smallest normal number stops the search, so that
        # subnormals come out with its exponent and without a hidden bit.
        in_range, beyond = magnitude[: MAX_EXPONENT - lsb + 1], magnitude[MAX_EXPONENT - lsb + 1 :]
        normal = in_range[MIN_EXPONENT - lsb :]
        zeros = leading_zeros(m, "zeros", normal | 1)
        shifted = Signal(len(in_range), reset_less=True)
        exponent = Signal(EXPONENT_BITS, reset_less=True)
        huge = Signal(reset_less=True)
        m.d.sync += [
            shifted.eq(in_range << zeros),
            exponent.eq(MAX_EXPONENT - MIN_EXPONENT - zeros),
            huge.eq(beyond.any()),
        ]

        # Round. The hidden bit counts as one exponent step, and so does a carry out of the fraction.
        rest = shifted[: -FRACTION_BITS - 1]
        kept = shifted[-FRACTION_BITS - 1 :]
        up = rest[-1] & (rest[:-1].any() | kept[0])
        rounded = Signal(FP16_BITS - 1)
        m.d.comb += rounded.eq(Cat(Const(0, FRACTION_BITS), exponent) + kept + up)
        flags = sticky[1]
        infinite = flags.positive_infinity | flags.negative_infinity
        nan = flags.nan | (flags.positive_infinity & flags.negative_infinity)
        overflow = huge | (rounded[FRACTION_BITS:].all())
        negative = Mux(infinite, flags.negative_infinity, sign[1])
        value, numeric = Signal(FP16_BITS, reset_less=True), Signal(NUMERIC_BITS, reset_less=True)
        with m.If(nan):
            m.d.sync += value.eq(NAN)
        with m.Elif(infinite | overflow):
            m.d.sync += value.eq(Cat(Const(INFINITY, FP16_BITS - 1), negative))
        with m.Else():
            m.d.sync += value.eq(Cat(rounded, negative))
        m.d.sync += numeric.eq(
            Mux(nan, NUMERIC_NAN, 0) | Mux(flags.clipped | (overflow & ~infinite & ~nan), NUMERIC_OVERFLOW, 0)
        )
        m.d.comb += [self.value.eq(value), self.numeric.eq(numeric)]
        return m
