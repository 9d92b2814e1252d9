"""The word expander: from words as they lie in memory to words of FP16 values."""

from __future__ import annotations

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from plora.hw.build.platform import add_shared
from plora.hw.defs.config import DOT_LANES, DOTS_PER_WORD, WORD_VALUES, NdpConfig
from plora.hw.defs.descriptor import DType
from plora.hw.defs.integers import INTEGER_BITS, SCALE_BITS
from plora.hw.defs.packing import expansion_log2
from plora.hw.rtl.core.integer_value import MAGNITUDE_BITS, IntegerValue, scale_layout, taken_apart
from plora.hw.rtl.interfaces import WORD_BITS
from plora.hw.rtl.pe.product import FP16_BITS

MAX_EXPANSION = max(map(expansion_log2, INTEGER_BITS))
EXPANSION_BITS = MAX_EXPANSION.bit_length()
"""Bits of `plora.hw.defs.packing.expansion_log2`, and of the place of an expanded word in its word of memory."""


class WordExpander(wiring.Component):
    """Gives one of the words of FP16 values that a channel's word of memory holds, and keeps the scales for that.

    ::

        data --> select, complement if negative --> [lanes] --> IntegerValue, a lane each --> expanded
          |                                                          ^
          +--> [scales: 64 of them, the next ones in front] --> [scales of the word]

    Scales come a word at a time in front of their frame and are used in order, so the word shifts: by one scale
    after a row group of keys, after a word of values by those of the tokens that it holds. Keys of a channel are
    of one token, so that all lanes take the first scale; of values each token's lanes take their own.

    Cycle behaviour: one step. ``expanded`` shows the word of the last cycle with ``enable``.

    Parameters:
        config: sizes.

    Ports:
        data: word of memory, which must stand in the cycle with ``enable``.
        enable: takes it; all of the following count in that cycle.
        scales: the word holds scales.
        expansion: `plora.hw.defs.packing.expansion_log2`; 0: ``data`` is the word of FP16 values.
        sub: which of the expanded words.
        token_wise: the word holds values, not keys.
        step: the scales of the word are not needed any more.
        expanded: word of FP16 values (`plora.hw.defs.integers`).
    """

    def __init__(self, config: NdpConfig) -> None:
        self._config = config
        super().__init__(
            {
                "data": In(WORD_BITS),
                "enable": In(1),
                "scales": In(1),
                "expansion": In(EXPANSION_BITS),
                "sub": In(EXPANSION_BITS),
                "token_wise": In(1),
                "step": In(1),
                "expanded": Out(WORD_BITS),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        # Tokens of a word of values, each in so many lanes.
        tokens, token_lanes = DOT_LANES // self._config.channels, DOTS_PER_WORD * self._config.channels
        waiting = Signal(WORD_BITS, reset_less=True)
        used = Signal(data.ArrayLayout(scale_layout, tokens), reset_less=True)
        parts = [taken_apart(m, waiting.word_select(token, SCALE_BITS), f"scale_{token}") for token in range(tokens)]
        with m.If(self.enable):
            m.d.sync += [own.eq(Mux(self.token_wise, part, parts[0])) for own, part in zip(used, parts, strict=True)]
            with m.If(self.scales):
                m.d.sync += waiting.eq(self.data)
            with m.Elif(self.step & self.token_wise):
                m.d.sync += waiting.eq(waiting >> tokens * SCALE_BITS)
            with m.Elif(self.step):
                m.d.sync += waiting.eq(waiting >> SCALE_BITS)

        integer = Signal(reset_less=True)
        lanes = Signal(data.ArrayLayout(FP16_BITS, WORD_VALUES), reset_less=True)
        with m.If(self.enable):
            m.d.sync += integer.eq(self.expansion.any())
        for lane in range(WORD_VALUES):
            value = Signal(MAGNITUDE_BITS + 1, name=f"value_{lane}")
            m.d.comb += value.eq(Mux(self.expansion[1], self._select(lane, DType.INT4), self._select(lane, DType.INT8)))
            magnitude = value[:-1] ^ value[-1].replicate(MAGNITUDE_BITS)
            signed = Cat(magnitude, Const(0, FP16_BITS - MAGNITUDE_BITS - 1), value[-1])
            with m.If(self.enable):
                m.d.sync += lanes[lane].eq(Mux(self.expansion.any(), signed, self.data.word_select(lane, FP16_BITS)))
            unit = IntegerValue()
            add_shared(m, platform, f"lane_{lane}", "integer_value", unit)
            m.d.comb += [
                unit.magnitude.eq(lanes[lane][:MAGNITUDE_BITS]),
                unit.negative.eq(lanes[lane][-1]),
                unit.scale.eq(used[lane // token_lanes]),
                self.expanded.word_select(lane, FP16_BITS).eq(Mux(integer, unit.value, lanes[lane])),
            ]
        return m

    def _select(self, lane: int, dtype: DType) -> Value:
        """The value of ``lane`` in the expanded word ``sub``, sign-extended."""
        bits, words = INTEGER_BITS[dtype], 1 << expansion_log2(dtype)
        values = [self.data.word_select(word * WORD_VALUES + lane, bits) for word in range(words)]
        for bit in range(expansion_log2(dtype)):
            values = [Mux(self.sub[bit], odd, even) for even, odd in zip(values[0::2], values[1::2], strict=True)]
        return values[0].as_signed()
