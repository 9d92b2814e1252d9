"""Reads line 0 of submission slots, several at a time, and gives what they hold in the order of asking."""

from __future__ import annotations

from functools import reduce
from operator import or_

from amaranth.hdl import Array, Cat, Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from plora.hw.defs.config import NdpConfig
from plora.hw.defs.descriptor import DESCRIPTOR_BITS
from plora.hw.defs.queue import EXPONENTS_OFFSET, SOFTMAX_SCALE_OFFSET, VALID_OFFSET
from plora.hw.rtl.front.links import TAG_BITS, ChannelRead, channel_of, local_of
from plora.hw.rtl.interfaces import (
    SCALE_BITS,
    descriptor_layout,
    exponents_layout,
    read_response_layout,
    word_address_bits,
)

READERS = 1 << TAG_BITS
"""Lines on their way at a time: what hides the latency of memory between two descriptors."""

VALID_BITS = 32

slot_layout = data.StructLayout(
    {
        "descriptor": descriptor_layout,
        "scale": SCALE_BITS,
        "exponents": exponents_layout,
        "valid": VALID_BITS,
        "error": 1,
    }
)
"""What is needed of line 0: descriptor, softmax scale, exponents, valid word, and whether memory answered with an
error."""


class SlotReader(wiring.Component):
    """Up to `READERS` reads of one line each, over all channels.

    Parameters:
        config: device configuration.

    Ports:
        request: stream of DPA word addresses.
        slot: stream of `slot_layout`, in the order of the requests.
        channels: one `ChannelRead` a channel.

    Cycle behaviour: a request goes to its channel in the cycle in which it is taken; an answer can be
    at ``slot`` two cycles after it came. Answers are taken as they come, from all channels at once. The tag of a read
    is its place in the ring of entries, so answers may come in any order.
    """

    def __init__(self, config: NdpConfig) -> None:
        self._config = config
        super().__init__(
            {
                "request": In(stream.Signature(word_address_bits(config))),
                "slot": Out(stream.Signature(slot_layout)),
                "channels": Out(ChannelRead(config)).array(config.channels),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build the ring of entries."""
        m = Module()
        config, request = self._config, self.request
        entries = Array(Signal(slot_layout, reset_less=True, name=f"entry_{i}") for i in range(READERS))
        arrived = Signal(READERS)
        # Head: the oldest read; tail: the next to be made. Equal when none or all are in use.
        head, tail = Signal(TAG_BITS), Signal(TAG_BITS)
        in_use = Signal(range(READERS + 1))
        room, asked, given = Signal(), Signal(), Signal()

        channel = channel_of(config, request.payload)
        for index, port in enumerate(self.channels):
            m.d.comb += [
                port.request.valid.eq(request.valid & room & (channel == index)),
                port.request.payload.address.eq(local_of(config, request.payload)),
                port.request.payload.tag.eq(tail),
            ]
        m.d.comb += [
            room.eq(in_use != READERS),
            request.ready.eq(room & Array(port.request.ready for port in self.channels)[channel]),
            asked.eq(request.valid & request.ready),
            given.eq(arrived.bit_select(head, 1) & (~self.slot.valid | self.slot.ready)),
        ]
        with m.If(~self.slot.valid | self.slot.ready):
            m.d.sync += [self.slot.valid.eq(given), self.slot.payload.eq(entries[head])]
        m.d.sync += in_use.eq(in_use + asked - given)
        with m.If(asked):
            m.d.sync += tail.eq(tail + 1)
        with m.If(given):
            m.d.sync += [head.eq(head + 1), arrived.bit_select(head, 1).eq(0)]

        # Every read has an entry of its own, so the answers of all channels can be taken at once.
        fields = {
            "descriptor": slice(0, DESCRIPTOR_BITS),
            "scale": slice(8 * SOFTMAX_SCALE_OFFSET, 8 * SOFTMAX_SCALE_OFFSET + SCALE_BITS),
            "exponents": slice(8 * EXPONENTS_OFFSET, 8 * EXPONENTS_OFFSET + exponents_layout.size),
            "valid": slice(8 * VALID_OFFSET, 8 * VALID_OFFSET + VALID_BITS),
        }
        for port in self.channels:
            m.d.comb += port.response.ready.eq(1)
        for tag in range(READERS):
            comes = [port.response.valid & (port.response.payload.tag == tag) for port in self.channels]
            answer = Signal(read_response_layout, name=f"answer_{tag}")
            m.d.comb += answer.eq(
                reduce(
                    or_,
                    (
                        Cat(port.response.payload.data, port.response.payload.error)
                        & come.replicate(answer.shape().size)
                        for come, port in zip(comes, self.channels, strict=True)
                    ),
                )
            )
            with m.If(Cat(comes).any()):
                m.d.sync += [
                    *(entries[tag][name].eq(answer.data[place]) for name, place in fields.items()),
                    entries[tag].error.eq(answer.error),
                    arrived[tag].eq(1),
                ]
        return m
