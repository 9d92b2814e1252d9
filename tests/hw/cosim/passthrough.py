"""A small top with the outer ports of the device: stores and loads pass through to memory, registers remember.

It lets the test bench be tested without the device: s_mem goes straight to the channel that holds the
line, one access at a time; s_io is a file of 16 registers. Writing register 15 sends an interrupt; writing
the index of one of `FAULTS` to register 14 makes the top break that rule, so that a test sees it noticed.
"""

from __future__ import annotations

from amaranth import Array, Const, Module, Mux, Signal, Value
from amaranth.hdl import Assert, Cat
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from plora.hw.build.platform import add_shared
from plora.hw.defs.ports import HOST_BUS, HOST_ID_BITS, INTERRUPT_STREAM, MEMORY_ID_BITS, MMIO_BUS, memory_bus
from plora.hw.rtl.front.axi import Axi4LiteSignature, Axi4Signature, msix_signature

FAULTS = (
    "none",
    "withdraw_ar",
    "change_aw",
    "change_w",
    "cross_4k",
    "narrow",
    "wlast",
    "beyond_memory",
    "unaligned",
    "fixed_burst",
    "wrong_bid",
    "rlast",
    "assertion",
    "hang",
)

FAULT_REGISTER, INTERRUPT_REGISTER = 14, 15


