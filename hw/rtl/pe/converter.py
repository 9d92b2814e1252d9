"""Brings BF16 values into the range of FP16, in which the array multiplies."""

from __future__ import annotations

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from plora.hw.defs.config import WORD_VALUES
from plora.hw.rtl.interfaces import OPERAND_EXPONENT_BITS, WORD_BITS
from plora.hw.rtl.pe.drain import BF16_EXPONENT_BITS, BF16_FRACTION_BITS, INFINITY, NAN
from plora.hw.rtl.pe.product import EXPONENT_BITS, FP16_BITS, FRACTION_BITS

_BIAS_STEP = 127 - 15
"""How much larger the exponent field of a BF16 value is than that of the same FP16 value."""


class WordConverter(wiring.Component):
    """A word of BF16 values times a power of two, as FP16: nearest, ties to even, subnormals kept.

    ====================  ==================================================================
    BF16 value times the  FP16 value
    power of two
    ====================  ==================================================================
    NaN                   0x7E00 with its sign
    2**16 or more         infinity of its sign
    2**-17 or more        the same value
    less                  rounded to a multiple of 2**-24, its sign also where that is zero
    ====================  ==================================================================

    A BF16 subnormal is below 2**-126: with exponents of at most `MAX_OPERAND_EXPONENT` it becomes zero.

    Cycle behaviour: passes within the cycle.

    Ports:
        bf16: the word holds BF16 values; otherwise it passes as it is.
        exponent: of the power of two.
        data, converted: the word before and after.
    """

    def __init__(self) -> None:
        super().__init__(
            {
                "bf16": In(1),
                "exponent": In(signed(OPERAND_EXPONENT_BITS)),
                "data": In(WORD_BITS),
                "converted": Out(WORD_BITS),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build it."""
        m = Module()
        # What is added to the exponent field of every value.
        step = Signal(signed(OPERAND_EXPONENT_BITS + 1))
        m.d.comb += step.eq(self.exponent - _BIAS_STEP)
        for lane in range(WORD_VALUES):
            value = self.data.word_select(lane, FP16_BITS)
            converted = self._lane(m, f"lane{lane}", value, step)
            m.d.comb += self.converted.word_select(lane, FP16_BITS).eq(Mux(self.bf16, converted, value))
        return m

    @staticmethod
    def _lane(m: Module, name: str, value: Value, step: Value) -> Value:
        fraction, field, negative = value[:BF16_FRACTION_BITS], value[BF16_FRACTION_BITS:-1], value[-1]
        exponent = Signal(signed(BF16_EXPONENT_BITS + 2), name=f"{name}_exponent")
        below_one = exponent[-1]
        m.d.comb += exponent.eq(field + step)

        # A subnormal is ``1.fraction`` shifted right, by one place more than for exponent field 1. Bits are lost
        # from three places on, and all of them from eleven; sixteen or more are not counted.
        places = Signal(4, name=f"{name}_places")
        nothing = below_one & (~exponent[4:-1].all() | ~exponent[:4].any())
        hidden = Cat(Const(0, FRACTION_BITS + 2), fraction, Const(1, 1))
        shifted = Signal(len(hidden), name=f"{name}_shifted")
        m.d.comb += [places.eq(-step[:4] - field[:4]), shifted.eq(hidden >> places)]
        lost, kept = shifted[:FRACTION_BITS], shifted[FRACTION_BITS:]
        up = lost[-1] & (lost[:-1].any() | kept[0])
        subnormal = Signal(FRACTION_BITS, name=f"{name}_subnormal")
        m.d.comb += subnormal.eq((kept + up) & (~nothing).replicate(FRACTION_BITS))

        special = field.all()
        infinite = special | (~below_one & (exponent[EXPONENT_BITS:].any() | exponent[:EXPONENT_BITS].all()))
        tiny = below_one | ~exponent.any()
        exact = Cat(Const(0, FRACTION_BITS - BF16_FRACTION_BITS), fraction, exponent[:EXPONENT_BITS])
        magnitude = Signal(FP16_BITS - 1, name=f"{name}_magnitude")
        with m.If(infinite):
            m.d.comb += magnitude.eq(INFINITY | Mux(special & fraction.any(), NAN, 0))
        with m.Elif(tiny):
            m.d.comb += magnitude.eq(subnormal)
        with m.Else():
            m.d.comb += magnitude.eq(exact)
        return Cat(magnitude, negative)
