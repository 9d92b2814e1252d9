"""One memory channel: several requesters inside the device share one AXI4 port."""

from __future__ import annotations

from amaranth.hdl import Array, Cat, Const, Module, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from plora.hw.defs.config import NdpConfig
from plora.hw.defs.ports import MEMORY_ID_BITS, Burst
from plora.hw.rtl.front.axi import Axi4Signature
from plora.hw.rtl.front.links import LOG2_WORD_BYTES, REQUESTERS, TAG_BITS, ChannelRead, ChannelWrite
from plora.hw.rtl.front.round_robin import StandingRoundRobin


class ChannelPort(wiring.Component):
    """Merges the accesses of `REQUESTERS` requesters into one AXI4 port and hands the answers back.

    The transaction id says who asked (bits 3:2) and carries the requester's tag (bits 1:0), so memory
    may answer different requesters in any order. Reads and writes are arbitrated separately, each in
    turn (round robin), one burst or line at a time. A choice, once shown to memory, stands until
    memory takes it.

    Parameters:
        config: device configuration.

    Ports:
        reads, writes: the requesters, `ChannelRead` and `ChannelWrite` each.
        axi: the channel's AXI4 port; addresses are byte offsets within the channel.

    Cycle behaviour: requests and answers pass within the cycle (no registers in the way); one burst
    request, one word, one line and one acknowledgement a cycle. Address and data of a line are
    offered at once and taken in any order; the next line is offered when both were taken, so data
    follows the order of the addresses and neither waits for the other.
    """

    def __init__(self, config: NdpConfig) -> None:
        self._config = config
        # Of the line on offer: memory has taken its address already, its data already.
        self._address_taken, self._data_taken = Signal(), Signal()
        super().__init__(
            {
                "reads": In(ChannelRead(config)).array(REQUESTERS),
                "writes": In(ChannelWrite(config)).array(REQUESTERS),
                "axi": Out(Axi4Signature(MEMORY_ID_BITS)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build the two arbiters and the return paths."""
        m = Module()
        self._read(m)
        self._write(m)
        return m

    def _read(self, m: Module) -> None:
        axi = self.axi
        m.submodules.read_turn = turn = StandingRoundRobin(REQUESTERS)
        m.d.comb += [
            turn.requests.eq(Cat(r.request.valid for r in self.reads)),
            turn.taken.eq(axi.arready),
            axi.arvalid.eq(turn.any),
            axi.arsize.eq(LOG2_WORD_BYTES),
            axi.arburst.eq(Burst.INCR),
        ]
        with m.Switch(turn.grant):
            for index, requester in enumerate(self.reads):
                request = requester.request
                with m.Case(index):
                    m.d.comb += [
                        axi.araddr.eq(_byte_address(request.payload.address)),
                        axi.arlen.eq(request.payload.length),
                        axi.arid.eq(Cat(request.payload.tag, Const(index, 2))),
                        request.ready.eq(axi.arready),
                    ]
        for index, requester in enumerate(self.reads):
            response = requester.response
            m.d.comb += [
                response.payload.data.eq(axi.rdata),
                response.payload.error.eq(axi.rresp[1]),
                response.payload.tag.eq(axi.rid[:TAG_BITS]),
                response.valid.eq(axi.rvalid & (axi.rid[TAG_BITS:] == index)),
            ]
        m.d.comb += axi.rready.eq(Array(r.response.ready for r in self.reads)[axi.rid[TAG_BITS:]])

    def _write(self, m: Module) -> None:
        axi = self.axi
        address_taken, data_taken, done = self._address_taken, self._data_taken, Signal()
        m.submodules.write_turn = turn = StandingRoundRobin(REQUESTERS)
        m.d.comb += [
            turn.requests.eq(Cat(w.line.valid for w in self.writes)),
            turn.taken.eq(done),
            axi.awvalid.eq(turn.any & ~address_taken),
            axi.wvalid.eq(turn.any & ~data_taken),
            axi.wlast.eq(1),
            axi.awlen.eq(0),
            axi.awsize.eq(LOG2_WORD_BYTES),
            axi.awburst.eq(Burst.INCR),
            done.eq((address_taken | axi.awready) & (data_taken | axi.wready)),
        ]
        m.d.sync += [
            address_taken.eq(turn.any & ~done & (address_taken | axi.awready)),
            data_taken.eq(turn.any & ~done & (data_taken | axi.wready)),
        ]
        with m.Switch(turn.grant):
            for index, requester in enumerate(self.writes):
                line = requester.line
                with m.Case(index):
                    m.d.comb += [
                        axi.awaddr.eq(_byte_address(line.payload.address)),
                        axi.awid.eq(Cat(line.payload.tag, Const(index, 2))),
                        axi.wdata.eq(line.payload.data),
                        axi.wstrb.eq(line.payload.strobe),
                        line.ready.eq(done),
                    ]
        for index, requester in enumerate(self.writes):
            ack = requester.ack
            m.d.comb += [
                ack.payload.error.eq(axi.bresp[1]),
                ack.payload.tag.eq(axi.bid[:TAG_BITS]),
                ack.valid.eq(axi.bvalid & (axi.bid[TAG_BITS:] == index)),
            ]
        m.d.comb += axi.bready.eq(Array(w.ack.ready for w in self.writes)[axi.bid[TAG_BITS:]])


def _byte_address(word: Value) -> Value:
    return Cat(Const(0, LOG2_WORD_BYTES), word)
