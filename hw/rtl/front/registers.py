"""The registers that the host reads and writes over CXL.io."""

from __future__ import annotations

from typing import NamedTuple

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import data, memory, wiring
from amaranth.lib.wiring import In, Out

from plora.hw.defs.config import PE_ROWS, NdpConfig
from plora.hw.defs.ports import Resp
from plora.hw.defs.registers import (
    GLOBAL,
    ID_VALUE,
    INTERFACE_VERSION,
    MMIO_BITS,
    PENDING_BASE,
    QUEUE,
    QUEUE_BASE,
    QUEUE_STRIDE,
    RESET_SHARE,
    RESET_WATCHDOG,
    VECTOR,
    VECTOR_BASE,
    VECTOR_STRIDE,
    global_offset,
)
from plora.hw.rtl.core.signature import COUNTERS, counters_layout
from plora.hw.rtl.front.axi import Axi4LiteSignature
from plora.hw.rtl.front.channel_port import share_layout
from plora.hw.rtl.front.records import (
    CONFIG_REGISTERS,
    REGISTER_BITS,
    Command,
    QueueControl,
    queue_index_bits,
    queue_memory_depth,
)

_QUEUE_OFFSETS = {register.name: register.offset for register in QUEUE}
_VECTOR_OFFSETS = {register.name: register.offset for register in VECTOR}
_ENTRY_REGISTERS = ("ADDRESS_LO", "ADDRESS_HI", "DATA")
"""Registers of a vector in the order of `plora.hw.rtl.front.axi.msix_layout`."""


class _Place(NamedTuple):
    """Where a register address leads."""

    in_queue: Signal
    in_vector: Signal
    index: Signal
    """Of the queue or vector."""
    offset: Signal
    """Byte offset in the block of the queue or vector."""


