"""A first-in first-out queue of structured entries between two streams."""

from __future__ import annotations

from typing import Any

from amaranth.hdl import Module, Mux, Shape, Signal, Value
from amaranth.lib import memory, stream, wiring
from amaranth.lib.wiring import In, Out


def next_index(index: Value, depth: int) -> Value:
    """Return ``index + 1`` modulo ``depth``."""
    return Mux(index == depth - 1, 0, index + 1)


class StreamQueue(wiring.Component):
    """Up to ``depth`` entries, in registers. It cuts all paths between its two sides: what it shows to either
    depends on registers alone, and the entry at the output is one.

    Parameters:
        shape: shape of an entry.
        depth: entries, at least 2 (one alone would take an entry only every other cycle).

    Ports:
        input, output: the streams. An entry is at the output the cycle after it was taken; one may be
            taken and one given in every cycle. A full queue takes nothing, even while it gives.
        level: entries held.
    """

    def __init__(self, shape: Any, depth: int) -> None:
        if depth < 2:
            raise ValueError(f"depth must be at least 2, not {depth!r}")
        self._depth = depth
        bits = Shape.cast(shape).width
        # The entry at the output, and those behind it; of a single one behind it no memory is made.
        self._first = Signal(bits, name="first", reset_less=True)
        self._second = Signal(bits, name="second", reset_less=True) if depth == 2 else None
        super().__init__(
            {
                "input": In(stream.Signature(shape)),
                "output": Out(stream.Signature(shape)),
                "level": Out(range(depth + 1)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        put, take, advances, behind = Signal(), Signal(), Signal(), Signal()
        entry = Value.cast(self.input.payload)
        m.d.comb += [
            self.input.ready.eq(self.level != self._depth),
            self.output.valid.eq(self.level != 0),
            Value.cast(self.output.payload).eq(self._first),
            put.eq(self.input.valid & self.input.ready),
            take.eq(self.output.valid & self.output.ready),
            advances.eq(~self.output.valid | self.output.ready),
            behind.eq(self.level > 1),
        ]
        following = self._behind(m, put & ~(advances & ~behind), take & behind)
        with m.If(advances):
            m.d.sync += self._first.eq(Mux(behind, following, entry))
        m.d.sync += self.level.eq(self.level + put - take)
        return m

    def _behind(self, m: Module, put: Value, take: Value) -> Value:
        """Keep the entries after the first; return the oldest of them."""
        entry = Value.cast(self.input.payload)
        if self._second is not None:
            # Without a look at what the output does: it matters only once it is counted.
            with m.If(self.input.ready):
                m.d.sync += self._second.eq(entry)
            return self._second
        depth = self._depth - 1
        m.submodules.entries = entries = memory.Memory(shape=len(entry), depth=depth, init=[])
        write, read = entries.write_port(), entries.read_port(domain="comb")
        head, tail = Signal(range(depth)), Signal(range(depth))
        m.d.comb += [write.addr.eq(tail), write.data.eq(entry), write.en.eq(put), read.addr.eq(head)]
        with m.If(put):
            m.d.sync += tail.eq(next_index(tail, depth))
        with m.If(take):
            m.d.sync += head.eq(next_index(head, depth))
        return read.data
