"""2**f for 0 <= f < 1 by table and line: what the SFU computes, and the table that it holds.

The range is cut into `SEGMENTS` equal parts. In each, 2**f is ``base + slope * offset``, with the offset
from the part's start. The lines lie so that the relative error is about equal to both sides; the
first one starts at exactly 1. With the rounding of the table and of the product the relative error is
below 1.31e-5 over all 2**18 arguments (`tests/hw/defs/test_exp2.py` goes through them).
"""

from __future__ import annotations

import math

FRACTION_BITS = 18
"""Bits of f."""
VALUE_BITS = 18
"""Bits of 2**f after the binary point; the bit before it is always one."""
SEGMENT_BITS = 6
SEGMENTS = 1 << SEGMENT_BITS
OFFSET_BITS = FRACTION_BITS - SEGMENT_BITS
SLOPE_BITS = 13
"""Bits of a slope, in steps of ``2**-VALUE_BITS`` a part."""


def _line(segment: int) -> tuple[int, int]:
    """Return base and slope of a part, in steps of ``2**-VALUE_BITS``."""
    start, end = 2.0 ** (segment / SEGMENTS), 2.0 ** ((segment + 1) / SEGMENTS)
    middle = 2.0 ** ((segment + 0.5) / SEGMENTS)
    above = (start + end) / 2 - middle
    """How far the chord runs above the curve; the largest distance, as the curve is nearly a parabola."""
    if segment == 0:
        # A line through (0, 1) that is as far below the parabola at its end as above it inside.
        end -= 4 * (3 - 2 * math.sqrt(2)) * above
        return 1 << VALUE_BITS, round((end - start) * 2**VALUE_BITS)
    down = 1 - above / middle / 2
    # The product of slope and offset is cut off: half a step on average, which the base gives back.
    return round(start * down * 2**VALUE_BITS + 0.5), round((end - start) * down * 2**VALUE_BITS)


LINES: tuple[tuple[int, int], ...] = tuple(_line(segment) for segment in range(SEGMENTS))
"""Base, in 1 ... 2, and slope of every part, in steps of ``2**-VALUE_BITS``."""
