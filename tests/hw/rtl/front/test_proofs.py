"""What is proved of the front end for all inputs and all times; each proof finds a seeded bug."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from amaranth.hdl import Array, Cat, Module, Mux, Shape, Signal, Value
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from plora.hw.defs.config import preset
from plora.hw.defs.ports import ADDRESS_BITS, Burst
from plora.hw.rtl.front import access_watch, channel_port, host_port, queue_engine, registers, round_robin, slot_reader
from plora.hw.rtl.front.links import Debt
from tests.hw.rtl.formal import Assert, Assume, Elaborated, Proof, free_inputs, hold
from tests.hw.rtl.front.engine_properties import enable_properties, engine_properties

CONFIG = replace(preset("tiny"), name="proof", channels=2, dpa_bits=16)


def round_robin_properties(source: ModuleType) -> tuple[Module, list[Any]]:
    """The last requester keeps asking: between two of its grants nobody is granted twice."""
    count = 4
    patient = count - 1
    m = Module()
    m.submodules.dut = dut = source.RoundRobin(count)
    served = Signal(count)
    m.d.comb += [
        Assume(dut.requests[patient]),
        Assert(dut.any),
        Assert(Array(dut.requests)[dut.grant]),
    ]
    with m.If(dut.taken):
        with m.If(dut.grant == patient):
            m.d.sync += served.eq(0)
        with m.Else():
            m.d.comb += Assert(~served.bit_select(dut.grant, 1))
            m.d.sync += served.bit_select(dut.grant, 1).eq(1)
    # The arbiter goes upwards from the patient one: whoever was served since lies below the next.
    for index in range(patient):
        with m.If(served[index]):
            m.d.comb += Assert(~dut._above[: index + 1].any())
    m.d.comb += [
        Assert((dut._above | dut._above << 1)[:count] == dut._above),
        Assert(dut._above[patient] | ~served.any()),
    ]
    return m, free_inputs(dut)


def channel_port_properties(source: ModuleType) -> tuple[Module, list[Any]]:
    """If requesters keep the rule of streams, so does the port; addresses and data of writes go in pairs."""
    m = Module()
    m.submodules.dut = dut = source.ChannelPort(CONFIG)
    axi = dut.axi
    for read in dut.reads:
        hold(m, Assume, read.request.valid, read.request.ready, read.request.payload.as_value())
    # Data passes unchanged, bit by bit alike: a few bits stand for all.
    for write in dut.writes:
        line = write.line.payload
        hold(m, Assume, write.line.valid, write.line.ready, Cat(line.address, line.tag, line.data[:4], line.strobe[:4]))
    hold(m, Assert, axi.arvalid, axi.arready, Cat(axi.arid, axi.araddr, axi.arlen, axi.arsize, axi.arburst))
    hold(m, Assert, axi.awvalid, axi.awready, Cat(axi.awid, axi.awaddr, axi.awlen, axi.awsize, axi.awburst))
    hold(m, Assert, axi.wvalid, axi.wready, Cat(axi.wdata[:4], axi.wstrb[:4], axi.wlast))

    # Nobody is given more than is owed to him.
    for ports, watches in ((dut.reads, dut._read_watches), (dut.writes, dut._write_watches)):
        for port, watch in zip(ports, watches, strict=True):
            answer = port.response if hasattr(port, "response") else port.ack
            with m.If(answer.valid):
                m.d.comb += Assert(Array(watch._owed)[answer.payload.tag] != 0)
    # Accepted addresses, and accepted data, less the lines that requesters were told are gone.
    address_lead, data_lead, owner = Signal(2), Signal(2), Signal(2)
    gone = Cat(w.line.valid & w.line.ready for w in dut.writes)
    address, data = axi.awvalid & axi.awready, axi.wvalid & axi.wready
    m.d.sync += [
        address_lead.eq(address_lead + address - gone.any()),
        data_lead.eq(data_lead + data - gone.any()),
    ]
    with m.If(address):
        m.d.sync += owner.eq(axi.awid[4:])
    m.d.comb += [
        Assert(address_lead == dut._address_taken),
        Assert(data_lead == dut._data_taken),
        Assert(~(dut._address_taken & dut._data_taken)),
        Assert((gone & (gone - 1)[: len(gone)]) == 0),
    ]
    # Data that trails its address is that of the requester whose address it was.
    words = Array(w.line.payload.data[:4] for w in dut.writes)
    with m.If(dut._address_taken):
        m.d.comb += [Assert(axi.wvalid), Assert(axi.awid[4:] == owner), Assert(axi.wdata[:4] == words[owner])]
    return m, free_inputs(dut)


def watch_properties(source: ModuleType) -> tuple[Module, list[Any]]:
    """Answers and errors together are as many as were owed; a silence ends within two periods; then nothing is owed."""
    debt = Debt(2, 5)
    m = Module()
    m.submodules.dut = dut = source.AccessWatch(debt)
    # What the channel port does with it.
    m.d.comb += [
        Assume(~dut.sent | (dut.held & dut.fits & ~dut.closed)),
        Assume(~dut.held | (dut.fits & ~dut.closed)),
        Assume(dut.words != 0),
        Assume(~dut.answered | dut.known),
        Assume(~dut.error_taken | dut.error),
    ]
    owed = [Signal(4, name=f"asked_less_given_{tag}") for tag in range(debt.tags)]
    for tag, count in enumerate(owed):
        more = Mux(dut.sent & (dut.tag == tag), dut.words, 0)
        given = (dut.answered & (dut.answer_tag == tag)) | (dut.error_taken & (dut.error_tag == tag))
        m.d.sync += count.eq(count + more - given)
        m.d.comb += [Assert(count == dut._owed[tag]), Assert(count <= debt.most)]
    nothing = Cat(owed) == 0
    m.d.comb += [
        Assert(dut.owed == owed[0] + owed[1]),
        # Nobody is given what nobody waits for.
        Assert(~dut.known | (Array(owed)[dut.answer_tag] != 0)),
        Assert(~dut.error | (Array(owed)[dut.error_tag] != 0)),
        Assert(~(dut.known & dut.error)),
        Assert(~dut.known | (dut.answer_epoch == dut.epoch)),
        # Closed means errors until nothing is owed, and one cycle more.
        Assert(~dut.closed | dut.error | nothing),
    ]
    # Periods, to the ends of which nobody offered anything, in which nothing was answered.
    quiet = Signal(3)
    with m.If(dut.answered | nothing | dut.closed | dut.tripped):
        m.d.sync += quiet.eq(0)
    with m.Elif(dut.tick & ~dut.held):
        m.d.sync += quiet.eq(quiet + 1)
    m.d.comb += [Assert(quiet <= 1), Assert((quiet == 0) | dut._silent), Assert(~dut.tripped | ~dut.answered)]
    # The epoch changes with the silence and stays while anything is on offer.
    last, held = Signal.like(dut.epoch), Signal()
    m.d.sync += [last.eq(dut.epoch), held.eq(dut.held & ~dut.sent)]
    m.d.comb += Assert(~held | (dut.epoch == last))
    return m, free_inputs(dut)


def splitter_properties(source: ModuleType) -> tuple[Module, list[Any]]:
    """Beats of a legal burst are as many as it says, step by their size, and stay in its 4 KiB and in memory."""
    m = Module()
    m.submodules.dut = dut = source.BurstSplitter(CONFIG)
    burst = dut.burst.payload
    hold(m, Assume, dut.burst.valid, dut.burst.ready, burst.as_value())
    size_bytes, aligned = Signal(8), Signal(ADDRESS_BITS)
    m.d.comb += [
        size_bytes.eq(1 << burst.size),
        aligned.eq(burst.address & ~(size_bytes - 1)),
        # What AXI asks of the manager of a 64-byte bus.
        Assume(burst.size <= 6),
        Assume((burst.burst != Burst.INCR) | (aligned[:12] + ((burst.len + 1) << burst.size) <= 4096)),
        Assume(~dut.next | dut.valid),
        Assert(~dut.burst.ready | dut.ticket.last),
        Assert(dut._count <= burst.len),
    ]
    beats = Signal(9)
    with m.If(dut.next):
        m.d.sync += beats.eq(Mux(dut.ticket.last, 0, beats + 1))
    m.d.comb += [Assert(beats == dut._count), Assert((beats == 0) | dut.valid)]
    with m.If(dut.valid & (burst.burst == Burst.INCR)):
        m.d.comb += [
            Assert(dut._address == Mux(beats == 0, burst.address, aligned + (beats << burst.size))),
            Assert(dut._address[12:] == burst.address[12:]),
        ]
        with m.If(~dut.ticket.refused):
            m.d.comb += [
                Assert(dut._address < 1 << CONFIG.dpa_bits),
                Assert(dut.word == dut._address[6:]),
                Assert(dut.ticket.channel == dut.word[0]),
            ]
    with m.If(dut.valid & (burst.burst != Burst.INCR)):
        m.d.comb += Assert(dut.ticket.refused)
    return m, free_inputs(dut)


class AnyFifo(wiring.Component):
    """Stands for `StreamFifo` by its promise: what it offers stands until taken, and it may be full at any time."""

    def __init__(self, shape: Any, depth: int) -> None:
        super().__init__({"i": In(stream.Signature(shape)), "o": Out(stream.Signature(shape))})
        self.offer, self.room = Signal(), Signal()
        self.payload = Signal(Shape.cast(shape).width)

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.d.comb += [
            self.o.valid.eq(self.offer),
            Value.cast(self.o.payload).eq(self.payload),
            self.i.ready.eq(self.room),
        ]
        hold(m, Assume, self.o.valid, self.o.ready, self.payload)
        return m


def host_port_properties(source: ModuleType) -> tuple[Module, list[Any]]:
    """Read data and write responses to the host stand until taken, and so do the requests of both directions."""
    made: list[AnyFifo] = []

    def fifo(shape: Any, depth: int) -> AnyFifo:
        made.append(AnyFifo(shape, depth))
        return made[-1]

    source.StreamFifo = fifo  # type: ignore[attr-defined]
    m = Module()
    reader, writer = source.HostReader(CONFIG, 4), source.HostWriter(CONFIG, 4)
    m.submodules.reader, m.submodules.writer = Elaborated(reader), Elaborated(writer)
    hold(m, Assert, reader.beat.valid, reader.beat.ready, Value.cast(reader.beat.payload))
    hold(m, Assert, writer.done.valid, writer.done.ready, Value.cast(writer.done.payload))
    return m, [*free_inputs(reader, writer), *(s for one in made for s in (one.offer, one.room, one.payload))]


def register_properties(source: ModuleType) -> tuple[Module, list[Any]]:
    """Responses and read data of AXI4-Lite stand until taken; there is one for each access; an order stands too."""
    m = Module()
    dut = source.RegisterFile(CONFIG)
    m.submodules.dut = built = Elaborated(dut)
    bus = dut.s_io
    hold(m, Assert, bus.bvalid, bus.bready, bus.bresp)
    hold(m, Assert, bus.rvalid, bus.rready, bus.rdata, bus.rresp)
    command = dut.queues.command
    hold(m, Assert, command.valid, command.ready, Value.cast(command.payload))
    owed = {name: Signal(2, name=f"owed_{name}") for name in ("aw", "w", "r")}
    taken = {
        "aw": (bus.awvalid & bus.awready, bus.bvalid & bus.bready),
        "w": (bus.wvalid & bus.wready, bus.bvalid & bus.bready),
        "r": (bus.arvalid & bus.arready, bus.rvalid & bus.rready),
    }
    for name, (more, less) in taken.items():
        m.d.sync += owed[name].eq(owed[name] + more - less)
        m.d.comb += Assert(owed[name] <= 1)
    m.d.comb += [
        Assert(~bus.bvalid | ((owed["aw"] == 1) & (owed["w"] == 1))),
        Assert(~bus.rvalid | (owed["r"] == 1)),
        Assert(~bus.awready | (owed["aw"] == 0)),
        Assert(~bus.wready | (owed["w"] == 0)),
        Assert(~bus.arready | (owed["r"] == 0)),
        Assert(owed["aw"] == built.inner["have_address"]),
        Assert(owed["w"] == built.inner["have_data"]),
        Assert(owed["r"] == ~built.state("WAIT", "read")),
    ]
    for name in ("ACT", "COMMAND", "CARRIED_OUT", "ANSWER"):
        with m.If(built.state(name, "write")):
            m.d.comb += Assert(built.inner["have_address"] & built.inner["have_data"])
    with m.If(built.state("WIPE", "write")):
        m.d.comb += Assert(~built.inner["have_address"] & ~built.inner["have_data"])
    return m, free_inputs(dut)


def slot_reader_properties(source: ModuleType) -> tuple[Module, list[Any]]:
    """Requests to the channels and slots to the engine stand until taken; no tag is used twice at a time."""
    m = Module()
    dut = source.SlotReader(CONFIG)
    m.submodules.dut = built = Elaborated(dut)
    hold(m, Assume, dut.request.valid, dut.request.ready, dut.request.payload)
    tags = 1 << len(dut.channels[0].request.payload.tag)
    # A channel answers what it was asked, once.
    asked = [Signal(tags, name=f"asked_{c}") for c in range(CONFIG.channels)]
    for mine, port in zip(asked, dut.channels, strict=True):
        request, response = port.request, port.response
        hold(m, Assert, request.valid, request.ready, Value.cast(request.payload))
        hold(m, Assume, response.valid, response.ready, Value.cast(response.payload))
        m.d.comb += Assume(~response.valid | mine.bit_select(response.payload.tag, 1))
        with m.If(response.valid & response.ready):
            m.d.sync += mine.bit_select(response.payload.tag, 1).eq(0)
        with m.If(request.valid & request.ready):
            m.d.comb += Assert(~(asked[0] | asked[1]).bit_select(request.payload.tag, 1))
            m.d.sync += mine.bit_select(request.payload.tag, 1).eq(1)
    m.d.comb += Assert((asked[0] & asked[1]) == 0)
    hold(m, Assert, dut.slot.valid, dut.slot.ready, Value.cast(dut.slot.payload)[:8], dut.slot.payload.error)
    # What is on its way or has come lies between the oldest and the next.
    inner = built.inner
    arrived, head, in_use = inner["arrived"], inner["head"], inner["in_use"]
    waiting = asked[0] | asked[1]
    m.d.comb += [Assert((waiting & arrived) == 0), Assert(in_use <= tags), Assert(inner["tail"] == (head + in_use)[:2])]
    for age in range(tags):
        place = (head + age)[:2]
        m.d.comb += Assert((waiting | arrived).bit_select(place, 1) == (age < in_use))
    return m, free_inputs(dut)


PROOFS = {
    "round robin": Proof(
        round_robin_properties,
        round_robin,
        {"the last one again": ("above.eq(-1 << (index + 1))", "above.eq(-1 << index)")},
        search=4,
    ),
    "channel port": Proof(
        channel_port_properties,
        channel_port,
        {"data of a line forgotten": ("turn.taken.eq(done)", "turn.taken.eq(axi.awready)")},
        depth=3,
        search=4,
    ),
    "access watch": Proof(
        watch_properties,
        access_watch,
        {
            "errors for one too many": ("self.error.eq(self.closed & owes.any())", "self.error.eq(self.closed)"),
            "late answers taken": ("(self.answer_epoch == self.epoch)", "(self.answer_epoch == self.answer_epoch)"),
            "silence in the cycle of an answer": ("& ~self.answered & ~self.held", "& ~self.held"),
        },
        search=12,
    ),
    "slot reader": Proof(
        slot_reader_properties,
        slot_reader,
        {"room for one too many": ("room.eq(in_use != READERS)", "room.eq(1)")},
        search=10,
    ),
    "registers": Proof(
        register_properties,
        registers,
        {
            "answers without waiting": ("with m.If(have_address & have_data):", "with m.If(have_address):"),
            "takes data twice": ("bus.wready.eq(~have_data)", "bus.wready.eq(1)"),
        },
        search=9,
    ),
    "host port": Proof(
        host_port_properties,
        host_port,
        {
            "data that is not there": (
                "beat.valid.eq(order.o.valid & (ticket.refused | arrived))",
                "beat.valid.eq(order.o.valid)",
            )
        },
        search=5,
    ),
    "burst splitter": Proof(
        splitter_properties,
        host_port,
        {"later beats not aligned": ("(address & ~(size_bytes - 1)) + size_bytes", "address + size_bytes")},
        search=3,
    ),
    "enable": Proof(
        enable_properties,
        queue_engine,
        {
            "size of a ring not checked": ("misfit = below | (needed > room)", "misfit = below"),
            "memory not checked": ("(setup.limit > 1 << config.dpa_bits)", "(setup.limit > 1 << 17)"),
        },
        depth=6,
    ),
    "queues": Proof(
        engine_properties,
        queue_engine,
        {
            "wrap one slot late": (
                "return index + 1 == self.control.config.depth[:_DEPTH_BITS]",
                "return index == self.control.config.depth[:_DEPTH_BITS]",
            ),
            "room for one too many": (
                ">= self.control.config.depth[:_DEPTH_BITS]",
                "> self.control.config.depth[:_DEPTH_BITS]",
            ),
            "later reads kept": ("with m.If(flight.queue == self._queue):", "with m.If(0):"),
            "head beyond the tail": ("(moved <= waiting)", "(moved <= waiting + 1)"),
        },
        smaller=partial(engine_properties, queues=1),
    ),
}


@pytest.mark.parametrize("name", PROOFS)
def test_proved(name: str, tmp_path: Path) -> None:
    PROOFS[name].prove(tmp_path)


@pytest.mark.parametrize(("name", "bug"), [(name, bug) for name, proof in PROOFS.items() for bug in proof.bugs])
def test_a_seeded_bug_is_found(name: str, bug: str, tmp_path: Path) -> None:
    PROOFS[name].notices(bug, tmp_path)
