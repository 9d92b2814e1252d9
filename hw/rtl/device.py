"""The whole device, with its outer ports."""

from __future__ import annotations

from amaranth.hdl import Cat, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out, connect, flipped

from plora.hw.defs.config import NdpConfig
from plora.hw.defs.ports import HOST_BUS, HOST_ID_BITS, INTERRUPT_STREAM, MEMORY_ID_BITS, MMIO_BUS, memory_bus
from plora.hw.rtl.core.core import NdpCore
from plora.hw.rtl.core.signature import NdpCoreSignature
from plora.hw.rtl.front.axi import Axi4LiteSignature, Axi4Signature, msix_signature
from plora.hw.rtl.front.channel_port import ChannelPort
from plora.hw.rtl.front.host_port import HostPort
from plora.hw.rtl.front.line_writer import LineWriter
from plora.hw.rtl.front.links import CORE, HOST, QUEUES
from plora.hw.rtl.front.queue_engine import QueueEngine
from plora.hw.rtl.front.registers import RegisterFile
from plora.hw.rtl.front.slot_reader import SlotReader


class NdpDevice(wiring.Component):
    """Joins front end and core. `plora.hw.defs.ports.device_ports` lists the outer ports.

    ::

        s_io  --> RegisterFile <--> QueueEngine --> msix
                                    |  ^  |  ^
                          SlotReader|  |  |  | fetched / completed
                          LineWriter|  |  v  |
                                    |  | NdpCore
                                    v  |  |  ^
        s_mem --> HostPort -----> ChannelPort x channels --> m_axi_*

    Parameters:
        config: device configuration.
        core: what executes descriptors, a component of `NdpCoreSignature`; `NdpCore` unless given.
    """

    def __init__(self, config: NdpConfig, core: wiring.Component | None = None) -> None:
        if core is not None and core.signature != NdpCoreSignature(config):
            raise TypeError(f"core must have the signature {NdpCoreSignature(config)!r}, not {core.signature!r}")
        self._config = config
        self._core = core
        super().__init__(
            {
                **{memory_bus(c): Out(Axi4Signature(MEMORY_ID_BITS)) for c in range(config.channels)},
                HOST_BUS: In(Axi4Signature(HOST_ID_BITS)),
                MMIO_BUS: In(Axi4LiteSignature()),
                INTERRUPT_STREAM: Out(msix_signature()),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Instantiate the blocks and connect them."""
        m = Module()
        config = self._config
        m.submodules.core = core = NdpCore(config) if self._core is None else self._core
        m.submodules.registers = registers = RegisterFile(config)
        m.submodules.engine = engine = QueueEngine(config)
        m.submodules.slot_reader = slot_reader = SlotReader(config)
        m.submodules.completion_writer = completion_writer = LineWriter(config)
        m.submodules.result_writer = result_writer = LineWriter(config)
        m.submodules.host = host = HostPort(config)

        connect(m, flipped(getattr(self, MMIO_BUS)), registers.s_io)
        connect(m, flipped(getattr(self, HOST_BUS)), host.s_mem)
        connect(m, engine.msix, flipped(getattr(self, INTERRUPT_STREAM)))
        connect(m, registers.queues, engine.control)
        m.d.comb += [
            registers.core_idle.eq(core.idle),
            registers.counters.eq(core.counters),
            core.clear_counters.eq(registers.clear_counters),
        ]
        connect(m, engine.slot_request, slot_reader.request)
        connect(m, slot_reader.slot, engine.slot)
        connect(m, engine.line, completion_writer.line)
        connect(m, completion_writer.ack, engine.ack)
        connect(m, engine.fetched, core.fetched)
        connect(m, core.completed, engine.completed)

        line = core.write.line
        m.d.comb += [
            result_writer.line.valid.eq(line.valid),
            result_writer.line.payload.address.eq(line.payload.address),
            result_writer.line.payload.data.eq(line.payload.data),
            result_writer.line.payload.strobe.eq(line.payload.strobe),
            result_writer.line.payload.tag.eq(line.payload.tag),
            line.ready.eq(result_writer.line.ready),
            core.write.ack.eq(result_writer.ack.valid),
            core.write.ack_error.eq(result_writer.ack.valid & result_writer.ack.payload.error),
            core.write.ack_tag.eq(result_writer.ack.payload.tag),
        ]
        ports = [ChannelPort(config) for _ in range(config.channels)]
        m.d.comb += registers.tripped.eq(Cat(port.tripped for port in ports).any())
        for index, port in enumerate(ports):
            m.submodules[f"channel_{index}"] = port
            m.d.comb += [port.share.eq(registers.share), port.tick.eq(registers.tick)]
            connect(m, port.axi, flipped(getattr(self, memory_bus(index))))
            read = core.read[index]
            m.d.comb += [
                port.reads[CORE].request.valid.eq(read.request.valid),
                port.reads[CORE].request.payload.address.eq(read.request.payload.address),
                port.reads[CORE].request.payload.length.eq(read.request.payload.length),
                read.request.ready.eq(port.reads[CORE].request.ready),
                read.response.valid.eq(port.reads[CORE].response.valid),
                read.response.payload.data.eq(port.reads[CORE].response.payload.data),
                read.response.payload.error.eq(port.reads[CORE].response.payload.error),
                port.reads[CORE].response.ready.eq(1),
            ]
            connect(m, host.reads[index], port.reads[HOST])
            connect(m, slot_reader.channels[index], port.reads[QUEUES])
            connect(m, result_writer.channels[index], port.writes[CORE])
            connect(m, host.writes[index], port.writes[HOST])
            connect(m, completion_writer.channels[index], port.writes[QUEUES])
        return m
