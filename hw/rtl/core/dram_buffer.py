"""The DRAM buffer: weight words between their arrival from memory and their last use by the array."""

from __future__ import annotations

from amaranth.hdl import Cat, Module
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from plora.hw.build.platform import add_shared
from plora.hw.defs.config import NdpConfig
from plora.hw.rtl.core.channel_reader import word_layout
from plora.hw.rtl.core.rendezvous import Rendezvous
from plora.hw.rtl.core.sram import Sram
from plora.hw.rtl.interfaces import WORD_BITS


def position_bits(config: NdpConfig) -> int:
    """Bits of a position in the stream of stripes: an address of the buffer and one bit more."""
    return config.dram_buffer_stripes.bit_length()


class DramBuffer(wiring.Component):
    """A ring of ``config.dram_buffer_stripes`` stripes, filled by each channel at its own pace.

    Positions count stripes from reset and wrap at twice the depth; stripe ``p`` lies at address
    ``p`` modulo the depth. The reader of memory asks for no stripe whose address still holds one that
    is needed, so the buffer itself never refuses a word. A stripe may be read any number of times.

    Ports:
        words: what arrives from each channel; words of GPU operands are not for this buffer.
        arrived: position of the first stripe that is not complete yet.
        read_position, read_enable: at an edge with ``read_enable`` that stripe comes to ``stripe``, and
            stays there until the next. It must have arrived.
        stripe: a word of each channel.
    """

    def __init__(self, config: NdpConfig) -> None:
        self._config = config
        super().__init__(
            {
                "words": In(word_layout).array(config.channels),
                "arrived": Out(position_bits(config)),
                "read_position": In(position_bits(config)),
                "read_enable": In(1),
                "stripe": Out(data.ArrayLayout(WORD_BITS, config.channels)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        depth, channels = self._config.dram_buffer_stripes, self._config.channels
        m.submodules.rendezvous = rendezvous = Rendezvous(channels=channels, count_bits=position_bits(self._config))
        weights = [word.valid & ~word.operand for word in self.words]
        m.d.comb += [rendezvous.events.eq(Cat(weights)), self.arrived.eq(rendezvous.common)]
        for channel, word in enumerate(self.words):
            words = Sram(width=WORD_BITS, depth=depth)
            add_shared(m, platform, f"channel_{channel}", f"sram_{WORD_BITS}x{depth}", words)
            m.d.comb += [
                words.write_address.eq(rendezvous.counts[channel][:-1]),
                words.write_enable.eq(weights[channel]),
                words.write_data.eq(word.data),
                words.read_address.eq(self.read_position[:-1]),
                words.read_enable.eq(self.read_enable),
                self.stripe[channel].eq(words.read_data),
            ]
        return m
