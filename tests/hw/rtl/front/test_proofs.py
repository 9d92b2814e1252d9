"""What is proved of the front end for all inputs and all times; each proof finds a seeded bug."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from amaranth.hdl import Array, Cat, Module, Mux, Signal

from plora.hw.defs.config import preset
from plora.hw.defs.ports import ADDRESS_BITS, Burst
from plora.hw.rtl.front import access_watch, channel_port, host_port, queue_engine, round_robin
from plora.hw.rtl.front.links import Debt
from tests.hw.rtl.formal import Assert, Assume, Proof, free_inputs, hold
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