class Locate(wiring.Component):
    """Channel and channel-local address of a DPA; used twice below, emitted once."""

    def __init__(self, channels: int) -> None:
        self._bits = (channels - 1).bit_length()
        super().__init__({"dpa": In(48), "channel": Out(max(self._bits, 1)), "offset": Out(48)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        if self._bits:
            m.d.comb += self.channel.eq(self.dpa[6 : 6 + self._bits])
        m.d.comb += self.offset.eq(Cat(Const(0, 6), self.dpa[6 + self._bits :]))
        return m


class Passthrough(wiring.Component):
    """The test top; see the module's docstring."""

    def __init__(self, channels: int) -> None:
        self._channels = channels
        super().__init__(
            {
                **{memory_bus(i): Out(Axi4Signature(MEMORY_ID_BITS)) for i in range(channels)},
                HOST_BUS: In(Axi4Signature(HOST_ID_BITS)),
                MMIO_BUS: In(Axi4LiteSignature()),
                INTERRUPT_STREAM: Out(msix_signature()),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        registers = [Signal(32, name=f"register_{i}") for i in range(16)]
        faulty = {fault: registers[FAULT_REGISTER] == index for index, fault in enumerate(FAULTS)}
        locations: dict[str, Locate] = {}
        for access in ("write", "read"):
            unit = Locate(self._channels)
            add_shared(m, platform, f"locate_{access}", f"locate_{self._channels}", unit)
            locations[access] = unit
        self._memory_path(m, faulty, locations)
        self._registers(m, registers)
        m.d.comb += Assert(~faulty["assertion"])
        return m

    def _memory_path(self, m: Module, faulty: dict[str, Value], locations: dict[str, Locate]) -> None:
        s = self.s_mem
        ports = [getattr(self, f"m_axi_{i}") for i in range(self._channels)]

        # Writes: keep address and data, offer both to the channel, pass the response back.
        address, identity = Signal(48), Signal(8)
        line, strobe = Signal(512), Signal(64)
        have_address, have_data, sent_address, sent_data = Signal(), Signal(), Signal(), Signal()
        channel, local = locations["write"].channel, locations["write"].offset
        m.d.comb += locations["write"].dpa.eq(address)
        age = Signal(8)
        busy = have_address & have_data
        m.d.comb += [s.awready.eq(~have_address), s.wready.eq(~have_data)]
        with m.If(s.awvalid & s.awready):
            m.d.sync += [address.eq(s.awaddr), identity.eq(s.awid), have_address.eq(1)]
        with m.If(s.wvalid & s.wready):
            m.d.sync += [line.eq(s.wdata), strobe.eq(s.wstrb), have_data.eq(1)]
        with m.If(busy):
            m.d.sync += age.eq(age + 1)
        finished = Signal()
        chosen_b = Array([port.bvalid for port in ports])[channel]
        chosen_resp = Array([port.bresp for port in ports])[channel]
        answered, response = Signal(), Signal(2)
        m.d.comb += [
            s.bvalid.eq(answered),
            s.bid.eq(identity ^ faulty["wrong_bid"]),
            s.bresp.eq(response),
            finished.eq(answered & s.bready),
        ]
        with m.If(chosen_b & busy & ~answered):
            m.d.sync += [answered.eq(1), response.eq(chosen_resp)]
        with m.If(finished):
            m.d.sync += [
                Cat(have_address, have_data, sent_address, sent_data, answered).eq(0),
                age.eq(0),
            ]
        for i, port in enumerate(ports):
            mine = busy & (channel == i)
            m.d.comb += [
                port.awid.eq(i),
                port.awaddr.eq(local),
                port.awlen.eq(faulty["cross_4k"]),
                port.awsize.eq(Mux(faulty["narrow"], 5, 6)),
                port.awburst.eq(~faulty["fixed_burst"]),
                port.awvalid.eq(mine & ~sent_address & ~faulty["hang"]),
                port.wdata.eq(line ^ Mux(faulty["change_w"], age, 0)),
                port.wstrb.eq(strobe),
                port.wlast.eq(~faulty["wlast"]),
                port.wvalid.eq(mine & ~sent_data),
                port.bready.eq(mine & ~answered),
            ]
            with m.If(faulty["cross_4k"]):
                m.d.comb += port.awaddr.eq(4032)
            with m.If(faulty["beyond_memory"]):
                m.d.comb += port.awaddr.eq(1 << 40)
            with m.If(faulty["unaligned"]):
                m.d.comb += port.awaddr.eq(local + 8)
            with m.If(faulty["change_aw"]):
                m.d.comb += port.awaddr.eq(Mux(age[0], local, 0))
            with m.If(port.awvalid & port.awready):
                m.d.sync += sent_address.eq(1)
            with m.If(port.wvalid & port.wready):
                m.d.sync += sent_data.eq(1)

        # Reads, the same.
        read_address, read_id = Signal(48), Signal(8)
        read_line, read_response = Signal(512), Signal(2)
        reading, read_sent, read_done = Signal(), Signal(), Signal()
        read_age = Signal(8)
        read_channel, read_local = locations["read"].channel, locations["read"].offset
        m.d.comb += locations["read"].dpa.eq(read_address)
        m.d.comb += [
            s.arready.eq(~reading),
            s.rvalid.eq(read_done),
            s.rid.eq(read_id),
            s.rdata.eq(read_line),
            s.rresp.eq(read_response),
            s.rlast.eq(~faulty["rlast"]),
        ]
        with m.If(s.arvalid & s.arready):
            m.d.sync += [read_address.eq(s.araddr), read_id.eq(s.arid), reading.eq(1), read_age.eq(0)]
        with m.If(reading):
            m.d.sync += read_age.eq(read_age + 1)
        with m.If(s.rvalid & s.rready):
            m.d.sync += Cat(reading, read_sent, read_done).eq(0)
        for i, port in enumerate(ports):
            mine = reading & (read_channel == i)
            offered = mine & ~read_sent
            m.d.comb += [
                port.arid.eq(i),
                port.araddr.eq(read_local),
                port.arsize.eq(6),
                port.arburst.eq(1),
                port.arvalid.eq(offered & ~(faulty["withdraw_ar"] & read_age[0])),
                port.rready.eq(mine & ~read_done),
            ]
            with m.If(port.arvalid & port.arready):
                m.d.sync += read_sent.eq(1)
            with m.If(port.rvalid & port.rready):
                m.d.sync += [read_line.eq(port.rdata), read_response.eq(port.rresp), read_done.eq(1)]

    def _registers(self, m: Module, signals: list[Signal]) -> None:
        s = self.s_io
        registers = Array(signals)
        have_address, have_data, answered = Signal(), Signal(), Signal()
        address, value = Signal(16), Signal(32)
        m.d.comb += [
            s.awready.eq(~have_address),
            s.wready.eq(~have_data),
            s.bvalid.eq(answered),
            # Registers beyond the file answer with DECERR.
            s.bresp.eq(Mux(address[6:] == 0, 0, 3)),
        ]
        with m.If(s.awvalid & s.awready):
            m.d.sync += [address.eq(s.awaddr), have_address.eq(1)]
        with m.If(s.wvalid & s.wready):
            m.d.sync += [value.eq(s.wdata), have_data.eq(1)]
        with m.If(have_address & have_data & ~answered):
            m.d.sync += answered.eq(1)
            with m.If(address[6:] == 0):
                m.d.sync += registers[address[2:6]].eq(value)
        with m.If(s.bvalid & s.bready):
            m.d.sync += Cat(have_address, have_data, answered).eq(0)

        reading, read_address = Signal(), Signal(16)
        m.d.comb += [
            s.arready.eq(~reading),
            s.rvalid.eq(reading),
            s.rdata.eq(registers[read_address[2:6]]),
        ]
        with m.If(s.arvalid & s.arready):
            m.d.sync += [reading.eq(1), read_address.eq(s.araddr)]
        with m.If(s.rvalid & s.rready):
            m.d.sync += reading.eq(0)

        with m.If(s.bvalid & s.bready & (address == 4 * INTERRUPT_REGISTER)):
            m.d.sync += [
                self.msix.valid.eq(1),
                self.msix.payload.data.eq(value),
                self.msix.payload.address.eq(0x1234_5678_9ABC_DEF0),
            ]
        with m.Elif(self.msix.ready):
            m.d.sync += self.msix.valid.eq(0)
