"""Operands that find faults in floating-point units."""

from __future__ import annotations

import numpy as np

from tests.hw.rtl.pe.compiled import Array

SPECIAL = {
    "zero": 0x0000,
    "smallest subnormal": 0x0001,
    "largest subnormal": 0x03FF,
    "smallest normal": 0x0400,
    "largest of exponent 1": 0x07FF,
    "below one": 0x3BFF,
    "one": 0x3C00,
    "above one": 0x3C01,
    "2**-8": 0x1C00,
    "below 512": 0x5FFF,
    "512": 0x6000,
    "above 512": 0x6001,
    "32768": 0x7800,
    "65504": 0x7BFF,
    "infinity": 0x7C00,
    "signalling NaN": 0x7C01,
    "NaN": 0x7E00,
    "NaN of all ones": 0x7FFF,
    "subnormal of redmule#58": 0x03EE,
    "factor of redmule#58": 0x3C12,
}
SPECIAL_BITS: Array = np.array([bits | sign for bits in SPECIAL.values() for sign in (0, 0x8000)], np.uint16)

KINDS = ("any", "moderate", "small", "large", "special", "integer")


def operands(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> Array:
    """Return FP16 bit patterns.

    any: every finite pattern. moderate: exponents whose sums neither clip nor vanish. small: products
    around the grid's step. large: products around its end. special: mostly `SPECIAL`. integer: -8 ... 8.
    """
    bits = rng.integers(0, 1 << 16, shape, dtype=np.uint16)
    exponents = {"any": (0, 31), "moderate": (5, 21), "small": (0, 10), "large": (22, 26)}
    if kind in exponents:
        low, high = exponents[kind]
        exponent = rng.integers(low, high, shape).astype(np.uint16)
        return (bits & 0x83FF) | exponent << 10
    if kind == "integer":
        return rng.integers(-8, 9, shape).astype(np.float16).view(np.uint16)
    picked = rng.random(shape) < 0.7
    return np.where(picked, rng.choice(SPECIAL_BITS, shape), bits)
