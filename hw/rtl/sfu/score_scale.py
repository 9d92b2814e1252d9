"""A score times the softmax scale, in fixed point."""

from __future__ import annotations

from amaranth import Module, Signal
from amaranth.hdl import Cat, Const, Mux
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from plora.hw.defs.exp2 import FRACTION_BITS
from plora.hw.defs.queue import SCALE_FRACTION_BITS
from plora.hw.rtl.pe.carry_save import reduce
from plora.hw.rtl.pe.drain import MIN_EXPONENT, SCORE_BITS, score_layout
from plora.hw.rtl.sfu.pipeline import delayed

FP32_BITS = 32
FP32_FRACTION_BITS = 23
FP32_BIAS = 127

ANCHOR_BITS = 16
"""Bits of anchors and of rounded t. They are *offset* by ``2**15``: unsigned, and 0 says that there is none."""
ANCHOR_OFFSET = 1 << ANCHOR_BITS - 1
_INTEGER_BITS = ANCHOR_BITS - 1
"""Integer bits of |t|; all ones count as infinite."""

_DISTANCE_BITS = 6
_MOST_LEFT = 3
"""Places by which a product is shifted left at most: the largest exponents of score and scale."""

scaled_layout = data.StructLayout(
    {"ceiling": ANCHOR_BITS, "floor": ANCHOR_BITS, "fraction": FRACTION_BITS, "finite": 1, "nan": 1, "overflow": 1}
)
"""t of one score: floor(t) and ceil(t), offset; ``fraction`` in steps of ``2**-FRACTION_BITS`` above the floor.
Where t is not ``finite``, floor and fraction have no meaning, the ceiling is 0, and 2**t is NaN if
``nan`` and else zero. ``overflow``: finite operands made it infinite."""


class ScoreScale(wiring.Component):
    """``t = score * scale``, cut toward zero to steps of ``2**-FRACTION_BITS``.

    =====================================  ========  =====  ==========
    score                                  finite    nan    overflow
    =====================================  ========  =====  ==========
    does not exist                         0         0      0
    NaN, or +infinity                      0         1      as given
    -infinity                              0         0      as given
    t of 32767 or more                     0         1      1
    t of -32767 or less                    0         0      1
    other                                  1         0      0
    =====================================  ========  =====  ==========

    Cycle behaviour: a score of cycle t is there from cycle ``t + LATENCY`` on. Five steps, each ending in
    registers: none but the way here, as the scale goes to many lanes and the scores come from a choice
    between rows; product, as two numbers; their sum; shift to fixed point; floor, ceiling and fraction
    with the sign.

    Ports:
        score: of the drain.
        overflow: the drain's flag; counts for infinite scores and NaN only.
        exists: the lane holds a score.
        scale: FP32 bit pattern, ``2**-24 <= scale < 2**8``, of whose fraction 16 bits count.
        scaled: see `scaled_layout`.
    """

    LATENCY = 5

    def __init__(self) -> None:
        super().__init__(
            {
                "score": In(score_layout),
                "overflow": In(1),
                "exists": In(1),
                "scale": In(FP32_BITS),
                "scaled": Out(scaled_layout),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        score, scale, exists, overflowed = (
            delayed(m, name, getattr(self, name), 1) for name in ("score", "scale", "exists", "overflow")
        )
        fraction = scale[FP32_FRACTION_BITS - SCALE_FRACTION_BITS : FP32_FRACTION_BITS]
        significand = Cat(fraction, Const(1, 1))
        # A distance of 0 stands for the largest exponents. Only its lowest bits matter, as all that
        # the legal scales lead to is in 0 ... 60.
        largest = _MOST_LEFT - MIN_EXPONENT + SCORE_BITS - 1 + SCALE_FRACTION_BITS - FRACTION_BITS
        distance = Signal(_DISTANCE_BITS, reset_less=True)
        m.d.sync += distance.eq(largest + FP32_BIAS - score.exponent - scale[FP32_FRACTION_BITS:-1])

        # A row for every bit of the scale. Spelled out, this is smaller and faster than what Yosys makes of ``*``.
        product = Signal(SCORE_BITS + SCALE_FRACTION_BITS + 1, reset_less=True)
        rows = [
            Cat(Const(0, place), score.mantissa & bit.replicate(SCORE_BITS)) for place, bit in enumerate(significand)
        ]
        halves, _ = reduce(m, "product", rows, [], 2, len(product))
        one, other = (delayed(m, f"half{index}", half, 1) for index, half in enumerate(halves))
        m.d.sync += product.eq(one + other)

        shifted = Signal(len(product) + _MOST_LEFT, reset_less=True)
        m.d.sync += shifted.eq(Cat(Const(0, _MOST_LEFT), product) >> delayed(m, "distance", distance, 1))

        number = delayed(m, "number", exists & ~(score.infinite | score.nan), 3)
        nan = delayed(m, "nan", exists & (score.nan | (score.infinite & ~score.negative)), 3)
        overflow = delayed(m, "overflow", exists & overflowed & (score.infinite | score.nan), 3)
        negative = delayed(m, "negative", score.negative, 3)

        # With F the fraction of |t| and I its integer: floor and ceiling are I and I + (F > 0), or their
        # opposites. The opposite of a number is its complement plus one.
        rest, integer = shifted[:FRACTION_BITS], shifted[FRACTION_BITS : FRACTION_BITS + _INTEGER_BITS]
        beyond = integer.all() | shifted[FRACTION_BITS + _INTEGER_BITS :].any()
        finite = number & ~beyond
        uneven = rest.any()
        here = Cat(integer ^ negative.replicate(_INTEGER_BITS), ~negative)
        following = (here + 1)[:ANCHOR_BITS]
        result = Signal(scaled_layout, reset_less=True)
        m.d.sync += [
            result.ceiling.eq(Mux(negative | uneven, following, here) & finite.replicate(ANCHOR_BITS)),
            result.floor.eq(Mux(negative & ~uneven, following, here)),
            result.fraction.eq((rest ^ negative.replicate(FRACTION_BITS)) + negative),
            result.finite.eq(finite),
            result.nan.eq(nan | (number & beyond & ~negative)),
            result.overflow.eq(overflow | (number & beyond)),
        ]
        m.d.comb += self.scaled.eq(result)
        return m
