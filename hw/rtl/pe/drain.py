"""Rounds an exact sum to FP16 or BF16, once, and truncates it to a score for the softmax unit."""

from __future__ import annotations

from itertools import pairwise

from amaranth import Module, Signal
from amaranth.hdl import Cat, Const, Mux, Value, signed
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
BF16_FRACTION_BITS = 7
BF16_EXPONENT_BITS = 8
BF16_BIAS = 127
BF16_INFINITY = ((1 << BF16_EXPONENT_BITS) - 1) << BF16_FRACTION_BITS
BF16_NAN = BF16_INFINITY | 1 << BF16_FRACTION_BITS - 1
SCALE_BITS = 9
"""Bits of the sum of two operand exponents."""


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
    """One result a cycle: nearest, ties to even, subnormals kept.

    ====================================  ==========  =============================================
    sum                                   result      numeric
    ====================================  ==========  =============================================
    a NaN term, or infinities of both
    signs                                 NaN         NaN; overflow if a term was clipped
    infinite terms of one sign            infinity    overflow if a term was clipped
    too large, see below                  infinity    overflow
    zero                                  +0
    other                                 rounded     sign of the exact sum, also for a zero result
    ====================================  ==========  =============================================

    FP16: ``sum * 2**-offset``; too large are 65520 and more; NaN is 0x7E00.
    BF16: ``sum * 2**(-offset - scale)``; too large are sums of 2**31 or more, and what rounds to 2**128;
    NaN is 0x7FC0. Exponents are such that no result is subnormal (`plora.hw.defs.queue.Exponents`).

    Beside it, for FP16 at offset 0, the sum as a score: not rounded but truncated. Its flags differ in that
    only 65536 or more in magnitude overflows.

    Cycle behaviour: the result of cycle t is there from cycle ``t + LATENCY`` on. Three steps, each
    ending in registers: magnitude; shift to the leading one or to the last bit of a subnormal; round.

    Parameters:
        accumulator: the grid.

    Ports:
        sum: see `dot_sum_layout`; must come from registers.
        offset: in step with ``sum``, as the next three are; 0 ... `MAX_OFFSET`.
        bf16: round to BF16.
        scale: both operands' exponents together; for BF16 only.
        from_bf16: the operands were BF16: an infinite term counts as clipped, but beside a NaN term.
        value: FP16 or BF16 bit pattern.
        numeric: flags of `plora.hw.defs.queue`.
        score: see `score_layout`; without meaning where ``offset`` was not 0 or ``bf16`` was set.
        score_numeric: flags of the score.
    """

    LATENCY = 3

    def __init__(self, accumulator: AccumulatorConfig) -> None:
        self._accumulator = accumulator
        super().__init__(
            {
                "sum": In(dot_sum_layout(accumulator)),
                "offset": In(OFFSET_BITS),
                "bf16": In(1),
                "scale": In(signed(SCALE_BITS)),
                "from_bf16": In(1),
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
        # A piece of the sum is ``bits`` and what is added to them: the carry held back, the carry out of the
        # piece below and, as -x is the complement of x - 1, minus one where the pieces below a negative sum are
        # zero. All sums of a piece are ready before it is known which is meant.
        pieces = list(pairwise([*segment_starts(self._accumulator), self._accumulator.bits]))
        held = [Const(0, 1), *self.sum.carries]
        carry: Value = Const(0, 1)
        carries, zeros_below = [], []
        all_zero: Value = Const(1, 1)
        for (start, end), more in zip(pieces, held, strict=True):
            bits = self.sum.value[start:end]
            carries.append(carry)
            zeros_below.append(all_zero)
            ones, none = bits[1:].all(), ~bits[1:].any()
            # Two ones come to 1 ... 10 and to 1 ... 11 with one added.
            with_carry, without = (ones & (bits[0] | more), ones & bits[0] & more)
            zero_with = ones & (bits[0] ^ more)
            zero_without = Mux(more, ones & bits[0], none & ~bits[0])
            here, zero = Signal(name=f"carry{end}"), Signal(name=f"zero{end}")
            m.d.comb += [here.eq(Mux(carry, with_carry, without)), zero.eq(Mux(carry, zero_with, zero_without))]
            carry = here
            all_zero = all_zero & zero
        (top_start, top_end), top_more, top_carry = pieces[-1], held[-1], carries[-1]
        top_bits = self.sum.value[top_start:top_end]
        minus = Signal()
        sign_of = [(top_bits + number)[len(top_bits) - 1] for number in range(3)]
        m.d.comb += minus.eq(
            Mux(top_carry, Mux(top_more, sign_of[2], sign_of[1]), Mux(top_more, sign_of[1], sign_of[0]))
        )
        for (start, end), more, up, below in zip(pieces, held, carries, zeros_below, strict=True):
            bits = self.sum.value[start:end]
            down = minus & below
            added = [(bits + number)[: end - start] for number in (-1, 0, 1, 2)]
            if start == 0:
                total = Mux(down, added[0], added[1])
            else:
                total = Mux(
                    more ^ up,
                    Mux(down, added[1], added[2]),
                    Mux(more, Mux(down, added[2], added[3]), Mux(down, added[0], added[1])),
                )
            m.d.sync += magnitude[start:end].eq(total ^ minus.replicate(end - start))
        m.d.sync += [
            sign[0].eq(minus),
            sign[1].eq(sign[0]),
            sticky[0].eq(self.sum.sticky),
            sticky[1].eq(sticky[0]),
        ]

        # Shift. A bit that stands for the smallest normal FP16 number stops the search, so that
        # subnormals come out with its exponent and without a hidden bit. BF16 needs no such bit.
        top = MAX_EXPONENT + MAX_OFFSET
        count = top - lsb + 1
        in_range, beyond = Cat(magnitude, Const(0, max(0, count - len(magnitude))))[:count], magnitude[count:]
        smallest = Signal(MAX_OFFSET + 1, reset_less=True)
        zeros = leading_zeros(m, "zeros", in_range | Cat(Const(1, MIN_EXPONENT - lsb), smallest))
        leading, rest = normalised(m, in_range, zeros, SCORE_BITS)
        kept = Signal(SCORE_BITS, reset_less=True)
        inexact = Signal(reset_less=True)
        distance = Signal(len(zeros), reset_less=True)
        huge = Signal(reset_less=True)
        # The exponent field of the value 2**top, without the hidden bit's step.
        largest = [Signal(SCALE_BITS, name=f"largest{stage}", reset_less=True) for stage in range(2)]
        bf16 = [Signal(name=f"bf16_{stage}", reset_less=True) for stage in range(2)]
        from_bf16 = [Signal(name=f"from_bf16_{stage}", reset_less=True) for stage in range(2)]
        m.d.sync += [
            smallest.eq(Mux(self.bf16, 0, 1 << self.offset)),
            largest[0].eq(Mux(self.bf16, top + BF16_BIAS - 1 - self.scale, top - MIN_EXPONENT) - self.offset),
            bf16[0].eq(self.bf16),
            from_bf16[0].eq(self.from_bf16),
            kept.eq(leading),
            inexact.eq(rest),
            distance.eq(zeros),
            huge.eq(beyond.any()),
            largest[1].eq(largest[0]),
            bf16[1].eq(bf16[0]),
            from_bf16[1].eq(from_bf16[0]),
        ]

        # Round. The hidden bit counts as one exponent step, and so does a carry out of the fraction. Below
        # the fraction of BF16 ones carry the rounding up into it.
        exponent = Signal(SCALE_BITS)
        m.d.comb += exponent.eq(largest[1] - distance)
        half, carries = [], []
        for bits in (FRACTION_BITS, BF16_FRACTION_BITS):
            beside = SCORE_BITS - bits - 1
            half.append(kept[beside - 1] & (kept[: beside - 1].any() | inexact | kept[beside]))
            carries.append(kept[SCORE_BITS - FRACTION_BITS - 1 : -1] | (1 << FRACTION_BITS - bits) - 1)
        fraction, up = (Mux(bf16[1], two, one) for one, two in (carries, half))
        hidden = kept[-1]
        rounded = Signal(FRACTION_BITS + SCALE_BITS + 1)
        m.d.comb += rounded.eq(Cat(fraction, exponent) + Cat(up, Const(0, FRACTION_BITS - 1), hidden))
        field = rounded[FRACTION_BITS:]
        fp16_magnitude = rounded[: FP16_BITS - 1]
        bf16_magnitude = rounded[FRACTION_BITS - BF16_FRACTION_BITS :][: FP16_BITS - 1] & hidden.replicate(
            FP16_BITS - 1
        )
        flags = sticky[1]
        infinite = flags.positive_infinity | flags.negative_infinity
        nan = flags.nan | (flags.positive_infinity & flags.negative_infinity)
        fp16_overflow, bf16_overflow = (field >= (1 << bits) - 1 for bits in (EXPONENT_BITS, BF16_EXPONENT_BITS))
        overflow = huge | Mux(bf16[1], bf16_overflow & hidden, fp16_overflow)
        clipped = flags.clipped | (from_bf16[1] & infinite & ~flags.nan)
        negative = Mux(infinite, flags.negative_infinity, sign[1])
        value, numeric = Signal(FP16_BITS, reset_less=True), Signal(NUMERIC_BITS, reset_less=True)
        with m.If(nan):
            m.d.sync += value.eq(Mux(bf16[1], BF16_NAN, NAN))
        with m.Elif(infinite | overflow):
            m.d.sync += value.eq(Cat(Mux(bf16[1], BF16_INFINITY, INFINITY)[: FP16_BITS - 1], negative))
        with m.Else():
            m.d.sync += value.eq(Cat(Mux(bf16[1], bf16_magnitude, fp16_magnitude), negative))
        m.d.sync += numeric.eq(
            Mux(nan, NUMERIC_NAN, 0) | Mux(clipped | (overflow & ~infinite & ~nan), NUMERIC_OVERFLOW, 0)
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
                Mux(nan, NUMERIC_NAN, 0) | Mux(clipped | (beyond_scores & ~infinite & ~nan), NUMERIC_OVERFLOW, 0)
            ),
        ]
        m.d.comb += [
            self.value.eq(value),
            self.numeric.eq(numeric),
            self.score.eq(score),
            self.score_numeric.eq(score_numeric),
        ]
        return m
