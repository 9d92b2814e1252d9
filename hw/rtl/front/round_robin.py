"""Fair choice among requests."""

from __future__ import annotations

from amaranth.hdl import Assert, Cat, Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out


class RoundRobin(wiring.Component):
    """Grants one of ``count`` requests; whoever was granted last is asked last the next time.

    Parameters:
        count: number of requesters, at least 1.

    Ports:
        requests: one bit a requester.
        taken: the grant is used in this cycle.
        grant: index of the chosen request; meaningless unless ``any``.
        any: there is a request.

    Cycle behaviour: ``grant`` follows ``requests`` in the same cycle. Between two grants of one
    requester every other that keeps requesting is granted at most once.
    """

    def __init__(self, count: int) -> None:
        if not isinstance(count, int) or count < 1:
            raise TypeError(f"count must be a positive integer, not {count!r}")
        self._count = count
        # Bit i set: requester i lies above the one granted last.
        self._above = Signal(count)
        super().__init__({"requests": In(count), "taken": In(1), "grant": Out(range(max(2, count))), "any": Out(1)})

    def elaborate(self, platform: object) -> Module:
        """Build two priority encoders: above the last grant, and over all for when there is none above."""
        m = Module()
        above = self._above
        first, later = Signal.like(self.grant), Signal.like(self.grant)
        for index in reversed(range(self._count)):
            with m.If(self.requests[index]):
                m.d.comb += first.eq(index)
            with m.If(self.requests[index] & above[index]):
                m.d.comb += later.eq(index)
        m.d.comb += [
            self.any.eq(self.requests.any()),
            self.grant.eq(first),
        ]
        with m.If((self.requests & above).any()):
            m.d.comb += self.grant.eq(later)
        with m.If(self.taken):
            with m.Switch(self.grant):
                for index in range(self._count):
                    with m.Case(index):
                        m.d.sync += above.eq(-1 << (index + 1))
        return m


class StandingRoundRobin(wiring.Component):
    """A `RoundRobin` whose grant, once seen, stands until it is taken.

    For outputs that must not change while they wait. A requester that was granted must keep asking
    until then.

    Parameters:
        count: number of requesters, at least 1.

    Ports: those of `RoundRobin`; ``taken`` matters only while ``any``.

    Cycle behaviour: ``grant`` follows ``requests`` in the same cycle, or is that of the last cycle if
    that was not taken.
    """

    def __init__(self, count: int) -> None:
        self._inner = RoundRobin(count)
        super().__init__({name: self._inner.signature.members[name] for name in self._inner.signature.members})

    def elaborate(self, platform: object) -> Module:
        """Build the arbiter with its requests masked while a grant stands."""
        m = Module()
        m.submodules.inner = inner = self._inner
        stands, choice = Signal(), Signal.like(self.requests)
        m.d.comb += [
            inner.requests.eq(Mux(stands, choice, self.requests)),
            inner.taken.eq(inner.any & self.taken),
            self.grant.eq(inner.grant),
            self.any.eq(inner.any),
        ]
        m.d.sync += [
            stands.eq(inner.any & ~self.taken),
            choice.eq(Cat(inner.grant == index for index in range(len(self.requests)))),
            Assert(~stands | (choice & self.requests).any(), "a granted requester has withdrawn"),
        ]
        return m