class RegisterFile(wiring.Component):
    """Answers AXI4-Lite reads and writes of `plora.hw.defs.registers`.

    A queue's configuration rests in a memory of one word a queue and can be written only while the
    queue is disabled. Writes that change a queue's course (CTRL bit 0, CQ_HEAD) go to the queue
    engine as commands and are answered when it has carried them out.

    Parameters:
        config: device configuration.

    Ports:
        s_io: the AXI4-Lite bus.
        queues: to and from the queue engine, see `QueueControl`.
        counters, clear_counters, core_idle: those of the core.
        share: register SHARE.
        tick: a period of WATCHDOG cycles is over; never where that is 0.
        tripped: a channel's watchdog has given errors.

    Cycle behaviour: one write and one read at a time, independent of each other. Address and data of
    a write come in any order; it is answered three cycles after the later of them, or when the engine
    has carried the command out. A read is answered after three cycles. For one cycle a queue after
    reset, configuration memory is cleared and the bus waits.
    """

    def __init__(self, config: NdpConfig) -> None:
        self._config = config
        super().__init__(
            {
                "s_io": In(Axi4LiteSignature()),
                "queues": Out(QueueControl(config)),
                "counters": In(counters_layout),
                "clear_counters": Out(1),
                "core_idle": In(1),
                "share": Out(share_layout, init={"core": RESET_SHARE, "host": 0}),
                "tick": Out(1),
                "tripped": In(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build the configuration memory, the two bus machines and the device's own counters."""
        m = Module()
        words = data.ArrayLayout(REGISTER_BITS, len(CONFIG_REGISTERS))
        m.submodules.configs = configs = memory.Memory(shape=words, depth=queue_memory_depth(self._config), init=[])
        entries = data.ArrayLayout(REGISTER_BITS, len(_ENTRY_REGISTERS))
        m.submodules.vectors = vectors = memory.Memory(shape=entries, depth=queue_memory_depth(self._config), init=[])
        engine_port, message_port = configs.read_port(), vectors.read_port()
        m.d.comb += [
            engine_port.addr.eq(self.queues.config_queue),
            Value.cast(self.queues.config).eq(Value.cast(engine_port.data)),
            message_port.addr.eq(self.queues.config_queue),
            Value.cast(self.queues.vector).eq(Value.cast(message_port.data)),
        ]
        self._masks(m)
        self._counters(m)
        self._watch_clock(m)
        self._write(m, configs.write_port(granularity=1), vectors.write_port(granularity=1))
        self._read(m, configs.read_port(), vectors.read_port())
        return m

    def _locate(self, m: Module, address: Value, prefix: str) -> _Place:
        """Say which queue or vector a byte address belongs to."""
        block_bits, entry_bits = (stride.bit_length() - 1 for stride in (QUEUE_STRIDE, VECTOR_STRIDE))
        first = QUEUE_BASE >> block_bits
        index_bits = queue_index_bits(self._config)
        place = _Place(
            Signal(name=f"{prefix}_in_queue"),
            Signal(name=f"{prefix}_in_vector"),
            Signal(index_bits, name=f"{prefix}_index"),
            Signal(block_bits, name=f"{prefix}_offset"),
        )
        block, entry = address[block_bits:], address[entry_bits:] - (VECTOR_BASE >> entry_bits)
        m.d.comb += [
            place.in_queue.eq((block >= first) & (block < first + self._config.queues)),
            place.in_vector.eq((address >= VECTOR_BASE) & (entry < self._config.queues)),
            place.index.eq(Mux(place.in_vector, entry, block - first)),
            # Registers are whole words: the two low address bits have no meaning.
            place.offset.eq(
                Mux(place.in_vector, Cat(Const(0, 2), address[2:entry_bits]), Cat(Const(0, 2), address[2:block_bits]))
            ),
        ]
        return place

    def _masks(self, m: Module) -> None:
        self._masked = Signal(self._config.queues, init=-1)
        self._message_control = Signal(2)
        enable, mask_all = self._message_control
        m.d.comb += self.queues.deliver.eq(Mux(enable & ~mask_all, ~self._masked, 0))

    def _watch_clock(self, m: Module) -> None:
        self._watchdog = Signal(REGISTER_BITS, init=RESET_WATCHDOG)
        elapsed = Signal(REGISTER_BITS)
        m.d.sync += [elapsed.eq(elapsed + 1), self.tick.eq(0)]
        with m.If(elapsed + 1 >= self._watchdog):
            m.d.sync += [elapsed.eq(0), self.tick.eq(self._watchdog != 0)]

    def _counters(self, m: Module) -> None:
        self._cycles = cycles = Signal(2 * REGISTER_BITS)
        self._descriptors = descriptors = Signal(REGISTER_BITS)
        self._errors = errors = Signal(REGISTER_BITS)
        self._trips = trips = Signal(REGISTER_BITS)
        m.d.sync += cycles.eq(Mux(self.clear_counters, 0, cycles + 1))
        # Events come late in a cycle from other units: they are counted in the next.
        for counter, event in (
            (descriptors, self.queues.descriptor_done),
            (errors, self.queues.descriptor_failed),
            (trips, self.tripped),
        ):
            happened = Signal(name=f"{counter.name}_event")
            m.d.sync += [happened.eq(event), counter.eq(Mux(self.clear_counters, 0, counter + happened))]

    def _write(self, m: Module, port: memory.WritePort, entry_port: memory.WritePort) -> None:
        bus, count = self.s_io, len(CONFIG_REGISTERS)
        address, value = Signal(MMIO_BITS), Signal(REGISTER_BITS)
        have_address, have_data, whole = Signal(), Signal(), Signal()
        place = self._locate(m, address, "write")
        queue, enabled = place.index, Signal()
        wipe = Signal(range(queue_memory_depth(self._config)))

        m.d.comb += [
            enabled.eq(self.queues.enabled.bit_select(queue, 1)),
            port.addr.eq(queue),
            port.data.eq(Cat(*(value for _ in range(count)))),
            entry_port.addr.eq(queue),
            entry_port.data.eq(Cat(*(value for _ in _ENTRY_REGISTERS))),
            self.queues.command.payload.queue.eq(queue),
            self.queues.command.payload.value.eq(value),
            self.queues.doorbell_queue.eq(queue),
        ]
        with m.FSM(name="write"):
            with m.State("WIPE"):
                m.d.comb += [port.addr.eq(wipe), port.data.eq(0), port.en.eq((1 << count) - 1)]
                m.d.comb += [entry_port.addr.eq(wipe), entry_port.data.eq(0), entry_port.en.eq(~0)]
                m.d.sync += wipe.eq(wipe + 1)
                with m.If(wipe == queue_memory_depth(self._config) - 1):
                    m.next = "WAIT"
            with m.State("WAIT"):
                m.d.comb += [bus.awready.eq(~have_address), bus.wready.eq(~have_data)]
                with m.If(bus.awvalid & bus.awready):
                    m.d.sync += [address.eq(bus.awaddr), have_address.eq(1)]
                with m.If(bus.wvalid & bus.wready):
                    m.d.sync += [value.eq(bus.wdata), whole.eq(bus.wstrb.all()), have_data.eq(1)]
                with m.If(have_address & have_data):
                    m.next = "ACT"
            with m.State("ACT"):
                m.next = "ANSWER"
                with m.If(~whole):
                    pass
                with m.Elif(place.in_queue):
                    self._write_queue(m, port, queue, place.offset, value, enabled)
                with m.Elif(place.in_vector):
                    for number, name in enumerate(_ENTRY_REGISTERS):
                        m.d.comb += entry_port.en[number].eq(place.offset == _VECTOR_OFFSETS[name])
                    with m.If(place.offset == _VECTOR_OFFSETS["MASK"]):
                        m.d.sync += self._masked.bit_select(queue, 1).eq(value[0])
                with m.Else():
                    self._write_global(m, address, value)
            with m.State("COMMAND"):
                m.d.comb += self.queues.command.valid.eq(1)
                with m.If(self.queues.command.ready):
                    m.next = "CARRIED_OUT"
                    with m.If(self.queues.command_done):
                        m.next = "ANSWER"
            with m.State("CARRIED_OUT"):
                with m.If(self.queues.command_done):
                    m.next = "ANSWER"
            with m.State("ANSWER"):
                m.d.comb += [bus.bvalid.eq(1), bus.bresp.eq(Mux(whole, Resp.OKAY, Resp.SLVERR))]
                with m.If(bus.bready):
                    m.d.sync += [have_address.eq(0), have_data.eq(0)]
                    m.next = "WAIT"

    def _write_queue(
        self, m: Module, port: memory.WritePort, queue: Value, offset: Value, value: Value, enabled: Value
    ) -> None:
        with m.Switch(offset):
            with m.Case(_QUEUE_OFFSETS["CTRL"]):
                m.d.sync += self.queues.interrupt_enable.bit_select(queue, 1).eq(value[1])
                m.d.sync += self.queues.command.payload.kind.eq(Mux(value[0], Command.ENABLE, Command.DISABLE))
                with m.If(value[0] != enabled):
                    m.next = "COMMAND"
            with m.Case(_QUEUE_OFFSETS["CQ_HEAD"]):
                m.d.sync += self.queues.command.payload.kind.eq(Command.HEAD)
                m.next = "COMMAND"
            with m.Case(_QUEUE_OFFSETS["DOORBELL"]):
                m.d.comb += self.queues.doorbell.eq(1)
            for place, register in enumerate(CONFIG_REGISTERS):
                with m.Case(register.offset):
                    with m.If(~enabled):
                        m.d.comb += port.en.eq(1 << place)

    def _write_global(self, m: Module, address: Value, value: Value) -> None:
        with m.Switch(Cat(Const(0, 2), address[2:])):
            with m.Case(global_offset("CONTROL")):
                m.d.comb += self.clear_counters.eq(value[0])
            with m.Case(global_offset("CHAIN_TIMEOUT")):
                m.d.sync += self.queues.chain_timeout.eq(value)
            with m.Case(global_offset("POLL_INTERVAL")):
                m.d.sync += self.queues.poll_interval.eq(value)
            with m.Case(global_offset("CHAIN_LIMIT")):
                m.d.sync += self.queues.chain_limit.eq(value)
            with m.Case(global_offset("WATCHDOG")):
                m.d.sync += self._watchdog.eq(value)
            with m.Case(global_offset("SHARE")):
                m.d.sync += self.share.eq(value)
            with m.Case(global_offset("MSIX")):
                m.d.sync += self._message_control.eq(value)

    def _read(self, m: Module, port: memory.ReadPort, entry_port: memory.ReadPort) -> None:
        bus = self.s_io
        address = Signal(MMIO_BITS)
        # Where the address leads is found as it comes, and stands in registers from then on.
        found = self._locate(m, bus.araddr, "read")
        place = _Place(*(Signal.like(value, name=f"{value.name}_held") for value in found))
        queue, offset = place.index, place.offset
        cycles_high = Signal(REGISTER_BITS)
        m.d.comb += [
            port.addr.eq(queue),
            entry_port.addr.eq(queue),
            self.queues.status_queue.eq(queue),
            bus.rresp.eq(Resp.OKAY),
        ]
        with m.FSM(name="read"):
            with m.State("WAIT"):
                m.d.comb += bus.arready.eq(1)
                with m.If(bus.arvalid):
                    m.d.sync += [
                        address.eq(bus.araddr),
                        *(held.eq(value) for held, value in zip(place, found, strict=True)),
                    ]
                    m.next = "LOOK_UP"
            with m.State("LOOK_UP"):
                m.next = "GATHER"
            with m.State("GATHER"):
                m.d.sync += bus.rdata.eq(0)
                with m.If(place.in_queue):
                    with m.Switch(offset):
                        for offset_, shown in self._queue_values(queue, port.data):
                            with m.Case(offset_):
                                m.d.sync += bus.rdata.eq(shown)
                with m.Elif(place.in_vector):
                    with m.Switch(offset):
                        for number, name in enumerate(_ENTRY_REGISTERS):
                            with m.Case(_VECTOR_OFFSETS[name]):
                                m.d.sync += bus.rdata.eq(entry_port.data[number])
                        with m.Case(_VECTOR_OFFSETS["MASK"]):
                            m.d.sync += bus.rdata.eq(self._masked.bit_select(queue, 1))
                with m.Else():
                    with m.Switch(Cat(Const(0, 2), address[2:])):
                        for offset_, shown in self._global_values(cycles_high):
                            with m.Case(offset_):
                                m.d.sync += bus.rdata.eq(shown)
                        with m.Case(global_offset("CYCLES_LO")):
                            m.d.sync += [
                                bus.rdata.eq(self._cycles[:REGISTER_BITS]),
                                cycles_high.eq(self._cycles[REGISTER_BITS:]),
                            ]
                m.next = "ANSWER"
            with m.State("ANSWER"):
                m.d.comb += bus.rvalid.eq(1)
                with m.If(bus.rready):
                    m.next = "WAIT"

    def _queue_values(self, queue: Value, configuration: Value) -> list[tuple[int, Value]]:
        enabled = self.queues.enabled.bit_select(queue, 1)
        live: dict[str, Value] = {
            "CTRL": Cat(enabled, self.queues.interrupt_enable.bit_select(queue, 1)),
            "QSTATUS": Cat(enabled, self.queues.status.busy),
            "CQ_HEAD": self.queues.status.head,
            "SQ_HEAD": self.queues.status.fetched,
            "CQ_TAIL": self.queues.status.tail,
            "QERRORS": self.queues.status.errors,
        }
        return [(_QUEUE_OFFSETS[name], shown) for name, shown in live.items()] + [
            (register.offset, configuration[place]) for place, register in enumerate(CONFIG_REGISTERS)
        ]

    def _global_values(self, cycles_high: Value) -> list[tuple[int, Value | int]]:
        config = self._config
        log2_buffers = [
            size.bit_length() - 1
            for size in (config.input_buffer_bytes, config.dram_buffer_bytes, config.output_buffer_bytes)
        ]
        caps = (config.channels, PE_ROWS, config.queues, config.dpa_bits)
        values: dict[str, Value | int] = {
            "ID": ID_VALUE,
            "INTERFACE": INTERFACE_VERSION,
            "CAPS": int.from_bytes(bytes(caps), "little"),
            "BUFFERS": int.from_bytes(bytes(log2_buffers), "little"),
            "STATUS": self.queues.busy | ~self.core_idle,
            "CHAIN_TIMEOUT": self.queues.chain_timeout,
            "POLL_INTERVAL": self.queues.poll_interval,
            "CHAIN_LIMIT": self.queues.chain_limit,
            "WATCHDOG": self._watchdog,
            "SHARE": self.share.as_value(),
            "MSIX": self._message_control,
            "CYCLES_HI": cycles_high,
            "DESCRIPTORS": self._descriptors,
            "ERRORS": self._errors,
            "WATCHDOG_TRIPS": self._trips,
        }
        values |= {name: self.counters[name.lower()] for name in COUNTERS}
        assert {*values, "CONTROL", "CYCLES_LO"} == {register.name for register in GLOBAL}
        pending = [
            (PENDING_BASE + first // 8, self.queues.pending[first : first + REGISTER_BITS])
            for first in range(0, config.queues, REGISTER_BITS)
        ]
        return [(global_offset(name), value) for name, value in values.items()] + pending
