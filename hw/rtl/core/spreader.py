"""The operand spreader: from one stripe of an operand row to the word that each channel multiplies."""

from __future__ import annotations

from collections.abc import Sequence

from amaranth.hdl import Module, Mux, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from plora.hw.defs.config import DOT_LANES, WORD_VALUES, NdpConfig
from plora.hw.rtl.core.job import channel_bits
from plora.hw.rtl.interfaces import WORD_BITS
from plora.hw.rtl.pe.array import TAP_BITS, split_bits


def expand_parts(m: Module, parts: Sequence[Value], split_log2: Value, name: str) -> list[Value]:
    """Return for every channel what belongs to its part: channel c is of part ``c * parts / channels``."""
    channels_log2 = (len(parts) - 1).bit_length()
    expanded: list[Value] = []
    for channel in range(len(parts)):
        choice = parts[0]
        for parts_log2 in range(1, channels_log2 + 1):
            part = channel >> (channels_log2 - parts_log2)
            if part != channel >> (channels_log2 - parts_log2 + 1):
                chosen = Signal(len(parts[0]), name=f"{name}_{channel}_of_{1 << parts_log2}")
                m.d.comb += chosen.eq(Mux(split_log2 >= parts_log2, parts[part], choice))
                choice = chosen
        expanded.append(choice)
    return expanded


def repeat_for_taps(bits: Value, tap: Value) -> Value:
    """Return ``bits``, which cover a word's lanes, with those of the first tap's lanes in every tap."""
    lane_bits = len(bits) // WORD_VALUES
    half, quarter = bits[: DOT_LANES * lane_bits], bits[: DOT_LANES // 2 * lane_bits]
    return Mux(tap == 0, bits, Mux(tap == 1, half.replicate(2), quarter.replicate(4)))


class OperandSpreader(wiring.Component):
    """For one PE row: picks the operand words of a beat from a stripe and gives them to the channels.

    With K dealt over P parts, channel c belongs to part g = c * P / channels and multiplies operand
    word ``t * P + g`` in beat t: one word goes to all channels of a part. The P words lie side by side
    in a stripe, at a multiple of P. Halving the stripe until P words are left picks them, with as many
    2:1 multiplexers as the stripe has words; about three times as many give them to the channels.

    A kept word, or one with several taps, is always the word of a single part. With several taps the
    first lanes of the word are repeated for each.

    Ports:
        stripe: a word of each channel, from the input buffer.
        kept: a word of the kept intermediate, used instead where ``from_kept``.
        part: number of part 0's word in the stripe.
        split_log2, tap: see `plora.hw.rtl.pe.array.beat_layout`.
        enable: take new words at this edge.
        words: for each channel; one cycle later.
    """

    def __init__(self, config: NdpConfig) -> None:
        self._config = config
        super().__init__(
            {
                "stripe": In(WORD_BITS).array(config.channels),
                "kept": In(WORD_BITS),
                "from_kept": In(1),
                "part": In(max(1, channel_bits(config))),
                "split_log2": In(split_bits(config)),
                "tap": In(TAP_BITS),
                "enable": In(1),
                "words": Out(WORD_BITS).array(config.channels),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        parts: list[Value] = list(self.stripe)
        for level in reversed(range(channel_bits(self._config))):
            upper = Signal(name=f"upper_{1 << level}")
            m.d.comb += upper.eq((self.split_log2 <= level) & self.part[level])
            for g in range(1 << level):
                chosen = Signal(WORD_BITS, name=f"part_{g}_of_{1 << level}")
                m.d.comb += chosen.eq(Mux(upper, parts[(1 << level) + g], parts[g]))
                parts[g] = chosen
        single = Signal(WORD_BITS)
        m.d.comb += single.eq(repeat_for_taps(Mux(self.from_kept, self.kept, parts[0]), self.tap))
        parts[0] = single
        spread = expand_parts(m, parts, self.split_log2, "word")
        with m.If(self.enable):
            m.d.sync += [word.eq(value) for word, value in zip(self.words, spread, strict=True)]
        return m
