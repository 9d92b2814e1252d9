"""Ordinary loads and stores of the host: an AXI4 subordinate in front of all memory channels."""

from __future__ import annotations

from amaranth.hdl import Array, Cat, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out, connect, flipped

from plora.hw.defs.config import WORD_BYTES, NdpConfig
from plora.hw.defs.ports import ADDRESS_BITS, HOST_ID_BITS, Burst, Resp
from plora.hw.rtl.front.axi import Axi4Signature
from plora.hw.rtl.front.fifo import StreamFifo
from plora.hw.rtl.front.links import (
    LOG2_WORD_BYTES,
    ChannelRead,
    ChannelWrite,
    channel_bits,
    channel_of,
    local_of,
)
from plora.hw.rtl.interfaces import WORD_BITS, word_address_bits
from plora.hw.rtl.queue import StreamQueue

BURST_QUEUE = 4
MIN_LINES_PER_CHANNEL = 8

burst_layout = data.StructLayout({"id": HOST_ID_BITS, "address": ADDRESS_BITS, "len": 8, "size": 3, "burst": 2})
"""The address of a burst as it stands on AW or AR."""

beat_layout = data.StructLayout({"data": WORD_BITS, "strobe": WORD_BYTES})
"""A beat of write data."""


def line_layout(config: NdpConfig) -> data.StructLayout:
    """A beat of write data on its way to DPA word ``word``."""
    return data.StructLayout({"word": word_address_bits(config), "beat": beat_layout})


def ticket_layout(config: NdpConfig) -> data.StructLayout:
    """What is owed to the host for one beat, in the order of the beats.

    ``channel``: where the answer comes from, unless ``refused``; ``resp``: what is answered then;
    ``last``: ends its burst; ``id``: of the burst.
    """
    return data.StructLayout(
        {"channel": max(1, channel_bits(config)), "refused": 1, "resp": 2, "last": 1, "id": HOST_ID_BITS}
    )


