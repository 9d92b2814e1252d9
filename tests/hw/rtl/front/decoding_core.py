"""A core that judges descriptors and executes none: what lies before the array, at ten times the speed."""

from __future__ import annotations

from amaranth.hdl import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import connect, flipped

from plora.hw.defs.config import NdpConfig
from plora.hw.rtl.core.decoder import Decoder
from plora.hw.rtl.core.instruction_buffer import InstructionBuffer
from plora.hw.rtl.core.signature import NdpCoreSignature


class DecodingCore(wiring.Component):
    """Instruction buffer and decoder of the core; every descriptor is completed with the decoder's status."""

    def __init__(self, config: NdpConfig) -> None:
        self._config = config
        super().__init__(NdpCoreSignature(config))

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.instruction_buffer = instructions = InstructionBuffer(self._config)
        m.submodules.decoder = decoder = Decoder(self._config)
        connect(m, flipped(self.fetched), instructions.fetched)
        connect(m, instructions.output, decoder.input)
        record, completed = decoder.output.payload.record, self.completed
        m.d.comb += [
            completed.valid.eq(decoder.output.valid),
            decoder.output.ready.eq(completed.ready),
            completed.payload.descriptor.eq(record.descriptor),
            completed.payload.queue.eq(record.queue),
            completed.payload.status.eq(record.status),
            self.idle.eq(~self.fetched.valid & (instructions.level == 0)),
        ]
        return m
