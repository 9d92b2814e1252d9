"""The input buffer: GPU operands, row by row, as the array's rows need them."""

from __future__ import annotations

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from plora.hw.build.platform import add_shared
from plora.hw.defs.config import PE_ROWS, NdpConfig
from plora.hw.rtl.core.channel_reader import word_layout
from plora.hw.rtl.core.job import JOB_SLOTS, input_capacity
from plora.hw.rtl.core.operand_loader import placement_layout
from plora.hw.rtl.core.rendezvous import Rendezvous
from plora.hw.rtl.core.sram import Sram
from plora.hw.rtl.interfaces import WORD_BITS

ARRIVALS_BITS = JOB_SLOTS.bit_length()
"""Bits of the count of arrived operands: more than can be on their way at once."""


class InputBuffer(wiring.Component):
    """For each PE row a ring of stripes. Operand row b goes to PE row b mod 2.

    The stripes of an operand come from memory row after row; pair p of rows lies at stripes
    ``base + p * row_stripes`` and following of both PE rows, so that one read gives the same part of
    two rows. Each channel keeps its own account of where it is in the operand.

    Ports:
        words: what arrives from each channel; words of device operands are not for this buffer.
        placements: by job slot, where an operand goes; must stand from its first word to its last.
        arrivals: operands that arrived whole, modulo ``2**ARRIVALS_BITS``.
        read_address, read_enable: at an edge with ``read_enable`` that stripe of both rows comes to
            ``stripes``, and stays there until the next.
        stripes: for each PE row a word of each channel.
    """

    def __init__(self, config: NdpConfig) -> None:
        self._config = config
        super().__init__(
            {
                "words": In(word_layout).array(config.channels),
                "placements": In(placement_layout(config)).array(JOB_SLOTS),
                "arrivals": Out(ARRIVALS_BITS),
                "read_address": In(range(input_capacity(config))),
                "read_enable": In(1),
                "stripes": Out(data.ArrayLayout(data.ArrayLayout(WORD_BITS, config.channels), PE_ROWS)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        channels, depth = self._config.channels, input_capacity(self._config)
        m.submodules.rendezvous = rendezvous = Rendezvous(channels=channels, count_bits=ARRIVALS_BITS)
        m.d.comb += [
            rendezvous.events.eq(Cat(word.valid & word.operand & word.end for word in self.words)),
            self.arrivals.eq(rendezvous.common),
        ]
        for channel, word in enumerate(self.words):
            address, second_row = self._place(m, channel)
            for row in range(PE_ROWS):
                words = Sram(width=WORD_BITS, depth=depth)
                add_shared(m, platform, f"row_{row}_channel_{channel}", f"sram_{WORD_BITS}x{depth}", words)
                m.d.comb += [
                    words.write_address.eq(address),
                    words.write_enable.eq(word.valid & word.operand & (second_row == row)),
                    words.write_data.eq(word.data),
                    words.read_address.eq(self.read_address),
                    words.read_enable.eq(self.read_enable),
                    self.stripes[row][channel].eq(words.read_data),
                ]
        return m

    def _place(self, m: Module, channel: int) -> tuple[Signal, Signal]:
        """Return the address and the PE row of the word that ``channel`` brings now."""
        word = self.words[channel]
        placement = Signal(placement_layout(self._config), name=f"placement_{channel}")
        with m.Switch(word.slot):
            for slot, candidate in enumerate(self.placements):
                with m.Case(slot):
                    m.d.comb += placement.eq(candidate)
        # Kept between words, and as they are for this word.
        pair_base = Signal.like(placement.base, name=f"pair_base_{channel}", reset_less=True)
        stripe = Signal.like(placement.row_stripes, name=f"stripe_{channel}", reset_less=True)
        second_row = Signal(name=f"second_row_{channel}", reset_less=True)
        here_base = Signal.like(pair_base, name=f"here_base_{channel}")
        here_stripe = Signal.like(stripe, name=f"here_stripe_{channel}")
        here_second = Signal(name=f"here_second_{channel}")
        address = Signal.like(pair_base, name=f"address_{channel}")
        m.d.comb += [
            here_base.eq(Mux(word.start, placement.base, pair_base)),
            here_stripe.eq(Mux(word.start, 0, stripe)),
            here_second.eq(~word.start & second_row),
            address.eq(here_base + here_stripe),
        ]
        with m.If(word.valid & word.operand):
            m.d.sync += [
                pair_base.eq(here_base),
                stripe.eq(here_stripe + 1),
                second_row.eq(here_second),
            ]
            with m.If(here_stripe + 1 == placement.row_stripes):
                m.d.sync += [stripe.eq(0), second_row.eq(~here_second)]
                with m.If(here_second):
                    m.d.sync += pair_base.eq(address + 1)
        return address, here_second
