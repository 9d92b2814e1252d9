"""The instruction buffer: descriptors that the queue engine fetched ahead of their execution."""

from __future__ import annotations

from amaranth.hdl import Module
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out, connect, flipped

from plora.hw.defs.config import NdpConfig
from plora.hw.rtl.interfaces import fetched_layout
from plora.hw.rtl.queue import StreamQueue


class InstructionBuffer(wiring.Component):
    """Holds ``config.instruction_buffer_depth`` fetched descriptors in order, each with what its queue allows.

    Ports:
        fetched: from the queue engine.
        output: to the decoder, one cycle later at the earliest.
        level: descriptors held.
    """

    def __init__(self, config: NdpConfig) -> None:
        self._config = config
        shape = fetched_layout(config)
        super().__init__(
            {
                "fetched": In(stream.Signature(shape)),
                "output": Out(stream.Signature(shape)),
                "level": Out(range(config.instruction_buffer_depth + 1)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.queue = queue = StreamQueue(fetched_layout(self._config), self._config.instruction_buffer_depth)
        connect(m, flipped(self.fetched), queue.input)
        connect(m, queue.output, flipped(self.output))
        m.d.comb += self.level.eq(queue.level)
        return m
