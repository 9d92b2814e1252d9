"""Rounds an exact sum to FP16, once, and truncates it to a score for the softmax unit."""

from __future__ import annotations

from itertools import pairwise

from amaranth import Module, Signal
from amaranth.hdl import Cat, Const, Mux, Value
from amaranth.lib import data, wiring
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


MAX_OFFSET = 15
"""Most powers of two by which a result can be made smaller before it is rounded."""
OFFSET_BITS = 4
SCORE_BITS = 22
"""Bits of a score's mantissa, the hidden bit included."""

score_layout = data.StructLayout(
    {"mantissa": SCORE_BITS, "exponent": EXPONENT_BITS, "negative": 1, "infinite": 1, "nan": 1}
)
"""A sum truncated toward zero: ``mantissa * 2**(exponent - 14 - 21)`` with its sign, exact below 2**-14,
where the exponent is 0 and the mantissa has no bit 21. Infinite from 2**16 on, by its sign."""


def leading_zeros(m: Module, name: str, value: Value) -> Value:
    """Return the number of zeros above the highest one of ``value``; if there is none, anything.

    A tree with all nodes at work at once: the upper half's count where that has a one, else the lower
    half's, and above it the bit that tells which. The highest bit of the count is there first.
    """
    width = 1 << (len(value) - 1).bit_length()
    if width == 1:
        return Const(0, 0)
    value = Cat(Const(0, width - len(value)), value)
    lower, upper = value[: width // 2], value[width // 2 :]
    count = Signal(width.bit_length() - 1, name=name)
    empty = ~upper.any()
    m.d.comb += count.eq(
        Cat(Mux(empty, leading_zeros(m, f"{name}_l", lower), leading_zeros(m, f"{name}_u", upper)), empty)
    )
    return count


def normalised(m: Module, value: Value, zeros: Value, bits: int) -> tuple[Value, Value]:
    """Return the highest ``bits`` bits of ``value << zeros``, and whether one below them is set.

    The highest bit of ``zeros`` comes first. A bit that no later step can bring among the highest leaves
    the shifter, and only counts as set or not.
    """
    below: list[Value] = []
    for step in reversed(range(len(zeros))):
        width = min(len(value), bits + (1 << step) - 1)
        dropped = len(value) - width
        assert dropped <= 1 << step, f"{len(value)} bits are too many for {len(zeros)} steps"
        below.append(~zeros[step] & value[:dropped].any())
        shifted = Signal(width, name=f"shifted{step}")
        m.d.comb += shifted.eq(Mux(zeros[step], value << (1 << step), value)[dropped:])
        value = shifted
    return value, Cat(below).any()


class Drain(wiring.Component):
    """One FP16 result a cycle, ``sum * 2**-offset``: nearest, ties to even, subnormals kept.

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

    Beside it, at offset 0, the sum as a score: not rounded but truncated. Its flags differ in that only
    65536 or more in magnitude overflows.

    Cycle behaviour: the result of cycle t is there from cycle ``t + LATENCY`` on. Three steps, each
    ending in registers: magnitude; shift to the leading one or to the last bit of a subnormal; round.

    Parameters:
        accumulator: the grid.

    Ports:
        sum: see `dot_sum_layout`; must come from registers.
        offset: in step with ``sum``, 0 ... `MAX_OFFSET`.
        value: FP16 bit pattern.
        numeric: flags of `plora.hw.defs.queue`.
        score: see `score_layout`; without meaning where ``offset`` was not 0.
        score_numeric: flags of the score.
    """

    LATENCY = 3

    def __init__(self, accumulator: AccumulatorConfig) -> None:
        self._accumulator = accumulator
        super().__init__(
            {
                "sum": In(dot_sum_layout(accumulator)),
                "offset": In(OFFSET_BITS),
                "value": Out(FP16_BITS),
                "numeric": Out(NUMERIC_BITS),
                "score": Out(score_layout),
                "score_numeric": Out(NUMERIC_BITS),
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
        top = MAX_EXPONENT + MAX_OFFSET - lsb + 1
        in_range, beyond = Cat(magnitude, Const(0, max(0, top - len(magnitude))))[:top], magnitude[top:]
        smallest = Signal(MAX_OFFSET + 1, reset_less=True)
        zeros = leading_zeros(m, "zeros", in_range[MIN_EXPONENT - lsb :] | smallest)
        leading, rest = normalised(m, in_range, zeros, SCORE_BITS)
        kept = Signal(SCORE_BITS, reset_less=True)
        inexact = Signal(reset_less=True)
        distance = Signal(len(zeros), reset_less=True)
        offset = [Signal(OFFSET_BITS, name=f"offset{stage}", reset_less=True) for stage in range(2)]
        huge = Signal(reset_less=True)
        m.d.sync += [
            smallest.eq(1 << self.offset),
            kept.eq(leading),
            inexact.eq(rest),
            distance.eq(zeros),
            offset[0].eq(self.offset),
            offset[1].eq(offset[0]),
            huge.eq(beyond.any()),
        ]

        # Round. The hidden bit counts as one exponent step, and so does a carry out of the fraction.
        exponent = Signal(len(zeros))
        m.d.comb += exponent.eq(MAX_EXPONENT + MAX_OFFSET - MIN_EXPONENT - distance - offset[1])
        beside = SCORE_BITS - FRACTION_BITS - 1
        up = kept[beside - 1] & (kept[: beside - 1].any() | inexact | kept[beside])
        rounded = Signal(FRACTION_BITS + len(exponent))
        m.d.comb += rounded.eq(Cat(Const(0, FRACTION_BITS), exponent) + kept[beside:] + up)
        flags = sticky[1]
        infinite = flags.positive_infinity | flags.negative_infinity
        nan = flags.nan | (flags.positive_infinity & flags.negative_infinity)
        overflow = huge | (rounded[FRACTION_BITS:] > MAX_EXPONENT - MIN_EXPONENT + 1)
        negative = Mux(infinite, flags.negative_infinity, sign[1])
        value, numeric = Signal(FP16_BITS, reset_less=True), Signal(NUMERIC_BITS, reset_less=True)
        with m.If(nan):
            m.d.sync += value.eq(NAN)
        with m.Elif(infinite | overflow):
            m.d.sync += value.eq(Cat(Const(INFINITY, FP16_BITS - 1), negative))
        with m.Else():
            m.d.sync += value.eq(Cat(rounded[: FP16_BITS - 1], negative))
        m.d.sync += numeric.eq(
            Mux(nan, NUMERIC_NAN, 0) | Mux(flags.clipped | (overflow & ~infinite & ~nan), NUMERIC_OVERFLOW, 0)
        )

        # The score: the same before it is rounded.
        score, score_numeric = Signal(score_layout, reset_less=True), Signal(NUMERIC_BITS, reset_less=True)
        beyond_scores = huge | (exponent > MAX_EXPONENT - MIN_EXPONENT)
        m.d.sync += [
            score.mantissa.eq(kept),
            score.exponent.eq(exponent),
            score.negative.eq(negative),
            score.infinite.eq(infinite | beyond_scores),
            score.nan.eq(nan),
            score_numeric.eq(
                Mux(nan, NUMERIC_NAN, 0) | Mux(flags.clipped | (beyond_scores & ~infinite & ~nan), NUMERIC_OVERFLOW, 0)
            ),
        ]
        m.d.comb += [
            self.value.eq(value),
            self.numeric.eq(numeric),
            self.score.eq(score),
            self.score_numeric.eq(score_numeric),
        ]
        return m
