"""Brings kept p from the anchors under which they were made to the row's last one."""

from __future__ import annotations

from amaranth import Module, Signal
from amaranth.hdl import Cat, Const, Mux
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from plora.hw.build.platform import add_shared
from plora.hw.defs.config import DOT_LANES, NdpConfig
from plora.hw.rtl.pe.drain import NAN
from plora.hw.rtl.pe.product import EXPONENT_BITS, FP16_BITS, FRACTION_BITS
from plora.hw.rtl.sfu.score_scale import ANCHOR_BITS
from plora.hw.rtl.sfu.weight_round import MOST_PLACES, SHIFT_BITS, shift_right

DELTA_BITS = 5
"""Bits of a growth of the anchor that matter: from 25 on every p is lost."""


class PScale(wiring.Component):
    """``scaled = p * 2**-delta`` of one FP16 p, rounded once: nearest, ties to even, subnormals kept.

    Cycle behaviour: two steps, each ending in registers: by how many places; shift and round.

    Ports:
        p: FP16 bit pattern, 0 ... 1 or NaN. NaN gives 0x7E00.
        delta: at least 0.
        scaled: two cycles later.
    """

    LATENCY = 2

    def __init__(self) -> None:
        super().__init__({"p": In(FP16_BITS), "delta": In(DELTA_BITS), "enable": In(1), "scaled": Out(FP16_BITS)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        exponent = self.p[FRACTION_BITS : FRACTION_BITS + EXPONENT_BITS - 1]
        nan = self.p[FRACTION_BITS + EXPONENT_BITS - 1]
        normal = exponent.any()
        # What a normal number is above the smallest one is used up first, then it moves down.
        above = Signal(signed_bits := EXPONENT_BITS + 2)
        m.d.comb += above.eq(Cat(exponent, Const(0, 3)) - normal - self.delta)
        subnormal = above[-1]
        drop = Signal(SHIFT_BITS, reset_less=True)
        left = Signal(SHIFT_BITS, reset_less=True)
        deep = (-above)[:signed_bits]
        significand, shown_nan = Signal(FRACTION_BITS + 1, reset_less=True), Signal(reset_less=True)
        with m.If(self.enable):
            m.d.sync += [
                significand.eq(Cat(self.p[:FRACTION_BITS], normal)),
                shown_nan.eq(nan),
                drop.eq(Mux(subnormal, Mux(deep[SHIFT_BITS:signed_bits].any(), MOST_PLACES, deep[:SHIFT_BITS]), 0)),
                left.eq(Mux(subnormal, 0, above[:SHIFT_BITS])),
            ]
        kept, rest = shift_right(m, "shifted", Cat(Const(0, 1), significand), drop, 1)
        up = rest[1] & (rest[0] | kept[0])
        # The hidden bit counts as one exponent step, and so does a carry out of the rounding.
        rounded = Cat(Const(0, FRACTION_BITS), left) + kept + up
        result = Signal(FP16_BITS, reset_less=True)
        with m.If(self.enable):
            m.d.sync += result.eq(Mux(shown_nan, NAN, rounded[:FP16_BITS]))
        m.d.comb += self.scaled.eq(result)
        return m


class PScaler(wiring.Component):
    """The sixteen p of one beat of V under the row's last anchor.

    Cycle behaviour: the p of cycle t are in ``scaled`` from cycle ``t + LATENCY`` on; a beat a
    cycle. Three steps, each ending in registers: growth of the anchors, as operands come from memories that
    leave little of a cycle; then those of `PScale`.

    Parameters:
        config: its ``channels`` are the tokens of a unit.

    Ports:
        enable: time passes; without it everything stands still.
        p: FP16 bit patterns.
        anchors: of the units that the p belong to, ``channels`` consecutive p each; signed.
        last: the row's last anchor, not below any other; signed. See `plora.hw.rtl.sfu.sfu`.
        scaled: FP16 bit patterns.
    """

    LATENCY = 1 + PScale.LATENCY

    def __init__(self, config: NdpConfig) -> None:
        self._unit = config.channels
        lanes = data.ArrayLayout(FP16_BITS, DOT_LANES)
        super().__init__(
            {
                "p": In(lanes),
                "anchors": In(data.ArrayLayout(ANCHOR_BITS, DOT_LANES // config.channels)),
                "last": In(ANCHOR_BITS),
                "enable": In(1),
                "scaled": Out(lanes),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        deltas = []
        for unit, anchor in enumerate(self.anchors):
            # Both are signed, but their difference is not, and so needs no more bits than they have.
            grown = Signal(ANCHOR_BITS, name=f"grown{unit}")
            delta = Signal(DELTA_BITS, name=f"delta{unit}", reset_less=True)
            m.d.comb += grown.eq(self.last - anchor)
            with m.If(self.enable):
                m.d.sync += delta.eq(grown[:DELTA_BITS] | grown[DELTA_BITS:].any().replicate(DELTA_BITS))
            deltas.append(delta)
        p = Signal.like(self.p, name="taken", reset_less=True)
        with m.If(self.enable):
            m.d.sync += p.eq(self.p)
        for lane in range(DOT_LANES):
            scale = PScale()
            add_shared(m, platform, f"scale{lane}", "p_scale", scale)
            m.d.comb += [
                scale.p.eq(p[lane]),
                scale.delta.eq(deltas[lane // self._unit]),
                scale.enable.eq(self.enable),
                self.scaled[lane].eq(scale.scaled),
            ]
        return m
