"""An integer times a scale, as FP16."""

from __future__ import annotations

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from plora.hw.defs.integers import SCALE_BITS, SCALE_FRACTION_BITS, SCALE_SHIFT
from plora.hw.rtl.pe.carry_save import reduce
from plora.hw.rtl.pe.drain import INFINITY, NAN
from plora.hw.rtl.pe.product import EXPONENT_BITS, FP16_BITS, FRACTION_BITS

MAGNITUDE_BITS = 7
"""Bits of an integer but its sign."""
PRODUCT_BITS = FRACTION_BITS + 1
"""Bits of the largest product, 128 * 15: those of a significand, so that nothing is rounded."""
_MOST_ZEROS = MAGNITUDE_BITS

scale_layout = data.StructLayout({"significand": SCALE_FRACTION_BITS + 1, "exponent": EXPONENT_BITS + 1, "nan": 1})
"""A scale taken apart: ``significand * 2**(exponent - 24)``, the significand at least 8, or 0 of a scale of 0."""


def taken_apart(m: Module, scale: Value, name: str) -> data.View:
    """Return the `scale_layout` of a scale as it lies in memory."""
    out = Signal(scale_layout, name=name)
    fraction, field = scale[:SCALE_FRACTION_BITS], scale[SCALE_FRACTION_BITS:SCALE_BITS]
    m.d.comb += [
        out.significand.eq(Cat(fraction, Const(1, 1))),
        out.exponent.eq(field + SCALE_SHIFT - 1),
        out.nan.eq(field.all()),
    ]
    with m.If(~field.any()):
        # A subnormal moves up until its leading one is where the hidden bit is.
        m.d.comb += out.significand.eq(0)
        for bit in range(SCALE_FRACTION_BITS):
            with m.If(fraction[bit]):
                places = SCALE_FRACTION_BITS - bit
                m.d.comb += [out.significand.eq(fraction << places), out.exponent.eq(SCALE_SHIFT - places)]
    return out


class IntegerValue(wiring.Component):
    """An integer times a scale (`plora.hw.defs.integers`), which is exact.

    A negative integer comes as its complement, a magnitude one too small; the missing scale is a row of the product.
    The zeros before the leading one of the magnitude, counted meanwhile, say how far the product moves up to be a
    significand, but for one place. Below the normal numbers it moves as far as the exponent lets it.

    ====================  ========================
    product               value
    ====================  ========================
    scale is no number    0x7E00 with its sign
    65536 or more         infinity of its sign
    less                  the product, exactly
    ====================  ========================

    Cycle behaviour: passes within the cycle.

    Ports:
        magnitude: of a negative integer ``-1 - integer``.
        negative: its sign.
        scale: see `scale_layout`.
        value: FP16.
    """

    def __init__(self) -> None:
        super().__init__(
            {
                "magnitude": In(MAGNITUDE_BITS),
                "negative": In(1),
                "scale": In(scale_layout),
                "value": Out(FP16_BITS),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        x, scale = self.magnitude, self.scale
        product = Signal(PRODUCT_BITS)
        # Rows of full adders: `*` gives a chain of adders.
        rows = [Cat(Const(0, place), x & bit.replicate(len(x))) for place, bit in enumerate(scale.significand)]
        rows.append(scale.significand & self.negative.replicate(len(scale.significand)))
        (one, other), _ = reduce(m, "product", rows, [], 2, PRODUCT_BITS)
        m.d.comb += product.eq(one + other)

        zeros, places = Signal(range(_MOST_ZEROS + 1)), Signal(range(_MOST_ZEROS + 1))
        m.d.comb += zeros.eq(_leading_zeros(x))
        short = (scale.exponent[len(zeros) :] == 0) & (scale.exponent[: len(zeros)] < zeros)
        m.d.comb += places.eq(Mux(short, scale.exponent[: len(zeros)], zeros))
        moved = Signal(PRODUCT_BITS)
        exponent, next_exponent = Signal(EXPONENT_BITS + 1), Signal(EXPONENT_BITS + 1)
        m.d.comb += [
            moved.eq(product << places),
            exponent.eq(scale.exponent - places),
            next_exponent.eq(scale.exponent + 1 - places),
        ]

        # Of the exponents, 0 is that of the subnormals; the hidden bit of others counts as one step.
        normal = moved[-1]
        fraction = Mux(normal | (exponent == 0), moved[:FRACTION_BITS], moved[: FRACTION_BITS - 1] << 1)
        top = (INFINITY >> FRACTION_BITS) - 1
        infinite = (exponent > top) | ((exponent == top) & normal)
        nothing = ~(x.any() | self.negative) | (scale.significand == 0)
        magnitude = Signal(FP16_BITS - 1)
        with m.If(scale.nan):
            m.d.comb += magnitude.eq(NAN)
        with m.Elif(nothing):
            m.d.comb += magnitude.eq(0)
        with m.Elif(infinite):
            m.d.comb += magnitude.eq(INFINITY)
        with m.Else():
            m.d.comb += magnitude.eq(Cat(fraction, Mux(normal, next_exponent, exponent)[:EXPONENT_BITS]))
        m.d.comb += self.value.eq(Cat(magnitude, self.negative))
        return m


def _leading_zeros(value: Value) -> Value:
    """Zeros before the leading one; of zero as many as it has bits."""
    count: Value = Const(len(value))
    for bit in range(len(value)):
        count = Mux(value[bit], len(value) - 1 - bit, count)
    return count
