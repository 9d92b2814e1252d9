"""The exact product of two FP16 values, as significand and shift, and what has no significand."""

from __future__ import annotations

from amaranth import Module
from amaranth.hdl import Cat
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

FP16_BITS = 16
FRACTION_BITS = 10
EXPONENT_BITS = 5
SIGNIFICAND_BITS = FRACTION_BITS + 1
PRODUCT_BITS = 2 * SIGNIFICAND_BITS
SHIFT_BITS = EXPONENT_BITS + 1

UNIT_EXPONENT = -50
"""A finite product is ``significand * 2**(shift + UNIT_EXPONENT)``: an FP16 value with exponent field
e (1 for a subnormal) is its 11-bit significand times ``2**(e - 25)``."""


class Fp16Product(wiring.Component):
    """Product of ``a`` and ``b``, combinational.

    Ports:
        a, b: FP16 bit patterns.
        enable: 0 makes a zero product, whatever the operands.
        significand, shift, negative: the product, see `UNIT_EXPONENT`. Without meaning beside ``nan``
            or ``infinite``, but ``shift`` is below 32 then and for a zero product.
        nan: a NaN operand, or infinity times zero.
        infinite: an infinite operand; the sign is ``negative``. May be set beside ``nan``.

    ==========  ======  ===========  =========  =====
    a * b       0       finite       infinity   NaN
    ==========  ======  ===========  =========  =====
    0           0       0            NaN        NaN
    finite              exact        infinity   NaN
    infinity                         infinity   NaN
    NaN                                         NaN
    ==========  ======  ===========  =========  =====
    """

    def __init__(self) -> None:
        super().__init__(
            {
                "a": In(FP16_BITS),
                "b": In(FP16_BITS),
                "enable": In(1),
                "significand": Out(PRODUCT_BITS),
                "shift": Out(SHIFT_BITS),
                "negative": Out(1),
                "nan": Out(1),
                "infinite": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build it."""
        m = Module()
        fractions = [operand[:FRACTION_BITS] for operand in (self.a, self.b)]
        exponents = [operand[FRACTION_BITS : FRACTION_BITS + EXPONENT_BITS] for operand in (self.a, self.b)]
        normal_a, normal_b = (exponent.any() for exponent in exponents)
        special_a, special_b = (exponent.all() for exponent in exponents)
        nonzero_a, nonzero_b = (fraction.any() for fraction in fractions)
        zero_a, zero_b = ~(normal_a | nonzero_a), ~(normal_b | nonzero_b)

        significand_a = Cat(fractions[0], normal_a)
        significand_b = Cat(fractions[1], normal_b) & self.enable.replicate(SIGNIFICAND_BITS)
        # Subnormals have the exponent of the smallest normal number.
        exponent_a, exponent_b = exponents[0] | ~normal_a, exponents[1] | ~normal_b
        shift = exponent_a + exponent_b
        special = special_a | special_b
        m.d.comb += [
            self.significand.eq(significand_a * significand_b),
            self.shift.eq(Cat(shift[:-1], shift[-1] & self.enable & ~special)),
            self.negative.eq(self.a[-1] ^ self.b[-1]),
            self.nan.eq(
                self.enable
                & (
                    (special_a & (nonzero_a | zero_b))  #
                    | (special_b & (nonzero_b | zero_a))
                )
            ),
            self.infinite.eq(self.enable & special),
        ]
        return m
