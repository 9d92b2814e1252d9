"""2**f times a power of two, rounded to FP16."""

from __future__ import annotations

from amaranth import Module, Signal
from amaranth.hdl import Cat, Const, Mux, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from plora.hw.defs.exp2 import VALUE_BITS
from plora.hw.rtl.pe.drain import MIN_EXPONENT, NAN
from plora.hw.rtl.pe.product import FP16_BITS, FRACTION_BITS
from plora.hw.rtl.sfu.pipeline import delayed
from plora.hw.rtl.sfu.score_scale import ANCHOR_BITS

SHIFT_BITS = 4
MOST_PLACES = FRACTION_BITS + 2
"""So many places below the smallest normal exponent nothing is left, whatever the number."""


def shift_right(m: Module, name: str, value: Value, places: Value, low: int) -> tuple[Value, Value]:
    """Return ``value >> places`` without its ``low`` lowest bits, and those that round: half, and below it.

    The bits shifted out count as below. ``low`` is at least 1.
    """
    below: Value = Const(0, 1)
    for step in reversed(range(len(places))):
        out = Signal(len(value), name=f"{name}{step}")
        dropped = Signal(name=f"{name}_dropped{step}")
        m.d.comb += [
            out.eq(Mux(places[step], value >> (1 << step), value)),
            dropped.eq(below | (places[step] & value[: 1 << step].any())),
        ]
        value, below = out, dropped
    return value[low:], Cat(below | value[: low - 1].any(), value[low - 1])


class WeightRound(wiring.Component):
    """``p = 2**f * 2**(floor - anchor)``, rounded to FP16 once: nearest, ties to even, subnormals kept.

    Cycle behaviour: the arguments of cycle t are in ``p`` from cycle ``t + LATENCY`` on. Three steps, each
    ending in registers: difference, shift, round.

    Ports:
        floor, anchor: offset in the same way; the anchor is not below the floor, if ``finite``.
        value: 2**f, the bits after the binary point.
        finite, nan: as in `scaled_layout`.
        p: FP16 bit pattern; 0x7E00 if ``nan``, else 0 if not ``finite``.
    """

    LATENCY = 3

    def __init__(self) -> None:
        super().__init__(
            {
                "floor": In(ANCHOR_BITS),
                "anchor": In(ANCHOR_BITS),
                "value": In(VALUE_BITS),
                "finite": In(1),
                "nan": In(1),
                "p": Out(FP16_BITS),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        down = Signal(ANCHOR_BITS, reset_less=True)
        m.d.sync += down.eq(self.anchor - self.floor)
        value = delayed(m, "value", self.value, 1)
        finite = delayed(m, "finite", self.finite, 1)
        nan = delayed(m, "nan", self.nan, 2)

        # Normal numbers are rounded where they are; smaller ones so many places further down.
        exponent, places = Signal(SHIFT_BITS), Signal(SHIFT_BITS)
        lost = ~finite | down[5:].any()
        with m.Switch(down[:5]):
            for n in range(32):
                with m.Case(n):
                    m.d.comb += [
                        exponent.eq(max(-MIN_EXPONENT - n, 0)),
                        places.eq(min(max(n + MIN_EXPONENT, 0), MOST_PLACES)),
                    ]
        significand = Cat(value, Const(1, 1))
        kept, rest = shift_right(m, "shifted", significand, places, VALUE_BITS - FRACTION_BITS)
        kept_register = Signal(FRACTION_BITS + 1, name="kept", reset_less=True)
        rest_register = Signal(2, name="rest", reset_less=True)
        exponent_register = Signal(SHIFT_BITS, name="exponent_register", reset_less=True)
        m.d.sync += [
            kept_register.eq(kept & ~lost.replicate(FRACTION_BITS + 1)),
            rest_register.eq(rest & ~lost.replicate(2)),
            exponent_register.eq(exponent & ~lost.replicate(SHIFT_BITS)),
        ]

        # The hidden bit counts as one exponent step, and so does a carry out of the fraction.
        up = rest_register[1] & (rest_register[0] | kept_register[0])
        rounded = (Cat(Const(0, FRACTION_BITS), exponent_register) + kept_register + up)[:FP16_BITS]
        p = Signal(FP16_BITS, name="result", reset_less=True)
        m.d.sync += p.eq(Mux(nan, NAN, rounded))
        m.d.comb += self.p.eq(p)
        return m
