"""One memory channel: several requesters inside the device share one AXI4 port."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amaranth.hdl import Array, Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from plora.hw.defs.config import NdpConfig
from plora.hw.defs.ports import MEMORY_ID_BITS, Burst
from plora.hw.rtl.front.access_watch import AccessWatch
from plora.hw.rtl.front.axi import Axi4Signature
from plora.hw.rtl.front.links import (
    CORE,
    EPOCH_BITS,
    HOST,
    LOG2_WORD_BYTES,
    READ_DEBTS,
    REQUESTERS,
    TAG_BITS,
    WRITE_DEBTS,
    ChannelRead,
    ChannelWrite,
)
from plora.hw.rtl.front.round_robin import StandingRoundRobin

SHARE_BITS = 16

share_layout = data.StructLayout({"core": SHARE_BITS, "host": SHARE_BITS})
"""Register SHARE: words of the core, and loads and stores of the host, on their way at most; 0: no bound."""

id_layout = data.StructLayout({"tag": TAG_BITS, "epoch": EPOCH_BITS, "requester": 2})
"""A transaction id of ``m_axi_*``."""


class ChannelPort(wiring.Component):
    """Merges the accesses of `REQUESTERS` requesters into one AXI4 port and hands the answers back.

    The transaction id says who asked and carries the requester's tag, so memory may answer different
    requesters in any order. Reads and writes are arbitrated separately, each in turn (round robin), one
    burst or line at a time. A choice, once shown to memory, stands until memory takes it.

    **Share.** A memory that serves in order gives each requester bandwidth in proportion to what it
    has on its way. So a bound on that divides the bandwidth, and costs nothing while the bound
    covers memory's latency: see `share_layout`.

    **Watchdog.** For each requester an `AccessWatch` knows what memory owes. Where memory falls silent
    the requester gets errors instead, one for each word or acknowledgement, and can go on. Answers
    that come after that, or that nobody asked for, are swallowed.

    Parameters:
        config: device configuration.

    Ports:
        reads, writes: the requesters, `ChannelRead` and `ChannelWrite` each. Tags as in `READ_DEBTS` and
            `WRITE_DEBTS`.
        axi: the channel's AXI4 port; addresses are byte offsets within the channel.
        share: see `share_layout`.
        tick: a period of the watchdog is over.
        tripped: somebody got errors from the watchdog; one cycle.

    Cycle behaviour: requests and answers pass within the cycle (no registers in the way); one burst
    request, one word, one line and one acknowledgement a cycle. Address and data of a line are
    offered at once and taken in any order; the next line is offered when both were taken, so data
    follows the order of the addresses and neither waits for the other.
    """

    def __init__(self, config: NdpConfig) -> None:
        self._config = config
        # Of the line on offer: memory has taken its address already, its data already.
        self._address_taken, self._data_taken = Signal(), Signal()
        self._read_watches = [AccessWatch(debt) for debt in READ_DEBTS]
        self._write_watches = [AccessWatch(debt) for debt in WRITE_DEBTS]
        super().__init__(
            {
                "reads": In(ChannelRead(config)).array(REQUESTERS),
                "writes": In(ChannelWrite(config)).array(REQUESTERS),
                "axi": Out(Axi4Signature(MEMORY_ID_BITS)),
                "share": In(share_layout),
                "tick": In(1),
                "tripped": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build the two arbiters and the return paths."""
        m = Module()
        self._read(m)
        self._write(m)
        watches = [*self._read_watches, *self._write_watches]
        m.d.comb += [
            *(watch.tick.eq(self.tick) for watch in watches),
            self.tripped.eq(Cat(watch.tripped for watch in watches).any()),
        ]
        return m

    def _bound(self, m: Module, prefix: str, index: int, watch: AccessWatch, standing: Value) -> Value:
        """True if the access that requester ``index`` asks for may be taken; stays true while it stands."""
        may = Signal(name=f"{prefix}_may_{index}")
        m.d.comb += may.eq(watch.fits & ~watch.closed)
        bounds = {CORE: self.share.core, HOST: self.share.host}
        # The core's results are few, the queues' accesses too: nothing to be shared.
        if index in bounds and (prefix, index) != ("write", CORE):
            bound = Signal(SHARE_BITS, name=f"{prefix}_bound_{index}")
            with m.If(~standing):
                m.d.sync += bound.eq(bounds[index])
            within = (bound == 0) | (watch.owed == 0) | (watch.owed + watch.words <= bound)
            m.d.comb += may.eq(watch.fits & ~watch.closed & within)
        return may

    def _name(self, index: int, watch: AccessWatch, tag: Value) -> Value:
        return Cat(tag, watch.epoch, Const(index, 2))

    def _read(self, m: Module) -> None:
        axi = self.axi
        m.submodules.read_turn = turn = StandingRoundRobin(REQUESTERS)
        requests = []
        for index, (requester, watch) in enumerate(zip(self.reads, self._read_watches, strict=True)):
            m.submodules[f"read_watch_{index}"] = watch
            request = requester.request
            granted = turn.any & (turn.grant == index)
            may = self._bound(m, "read", index, watch, granted & ~axi.arready)
            requests.append(request.valid & may)
            m.d.comb += [
                request.ready.eq(granted & axi.arready),
                watch.words.eq(request.payload.length + 1),
                watch.tag.eq(request.payload.tag),
                watch.sent.eq(granted & axi.arready),
                watch.held.eq(granted),
            ]
            with m.If(turn.grant == index):
                m.d.comb += [
                    axi.araddr.eq(_byte_address(request.payload.address)),
                    axi.arlen.eq(request.payload.length),
                    axi.arid.eq(self._name(index, watch, request.payload.tag)),
                ]
        m.d.comb += [
            turn.requests.eq(Cat(requests)),
            turn.taken.eq(axi.arready),
            axi.arvalid.eq(turn.any),
            axi.arsize.eq(LOG2_WORD_BYTES),
            axi.arburst.eq(Burst.INCR),
        ]
        answers = [requester.response for requester in self.reads]
        for answer in answers:
            m.d.comb += answer.payload.data.eq(axi.rdata)
        m.d.comb += axi.rready.eq(self._answer(m, answers, self._read_watches, axi.rvalid, axi.rid, axi.rresp))

    def _write(self, m: Module) -> None:
        axi = self.axi
        address_taken, data_taken, done = self._address_taken, self._data_taken, Signal()
        m.submodules.write_turn = turn = StandingRoundRobin(REQUESTERS)
        requests = []
        for index, (requester, watch) in enumerate(zip(self.writes, self._write_watches, strict=True)):
            m.submodules[f"write_watch_{index}"] = watch
            line = requester.line
            granted = turn.any & (turn.grant == index)
            may = self._bound(m, "write", index, watch, granted & ~done)
            requests.append(line.valid & may)
            m.d.comb += [
                line.ready.eq(granted & done),
                watch.words.eq(1),
                watch.tag.eq(line.payload.tag),
                watch.sent.eq(granted & done),
                watch.held.eq(granted),
            ]
            with m.If(turn.grant == index):
                m.d.comb += [
                    axi.awaddr.eq(_byte_address(line.payload.address)),
                    axi.awid.eq(self._name(index, watch, line.payload.tag)),
                    axi.wdata.eq(line.payload.data),
                    axi.wstrb.eq(line.payload.strobe),
                ]
        m.d.comb += [
            turn.requests.eq(Cat(requests)),
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
        acks = [requester.ack for requester in self.writes]
        m.d.comb += axi.bready.eq(self._answer(m, acks, self._write_watches, axi.bvalid, axi.bid, axi.bresp))

    def _answer(
        self,
        m: Module,
        answers: Sequence[Any],
        watches: Sequence[AccessWatch],
        valid: Value,
        transaction: Value,
        resp: Value,
    ) -> Value:
        """Hand memory's answer, or an error in its stead, to whom it belongs; return whether it is taken.

        Args:
            answers: to each requester.
            watches: of each requester.
            valid, transaction, resp: memory's answer, its id and its outcome.
        """
        name = data.View(id_layout, transaction)
        ready = []
        for index, (answer, watch) in enumerate(zip(answers, watches, strict=True)):
            mine = valid & (name.requester == index) & watch.known
            m.d.comb += [
                answer.payload.error.eq(watch.closed | resp[1]),
                answer.payload.tag.eq(Mux(watch.closed, watch.error_tag, name.tag)),
                answer.valid.eq(watch.error | mine),
                watch.answer_tag.eq(name.tag),
                watch.answer_epoch.eq(name.epoch),
                watch.answered.eq(mine & answer.ready),
                watch.error_taken.eq(watch.error & answer.ready),
            ]
            ready.append(answer.ready | ~watch.known)
        return Array([*ready, Const(1)])[name.requester]


def _byte_address(word: Value) -> Value:
    return Cat(Const(0, LOG2_WORD_BYTES), word)
