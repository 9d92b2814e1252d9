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
    """Up to ``depth`` entries, in registers.

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
        self._shape = shape
        self._depth = depth
        super().__init__(
            {
                "input": In(stream.Signature(shape)),
                "output": Out(stream.Signature(shape)),
                "level": Out(range(depth + 1)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        depth = self._depth
        m.submodules.entries = entries = memory.Memory(shape=Shape.cast(self._shape), depth=depth, init=[])
        write, read = entries.write_port(), entries.read_port(domain="comb")
        head, tail = Signal(range(depth)), Signal(range(depth))
        put, take = Signal(), Signal()
        m.d.comb += [
            self.input.ready.eq(self.level != depth),
            self.output.valid.eq(self.level != 0),
            put.eq(self.input.valid & self.input.ready),
            take.eq(self.output.valid & self.output.ready),
            write.addr.eq(tail),
            write.data.eq(Value.cast(self.input.payload)),
            write.en.eq(put),
            read.addr.eq(head),
            Value.cast(self.output.payload).eq(read.data),
        ]
        with m.If(put):
            m.d.sync += tail.eq(next_index(tail, depth))
        with m.If(take):
            m.d.sync += head.eq(next_index(head, depth))
        m.d.sync += self.level.eq(self.level + put - take)
        return m
