"""Lines of one requester on their way to all channels, and their acknowledgements on the way back."""

from __future__ import annotations

from amaranth.hdl import Cat, Module
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out, connect, flipped

from plora.hw.defs.config import WORD_BYTES, NdpConfig
from plora.hw.rtl.front.links import TAG_BITS, ChannelWrite, ack_layout, channel_of, local_of
from plora.hw.rtl.front.round_robin import RoundRobin
from plora.hw.rtl.interfaces import WORD_BITS, word_address_bits
from plora.hw.rtl.queue import StreamQueue


def tagged_line_layout(config: NdpConfig) -> data.StructLayout:
    """A masked write of one line at DPA word ``address``."""
    return data.StructLayout(
        {"address": word_address_bits(config), "data": WORD_BITS, "strobe": WORD_BYTES, "tag": TAG_BITS}
    )


class LineWriter(wiring.Component):
    """Sends each line to its channel and merges the acknowledgements of all channels.

    Parameters:
        config: device configuration.

    Ports:
        line: stream of lines by DPA.
        ack: stream of acknowledgements, always taken; their order over different channels is memory's.
        channels: one `ChannelWrite` a channel.

    Cycle behaviour: one line and one acknowledgement a cycle. A line is at its channel the cycle after it was taken,
    an acknowledgement at ``ack`` two cycles after its channel gave it, or later: channels that have one at the same
    time take turns. All is buffered so that no path leads from the requester to a channel or from one channel to
    another within a cycle.
    """

    def __init__(self, config: NdpConfig) -> None:
        self._config = config
        super().__init__(
            {
                "line": In(stream.Signature(tagged_line_layout(config))),
                "ack": Out(stream.Signature(ack_layout, always_ready=True)),
                "channels": Out(ChannelWrite(config)).array(config.channels),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build the distributor and the merger."""
        m = Module()
        config = self._config
        m.submodules.lines = lines = StreamQueue(tagged_line_layout(config), 2)
        connect(m, flipped(self.line), lines.input)
        line = lines.output
        channel = channel_of(config, line.payload.address)
        acks = [StreamQueue(ack_layout, 2) for _ in self.channels]
        for index, (port, ack) in enumerate(zip(self.channels, acks, strict=True)):
            m.submodules[f"ack_{index}"] = ack
            connect(m, flipped(port.ack), ack.input)
            m.d.comb += [
                port.line.payload.address.eq(local_of(config, line.payload.address)),
                port.line.payload.data.eq(line.payload.data),
                port.line.payload.strobe.eq(line.payload.strobe),
                port.line.payload.tag.eq(line.payload.tag),
                port.line.valid.eq(line.valid & (channel == index)),
            ]
        m.d.comb += line.ready.eq(
            Cat((channel == index) & port.line.ready for index, port in enumerate(self.channels)).any()
        )

        m.submodules.turn = turn = RoundRobin(config.channels)
        m.d.comb += [
            turn.requests.eq(Cat(ack.output.valid for ack in acks)),
            turn.taken.eq(turn.any),
        ]
        m.d.sync += self.ack.valid.eq(turn.any)
        with m.Switch(turn.grant):
            for index, ack in enumerate(acks):
                with m.Case(index):
                    m.d.sync += self.ack.payload.eq(ack.output.payload)
                    m.d.comb += ack.output.ready.eq(1)
        return m
