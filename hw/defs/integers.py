"""Keys and values that are integers: what a value means.

A value of INT8 (INT4) is a two's complement integer of 8 (4) bits times the scale of its token. A scale is a
byte, an unsigned number of 5 bits of exponent and 3 of fraction: the bits 14 ... 7 of an FP16 value, the others
of which are zero. An integer has at most 7 significant bits, 128 being a power of two, and a scale 4, so
a product has 11: **every value is exactly one of FP16**, subnormals included, or lies beyond its range.

======================  =======================================================================
scale                   values of the token
======================  =======================================================================
0 ... 0x07              integer times a multiple of 2**-17 (subnormal scales)
0x08 ... 0xF7           integer times the scale; infinite from 65536 on
0xF8 ... 0xFF           NaN, 0x7E00 with the sign of the integer
======================  =======================================================================

An integer of 0 gives +0; a negative one keeps its sign where the scale is zero.
"""

from __future__ import annotations

from plora.hw.defs.descriptor import DType

INTEGER_BITS: dict[int, int] = {DType.INT8: 8, DType.INT4: 4}
"""Bits of a value of the types that are integers."""

SCALE_BITS = 8
SCALE_FRACTION_BITS = 3
SCALE_SHIFT = 7
"""The FP16 value of a scale is the scale, as bits, shifted left by so many places."""
SCALE_NAN = 0xF8
"""The least scale that makes every value of its token NaN."""