class BurstSplitter(wiring.Component):
    """Turns bursts into single beats of known channel and legality.

    Parameters:
        config: device configuration.

    Ports:
        burst: stream of `burst_layout`.
        word: DPA word of the current beat.
        ticket: its `ticket_layout`.
        valid: there is a beat.
        next: it is used in this cycle.

    Addresses advance as AXI prescribes for INCR bursts of any beat size, from an aligned start or not.
    A burst that is not INCR is refused with SLVERR, a beat beyond memory with DECERR.

    Cycle behaviour: one beat a cycle, the first as soon as the burst is there, which is taken with its
    last.
    """

    def __init__(self, config: NdpConfig) -> None:
        self._config = config
        # Byte address of the current beat, with the carry of the last; beats of the burst before it.
        self._address, self._count = Signal(ADDRESS_BITS + 1), Signal(8)
        super().__init__(
            {
                "burst": In(stream.Signature(burst_layout)),
                "word": Out(word_address_bits(config)),
                "ticket": Out(ticket_layout(config)),
                "valid": Out(1),
                "next": In(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build the address counter."""
        m = Module()
        config = self._config
        burst, address, count = self.burst.payload, self._address, self._count
        # Address of the next beat but the first.
        later = Signal.like(address)
        beyond = address[config.dpa_bits :].any()
        not_incr = burst.burst != Burst.INCR
        size_bytes = (1 << burst.size)[: LOG2_WORD_BYTES + 1]
        m.d.comb += [
            address.eq(Mux(count == 0, burst.address, later)),
            self.word.eq(address[LOG2_WORD_BYTES:]),
            self.valid.eq(self.burst.valid),
            self.ticket.channel.eq(channel_of(config, self.word)),
            self.ticket.refused.eq(not_incr | beyond),
            self.ticket.resp.eq(Mux(not_incr, Resp.SLVERR, Resp.DECERR)),
            self.ticket.last.eq(count == burst.len),
            self.ticket.id.eq(burst.id),
        ]
        with m.If(self.next):
            m.d.sync += [
                later.eq((address & ~(size_bytes - 1)) + size_bytes),
                count.eq(count + 1),
            ]
            with m.If(self.ticket.last):
                m.d.sync += count.eq(0)
                m.d.comb += self.burst.ready.eq(1)
        return m


def _credits(m: Module, count: int, spent: list[Value], returned: list[Value], prefix: str) -> Value:
    """Return, one bit a channel, whether fewer than ``count`` answers are owed by it."""
    free = []
    for index, (take, give) in enumerate(zip(spent, returned, strict=True)):
        left = Signal(range(count + 1), init=count, name=f"{prefix}_{index}")
        m.d.sync += left.eq(left - take + give)
        free.append(left != 0)
    return Cat(*free)


class HostReader(wiring.Component):
    """The host's loads: every beat becomes a read of one line; data goes back in order.

    Parameters:
        config: device configuration.
        lines: lines on their way at most, over all channels, at least 4.

    Ports:
        burst: stream of read addresses.
        beat: stream of ``{id, data, resp, last}``, in the order of the addresses.
        channels: one `ChannelRead` a channel.

    Cycle behaviour: one beat a cycle. A line is asked for only if there is room for its answer, so the
    channels never wait for the host. Requests are buffered: no path leads from one channel to another within a cycle.
    """

    def __init__(self, config: NdpConfig, lines: int) -> None:
        self._config = config
        self._lines = lines
        super().__init__(
            {
                "burst": In(stream.Signature(burst_layout)),
                "beat": Out(
                    stream.Signature(data.StructLayout({"id": HOST_ID_BITS, "data": WORD_BITS, "resp": 2, "last": 1}))
                ),
                "channels": Out(ChannelRead(config)).array(config.channels),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build splitter, order, and one buffer a channel."""
        m = Module()
        config = self._config
        depth = max(MIN_LINES_PER_CHANNEL, self._lines // config.channels)
        m.submodules.splitter = splitter = BurstSplitter(config)
        m.submodules.order = order = StreamFifo(ticket_layout(config), self._lines)
        m.submodules.bursts = bursts = StreamFifo(burst_layout, BURST_QUEUE)
        connect(m, flipped(self.burst), bursts.i)
        connect(m, bursts.o, splitter.burst)
        word_layout = data.StructLayout({"data": WORD_BITS, "error": 1})
        answers = [StreamFifo(word_layout, depth) for _ in self.channels]
        asked = [Signal(name=f"asked_{c}") for c in range(config.channels)]
        given = [Signal(name=f"given_{c}") for c in range(config.channels)]
        room = _credits(m, depth, asked, given, "room")

        channel = splitter.ticket.channel
        m.submodules.words = words = StreamQueue(word_address_bits(config), 2)
        word_channel, put = channel_of(config, words.output.payload), Signal()
        m.d.comb += [
            words.input.valid.eq(
                splitter.valid & order.i.ready & ~splitter.ticket.refused & room.bit_select(channel, 1)
            ),
            words.input.payload.eq(splitter.word),
            put.eq(words.input.valid & words.input.ready),
            words.output.ready.eq(Array(port.request.ready for port in self.channels)[word_channel]),
        ]
        for index, (port, answer) in enumerate(zip(self.channels, answers, strict=True)):
            m.submodules[f"answer_{index}"] = answer
            m.d.comb += [
                port.request.valid.eq(words.output.valid & (word_channel == index)),
                port.request.payload.address.eq(local_of(config, words.output.payload)),
                asked[index].eq(put & (channel == index)),
                answer.i.valid.eq(port.response.valid),
                answer.i.payload.data.eq(port.response.payload.data),
                answer.i.payload.error.eq(port.response.payload.error),
                port.response.ready.eq(answer.i.ready),
                given[index].eq(answer.o.valid & answer.o.ready),
            ]
        m.d.comb += [
            splitter.next.eq((splitter.valid & order.i.ready & splitter.ticket.refused) | put),
            order.i.valid.eq(splitter.next),
            order.i.payload.eq(splitter.ticket),
        ]

        ticket, beat = order.o.payload, self.beat
        word, arrived = Signal(word_layout), Signal()
        m.d.comb += [
            arrived.eq(Array(answer.o.valid for answer in answers)[ticket.channel]),
            word.eq(Array(answer.o.payload.as_value() for answer in answers)[ticket.channel]),
            beat.valid.eq(order.o.valid & (ticket.refused | arrived)),
            beat.payload.id.eq(ticket.id),
            beat.payload.data.eq(Mux(ticket.refused, 0, word.data)),
            beat.payload.resp.eq(Mux(ticket.refused, ticket.resp, Mux(word.error, Resp.SLVERR, Resp.OKAY))),
            beat.payload.last.eq(ticket.last),
            order.o.ready.eq(beat.valid & beat.ready),
        ]
        for index, answer in enumerate(answers):
            m.d.comb += answer.o.ready.eq(order.o.ready & ~ticket.refused & (ticket.channel == index))
        return m


class HostWriter(wiring.Component):
    """The host's stores: every beat becomes a masked write of one line; a burst is answered when all are acknowledged.

    Parameters:
        config: device configuration.
        lines: lines on their way at most, over all channels, at least 4.

    Ports:
        burst: stream of write addresses.
        beat: stream of `beat_layout`.
        done: stream of ``{id, resp}``, in the order of the addresses; the worst answer of its beats.
        channels: one `ChannelWrite` a channel.

    Cycle behaviour: one beat a cycle, buffered as the reader's requests are. Beats of a refused burst are swallowed.
    """

    def __init__(self, config: NdpConfig, lines: int) -> None:
        self._config = config
        self._lines = lines
        super().__init__(
            {
                "burst": In(stream.Signature(burst_layout)),
                "beat": In(stream.Signature(beat_layout)),
                "done": Out(stream.Signature(data.StructLayout({"id": HOST_ID_BITS, "resp": 2}))),
                "channels": Out(ChannelWrite(config)).array(config.channels),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build splitter, order, and one queue of acknowledgements a channel."""
        m = Module()
        config = self._config
        depth = max(MIN_LINES_PER_CHANNEL, self._lines // config.channels)
        m.submodules.splitter = splitter = BurstSplitter(config)
        m.submodules.beats = beats = StreamFifo(beat_layout, BURST_QUEUE)
        m.submodules.order = order = StreamFifo(ticket_layout(config), self._lines)
        m.submodules.bursts = bursts = StreamFifo(burst_layout, BURST_QUEUE)
        connect(m, flipped(self.burst), bursts.i)
        connect(m, bursts.o, splitter.burst)
        connect(m, flipped(self.beat), beats.i)
        acks = [StreamFifo(1, depth) for _ in self.channels]
        sent = [Signal(name=f"sent_{c}") for c in range(config.channels)]
        given = [Signal(name=f"given_{c}") for c in range(config.channels)]
        room = _credits(m, depth, sent, given, "room")

        channel = splitter.ticket.channel
        m.submodules.lines = lines = StreamQueue(line_layout(config), 2)
        line, put, present = lines.output.payload, Signal(), Signal()
        line_channel = channel_of(config, line.word)
        m.d.comb += [
            present.eq(splitter.valid & beats.o.valid & order.i.ready),
            lines.input.valid.eq(present & ~splitter.ticket.refused & room.bit_select(channel, 1)),
            lines.input.payload.word.eq(splitter.word),
            lines.input.payload.beat.eq(beats.o.payload),
            put.eq(lines.input.valid & lines.input.ready),
            lines.output.ready.eq(Array(port.line.ready for port in self.channels)[line_channel]),
        ]
        for index, (port, ack) in enumerate(zip(self.channels, acks, strict=True)):
            m.submodules[f"ack_{index}"] = ack
            m.d.comb += [
                port.line.valid.eq(lines.output.valid & (line_channel == index)),
                port.line.payload.address.eq(local_of(config, line.word)),
                port.line.payload.data.eq(line.beat.data),
                port.line.payload.strobe.eq(line.beat.strobe),
                sent[index].eq(put & (channel == index)),
                ack.i.valid.eq(port.ack.valid),
                ack.i.payload.eq(port.ack.payload.error),
                port.ack.ready.eq(ack.i.ready),
                given[index].eq(ack.o.valid & ack.o.ready),
            ]
        m.d.comb += [
            splitter.next.eq((present & splitter.ticket.refused) | put),
            beats.o.ready.eq(splitter.next),
            order.i.valid.eq(splitter.next),
            order.i.payload.eq(splitter.ticket),
        ]

        ticket, done = order.o.payload, self.done
        arrived, resp, worst = Signal(), Signal(2), Signal(2)
        m.d.comb += [
            arrived.eq(order.o.valid & (ticket.refused | Array(ack.o.valid for ack in acks)[ticket.channel])),
            resp.eq(
                Mux(
                    ticket.refused,
                    ticket.resp,
                    Mux(Array(ack.o.payload for ack in acks)[ticket.channel], Resp.SLVERR, Resp.OKAY),
                )
            ),
            done.valid.eq(arrived & ticket.last),
            done.payload.id.eq(ticket.id),
            done.payload.resp.eq(Mux(resp > worst, resp, worst)),
            order.o.ready.eq(arrived & (~ticket.last | done.ready)),
        ]
        with m.If(order.o.ready):
            m.d.sync += worst.eq(Mux(ticket.last, 0, done.payload.resp))
        for index, ack in enumerate(acks):
            m.d.comb += ack.o.ready.eq(order.o.ready & ~ticket.refused & (ticket.channel == index))
        return m


class HostPort(wiring.Component):
    """The bus ``s_mem``: the host's way to device memory, reserved window included.

    Any length and beat size, INCR only, at any address; strobes are honoured byte by byte. Reads are
    answered in the order of their addresses, writes likewise, whatever their ids. A write is
    answered after memory has acknowledged all of it.

    Parameters:
        config: device configuration.
        lines: lines on their way at most, for reads and for writes each.

    Ports:
        s_mem: the AXI4 bus.
        reads, writes: one `ChannelRead` and one `ChannelWrite` a channel.

    Cycle behaviour: one line of 64 bytes a cycle in each direction.
    """

    LINES = 64
    """Lines that cover the latency of memory at one line a cycle."""

    def __init__(self, config: NdpConfig, lines: int = LINES) -> None:
        if not isinstance(lines, int) or lines < 4:
            raise TypeError(f"lines must be an integer of at least 4, not {lines!r}")
        self._config = config
        self._lines = lines
        super().__init__(
            {
                "s_mem": In(Axi4Signature(HOST_ID_BITS)),
                "reads": Out(ChannelRead(config)).array(config.channels),
                "writes": Out(ChannelWrite(config)).array(config.channels),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Connect the two directions to the bus."""
        m = Module()
        bus = self.s_mem
        m.submodules.reader = reader = HostReader(self._config, self._lines)
        m.submodules.writer = writer = HostWriter(self._config, self._lines)
        for inner, outer in zip(reader.channels, self.reads, strict=True):
            connect(m, inner, flipped(outer))
        for inner, outer in zip(writer.channels, self.writes, strict=True):
            connect(m, inner, flipped(outer))
        m.d.comb += [
            Value.cast(reader.burst.payload).eq(Cat(bus.arid, bus.araddr, bus.arlen, bus.arsize, bus.arburst)),
            reader.burst.valid.eq(bus.arvalid),
            bus.arready.eq(reader.burst.ready),
            bus.rid.eq(reader.beat.payload.id),
            bus.rdata.eq(reader.beat.payload.data),
            bus.rresp.eq(reader.beat.payload.resp),
            bus.rlast.eq(reader.beat.payload.last),
            bus.rvalid.eq(reader.beat.valid),
            reader.beat.ready.eq(bus.rready),
            Value.cast(writer.burst.payload).eq(Cat(bus.awid, bus.awaddr, bus.awlen, bus.awsize, bus.awburst)),
            writer.burst.valid.eq(bus.awvalid),
            bus.awready.eq(writer.burst.ready),
            writer.beat.payload.data.eq(bus.wdata),
            writer.beat.payload.strobe.eq(bus.wstrb),
            writer.beat.valid.eq(bus.wvalid),
            bus.wready.eq(writer.beat.ready),
            bus.bid.eq(writer.done.payload.id),
            bus.bresp.eq(writer.done.payload.resp),
            bus.bvalid.eq(writer.done.valid),
            writer.done.ready.eq(bus.bready),
        ]
        return m


__all__ = ["BurstSplitter", "HostPort", "HostReader", "HostWriter"]
