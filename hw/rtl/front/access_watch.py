"""What memory owes one requester of a channel, and errors in its stead where it does not pay."""

from __future__ import annotations

from amaranth.hdl import Array, Cat, Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from plora.hw.rtl.front.links import EPOCH_BITS, TAG_BITS, Debt

WORDS_BITS = 7
"""Bits of the answers owed for one burst of up to 64 words."""


class AccessWatch(wiring.Component):
    """Counts the answers owed by tag and gives errors for all of them when memory has fallen silent.

    Silent is memory that owes something for a whole period between two ticks and answers nothing in it.
    From then on the requester's transactions carry another epoch, so that an answer that comes late
    after all is known for one that nobody waits for, unless three more silences lie between.

    Parameters:
        debt: tags in use, and answers owed of each at most.

    Ports:
        tick: a period is over.
        words, tag: the access that the requester asks for.
        fits: it may be taken as far as debts go; stays so while the access waits.
        sent: it is taken in this cycle.
        held: it stands on the bus and must not change; a silence waits until it is taken.
        answer_tag, answer_epoch: of the answer that memory offers.
        known: somebody waits for that answer.
        answered: it is taken.
        closed: errors are being given; nothing may be sent.
        error, error_tag: an error to be given, and its tag.
        error_taken: it is taken.
        owed: answers owed, of all tags.
        epoch: of the accesses that are sent now.
        tripped: memory was found silent; one cycle.

    Cycle behaviour: the first error is there in the cycle after ``tripped``, then one a cycle.
    """

    def __init__(self, debt: Debt) -> None:
        if not (1 <= debt.tags <= 1 << TAG_BITS and debt.most >= 1):
            raise ValueError(f"debt must have 1 ... {1 << TAG_BITS} tags and at least one answer, not {debt!r}")
        self._debt = debt
        self._owed = Array(Signal(range(debt.most + 1), name=f"owed_{tag}") for tag in range(debt.tags))
        self._silent = Signal()
        super().__init__(
            {
                "tick": In(1),
                "words": In(WORDS_BITS),
                "tag": In(TAG_BITS),
                "fits": Out(1),
                "sent": In(1),
                "held": In(1),
                "answer_tag": In(TAG_BITS),
                "answer_epoch": In(EPOCH_BITS),
                "known": Out(1),
                "answered": In(1),
                "closed": Out(1),
                "error": Out(1),
                "error_tag": Out(TAG_BITS),
                "error_taken": In(1),
                "owed": Out(range(debt.tags * debt.most + 1)),
                "epoch": Out(EPOCH_BITS),
                "tripped": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build the counters and the two periods that make a silence."""
        m = Module()
        owed, most = self._owed, self._debt.most
        owes = Signal(len(owed))
        total = Signal.like(self.owed)
        m.d.comb += [
            owes.eq(Cat(count != 0 for count in owed)),
            total.eq(sum(count for count in owed)),
            self.owed.eq(total),
            self.fits.eq((self.tag < len(owed)) & (owed[self.tag] + self.words <= most)),
            self.known.eq(
                ~self.closed
                & (self.answer_epoch == self.epoch)
                & (self.answer_tag < len(owed))
                & (owed[self.answer_tag] != 0)
            ),
            self.error.eq(self.closed & owes.any()),
            self.tripped.eq(self.tick & self._silent & owes.any() & ~self.answered & ~self.held & ~self.closed),
        ]
        for tag in reversed(range(len(owed))):
            with m.If(owes[tag]):
                m.d.comb += self.error_tag.eq(tag)
        for tag, count in enumerate(owed):
            more = Mux(self.sent & (self.tag == tag), self.words, 0)
            less = (self.answered & (self.answer_tag == tag)) | (self.error_taken & (self.error_tag == tag))
            m.d.sync += count.eq(count + more - less)
        with m.If(self.answered | ~owes.any()):
            m.d.sync += self._silent.eq(0)
        with m.Elif(self.tick):
            m.d.sync += self._silent.eq(1)
        with m.If(self.tripped):
            m.d.sync += [self.closed.eq(1), self.epoch.eq(self.epoch + 1)]
        with m.Elif(~owes.any()):
            m.d.sync += self.closed.eq(0)
        return m
