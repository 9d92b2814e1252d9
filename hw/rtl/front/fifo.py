"""A first-in first-out buffer between two streams of any shape."""

from __future__ import annotations

from typing import Any

from amaranth.hdl import Module, Shape, Value
from amaranth.lib import fifo, stream, wiring
from amaranth.lib.wiring import In, Out


class StreamFifo(wiring.Component):
    """Holds up to ``depth`` payloads; the standard library's buffered FIFO with the payload's shape kept.

    Parameters:
        shape: shape of the payload.
        depth: payloads held; at least 4, below which the buffered FIFO passes one payload in two cycles.

    Ports: ``i`` and ``o``, both streams of ``shape``.

    Cycle behaviour: a payload can leave two cycles after it came; one payload a cycle.
    """

    def __init__(self, shape: Any, depth: int) -> None:
        if not isinstance(depth, int) or depth < 4:
            raise TypeError(f"depth must be an integer of at least 4, not {depth!r}")
        self._shape = shape
        self._depth = depth
        super().__init__({"i": In(stream.Signature(shape)), "o": Out(stream.Signature(shape))})

    @property
    def depth(self) -> int:
        """Payloads held at most."""
        return self._depth

    def elaborate(self, platform: object) -> Module:
        """Build the buffer."""
        m = Module()
        m.submodules.buffer = buffer = fifo.SyncFIFOBuffered(width=Shape.cast(self._shape).width, depth=self._depth)
        m.d.comb += [
            buffer.w_data.eq(Value.cast(self.i.payload)),
            buffer.w_en.eq(self.i.valid),
            self.i.ready.eq(buffer.w_rdy),
            Value.cast(self.o.payload).eq(buffer.r_data),
            self.o.valid.eq(buffer.r_rdy),
            buffer.r_en.eq(self.o.ready),
        ]
        return m
