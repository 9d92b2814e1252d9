"""Models around the front end for Amaranth's simulator: memories, a host, a core that does what a test says."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from amaranth.hdl import Cat, Module, Signal, Value
from amaranth.lib import wiring
from amaranth.sim import Simulator

from plora.hw.defs.config import WORD_BYTES, NdpConfig
from plora.hw.defs.descriptor import FIELDS, Descriptor
from plora.hw.defs.ports import ADDRESS_BITS, DATA_BITS, MEMORY_ID_BITS, Burst, Resp, memory_bus
from plora.hw.defs.queue import Completion, submission_line
from plora.hw.defs.registers import global_offset, queue_offset, vector_offset
from plora.hw.rtl.core.signature import NdpCoreSignature
from plora.hw.rtl.device import NdpDevice

LINE = WORD_BYTES
Testbench = Callable[[Any], Awaitable[None]]


class Bench:
    """A simulator that is made once and run many times: making it takes longer than most runs.

    Each `run` starts from reset, with other testbenches.
    """

    SLOTS = 12

    def __init__(self, dut: Any) -> None:
        self.dut = dut
        self._simulator = Simulator(dut)
        self._simulator.add_clock(1e-9)
        self._background: list[Testbench] = []
        self._foreground: list[Testbench] = []
        self._fresh = True
        for slot in range(self.SLOTS):
            self._add(slot)
        self._simulator.add_testbench(self._watch)

    def _add(self, slot: int) -> None:
        async def background(ctx: Any) -> None:
            if slot < len(self._background):
                await self._background[slot](ctx)

        async def foreground(ctx: Any) -> None:
            if slot < len(self._foreground):
                await self._foreground[slot](ctx)
                self._running -= 1

        self._simulator.add_testbench(background, background=True)
        self._simulator.add_testbench(foreground)

    async def _watch(self, ctx: Any) -> None:
        tick = ctx.tick()
        while True:
            await tick
            self.cycles += 1
            assert self.cycles < self._limit, f"nothing came of it in {self._limit} cycles"
            if not self._running:
                return

    def run(self, *testbenches: Testbench, background: Iterable[Testbench] = (), max_cycles: int = 50_000) -> int:
        """Run until all ``testbenches`` have ended and return the cycles; fail after ``max_cycles``."""
        if not self._fresh:
            self._simulator.reset()
        self._fresh = False
        self._foreground, self._background = list(testbenches), list(background)
        assert max(len(self._foreground), len(self._background)) <= self.SLOTS
        self._running, self._limit, self.cycles = len(self._foreground), max_cycles, 0
        self._simulator.run()
        return self.cycles


class Driver:
    """Sets signals, only where they change."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx
        # With the signal itself, lest another takes its identity.
        self._known: dict[int, tuple[Any, int]] = {}

    def __call__(self, signal: Any, value: int) -> None:
        value = int(value)
        if self._known.get(id(signal), (None, 0))[1] != value:
            self._known[id(signal)] = signal, value
            self._ctx.set(signal, value)


class StableChannel:
    """Checks one AXI channel that the device drives: once valid, it and its payload stay until taken."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pending: int | None = None

    def see(self, valid: int, ready: int, payload: int) -> None:
        if self._pending is not None:
            assert valid, f"{self._name}: valid withdrawn"
            assert payload == self._pending, f"{self._name}: payload changed while waiting"
        self._pending = payload if valid and not ready else None


class AxiTaps:
    """What `AxiMemory` samples, as few wide signals: sampling single members is what costs most time."""

    def __init__(self, m: Module, bus: Any) -> None:
        self.signals = [
            tap(m, Cat(bus.arvalid, bus.awvalid, bus.wvalid, bus.rready, bus.bready)),
            tap(m, Cat(bus.araddr, bus.arid, bus.arlen, bus.arsize, bus.arburst)),
            tap(m, Cat(bus.awaddr, bus.awid, bus.awlen, bus.awsize, bus.awburst)),
            tap(m, Cat(bus.wdata, bus.wstrb, bus.wlast)),
        ]


def tap(m: Module, value: Any) -> Signal:
    """A signal of ``m`` that follows ``value``."""
    signal = Signal(len(Value.cast(value)), name="tap")
    m.d.comb += signal.eq(value)
    return signal


@dataclass
class _Read:
    address: int
    beats: int
    due: int


@dataclass
class AxiMemory:
    """A memory behind one AXI4 port: reads and writes of different ids in any order, each id in its own.

    ``stall`` is the chance of a ready or a valid being held back in a cycle, on every AXI channel by
    itself; ``latency`` the range of cycles until an access takes place. ``data_first`` never takes an
    address before its data is there, ``address_first`` the opposite. ``allowed`` says which byte
    addresses may be touched. ``read_errors`` and ``write_errors`` hold line addresses that fail.
    """

    bus: Any
    taps: AxiTaps
    size_bytes: int
    seed: int = 0
    stall: float = 0.0
    latency: tuple[int, int] = (2, 2)
    data_first: bool = False
    address_first: bool = False
    data: bytearray = field(default_factory=bytearray)
    allowed: Callable[[int, int, bool], bool] = lambda address, size, write: True
    read_errors: set[int] = field(default_factory=set)
    write_errors: set[int] = field(default_factory=set)
    reads: list[tuple[int, int]] = field(default_factory=list)
    """(cycle, byte address) of every word read, in the order in which it happened."""
    writes: list[tuple[int, int]] = field(default_factory=list)
    hold_acks: bool = False
    silent: bool = False
    """Nothing is answered; what was taken meanwhile is answered when this ends, unless it is forgotten."""
    forget: bool = False
    """Whatever is owed is dropped and never answered."""
    cycle: int = 0

    def __post_init__(self) -> None:
        if not self.data:
            self.data = bytearray(self.size_bytes)

    async def run(self, ctx: Any) -> None:
        bus, rng = self.bus, random.Random(self.seed)
        drive = Driver(ctx)
        reads: dict[int, deque[_Read]] = {}
        addresses: deque[tuple[int, int]] = deque()
        words: deque[tuple[int, int]] = deque()
        pending: dict[int, deque[tuple[int, int, int, int]]] = {}
        read_out, ack_out = False, False
        read_now: tuple[int, _Read] | None = None
        ar_ready = aw_ready = w_ready = False
        stable = [StableChannel(name) for name in ("AR", "AW", "W")]
        sample = ctx.tick().sample(*self.taps.signals)
        while True:
            _, _, control, ar, aw, w = await sample
            arvalid, awvalid, wvalid, rready, bready = (control >> bit & 1 for bit in range(5))
            self.cycle += 1
            stable[0].see(arvalid, ar_ready, ar)
            stable[1].see(awvalid, aw_ready, aw)
            stable[2].see(wvalid, w_ready, w)

            if arvalid and ar_ready:
                address, name, beats = self._address(ar)
                assert address // 4096 == (address + beats * LINE - 1) // 4096, f"{address:#x} crosses 4 KiB"
                self._check(address, beats * LINE, False)
                reads.setdefault(name, deque()).append(_Read(address, beats, self._due(rng)))
            if awvalid and aw_ready:
                address, name, beats = self._address(aw)
                assert beats == 1
                self._check(address, LINE, True)
                addresses.append((name, address))
            if wvalid and w_ready:
                assert w >> DATA_BITS + LINE == 1, "a line is the last of its burst"
                words.append((w & (1 << DATA_BITS) - 1, w >> DATA_BITS & (1 << LINE) - 1))
            while addresses and words:
                (name, address), (word, strobe) = addresses.popleft(), words.popleft()
                pending.setdefault(name, deque()).append((address, word, strobe, self._due(rng)))

            if self.forget:
                reads.clear()
                pending.clear()
                read_now = None
                self.forget = False
            if ack_out and bready:
                ack_out = False
            if not ack_out and not self.silent and not self.hold_acks and pending and self._goes(rng):
                due = [name for name, queue in pending.items() if queue and queue[0][3] <= self.cycle]
                if due:
                    name = rng.choice(due)
                    address, word, strobe, _ = pending[name].popleft()
                    self._store(address, word, strobe)
                    ack_out = True
                    drive(bus.bid, name)
                    drive(bus.bresp, Resp.SLVERR if address in self.write_errors else Resp.OKAY)
            drive(bus.bvalid, ack_out)

            if read_out and rready:
                read_out = False
            if not read_out and not self.silent and (read_now or reads) and self._goes(rng):
                if read_now is None:
                    due = [name for name, queue in reads.items() if queue and queue[0].due <= self.cycle]
                    if due:
                        name = rng.choice(due)
                        read_now = name, reads[name].popleft()
                if read_now is not None:
                    name, read = read_now
                    self.reads.append((self.cycle, read.address))
                    read_out = True
                    drive(bus.rid, name)
                    drive(bus.rdata, int.from_bytes(self.data[read.address : read.address + LINE], "little"))
                    drive(bus.rresp, Resp.SLVERR if read.address in self.read_errors else Resp.OKAY)
                    drive(bus.rlast, read.beats == 1)
                    read.address += LINE
                    read.beats -= 1
                    if not read.beats:
                        read_now = None
            drive(bus.rvalid, read_out)

            ar_ready = self._goes(rng)
            aw_ready = self._goes(rng) and (not self.data_first or len(words) > len(addresses))
            w_ready = self._goes(rng) and (not self.address_first or len(addresses) > len(words))
            drive(bus.arready, ar_ready)
            drive(bus.awready, aw_ready)
            drive(bus.wready, w_ready)

    def _goes(self, rng: random.Random) -> bool:
        return not self.stall or rng.random() >= self.stall

    @staticmethod
    def _address(channel: int) -> tuple[int, int, int]:
        """Byte address, id and beats of a sampled AR or AW."""
        address = channel & (1 << ADDRESS_BITS) - 1
        rest, ids = channel >> ADDRESS_BITS, (1 << MEMORY_ID_BITS) - 1
        name, length, size, burst = (
            rest & ids,
            rest >> MEMORY_ID_BITS & 255,
            rest >> MEMORY_ID_BITS + 8 & 7,
            rest >> MEMORY_ID_BITS + 11,
        )
        assert size == 6 and burst == Burst.INCR and address % LINE == 0
        return address, name, length + 1

    def _due(self, rng: random.Random) -> int:
        return self.cycle + rng.randint(*self.latency)

    def _check(self, address: int, size: int, write: bool) -> None:
        kind = "write" if write else "read"
        assert address + size <= self.size_bytes, f"{kind} at {address:#x} beyond the channel's {self.size_bytes} bytes"
        assert self.allowed(address, size, write), f"{kind} of {size} bytes at {address:#x} outside what is allowed"

    def _store(self, address: int, word: int, strobe: int) -> None:
        self.writes.append((self.cycle, address))
        new = word.to_bytes(LINE, "little")
        for lane in range(LINE):
            if strobe >> lane & 1:
                self.data[address + lane] = new[lane]


@dataclass
class Hdm:
    """The memories of all channels as one DPA space, by the back door."""

    config: NdpConfig
    channels: list[AxiMemory]

    @classmethod
    def of(cls, buses: list[Any], taps: list[AxiTaps], config: NdpConfig, **options: Any) -> Hdm:
        size = (1 << config.dpa_bits) // config.channels
        seed = options.pop("seed", 0)
        return cls(
            config,
            [
                AxiMemory(bus, tap_, size, seed=1000 * seed + c, **options)
                for c, (bus, tap_) in enumerate(zip(buses, taps, strict=True))
            ],
        )

    def _lines(self, address: int, size: int) -> Iterator[tuple[AxiMemory, int, int, int]]:
        position = 0
        while position < size:
            word, within = divmod(address + position, LINE)
            count = min(LINE - within, size - position)
            local = word // self.config.channels * LINE + within
            yield self.channels[word % self.config.channels], local, position, count
            position += count

    def write(self, address: int, data: bytes) -> None:
        for memory, local, position, count in self._lines(address, len(data)):
            memory.data[local : local + count] = data[position : position + count]

    def read(self, address: int, size: int) -> bytes:
        return b"".join(bytes(m.data[local : local + n]) for m, local, _, n in self._lines(address, size))

    def fill(self, byte: int) -> None:
        for memory in self.channels:
            memory.data[:] = bytes([byte]) * len(memory.data)

    def channel_line(self, address: int) -> tuple[AxiMemory, int]:
        word = address // LINE
        return self.channels[word % self.config.channels], word // self.config.channels * LINE

    def restrict(self, allowed: Callable[[int, bool], bool]) -> None:
        """Let every access to a line for which ``allowed(dpa, write)`` is false fail the test."""

        def rule(channel: int) -> Callable[[int, int, bool], bool]:
            def check(address: int, size: int, write: bool) -> bool:
                words = range(address // LINE, (address + size) // LINE)
                return all(allowed((w * self.config.channels + channel) * LINE, write) for w in words)

            return check

        for channel, memory in enumerate(self.channels):
            memory.allowed = rule(channel)

    @property
    def background(self) -> list[Testbench]:
        return [memory.run for memory in self.channels]


class Mmio:
    """The host's side of ``s_io``. Several testbenches may share it: one write and one read at a time."""

    def __init__(self, bus: Any) -> None:
        self._bus = bus
        self._writing = self._reading = False

    async def write_answer(self, ctx: Any, offset: int, value: int, strobe: int = 0xF, skew: int = 0) -> int:
        """Write and return the response. ``skew`` > 0: data that many cycles late, < 0: address late."""
        bus = self._bus
        while self._writing:
            await ctx.tick()
        self._writing = True
        ctx.set(bus.awaddr, offset)
        ctx.set(bus.wdata, value)
        ctx.set(bus.wstrb, strobe)
        ctx.set(bus.awvalid, skew >= 0)
        ctx.set(bus.wvalid, skew <= 0)
        ctx.set(bus.bready, 1)
        cycle, address_left, data_left = 0, True, True
        while True:
            sampled = await ctx.tick().sample(bus.awvalid, bus.awready, bus.wvalid, bus.wready, bus.bvalid, bus.bresp)
            awvalid, awready, wvalid, wready, bvalid, bresp = sampled[2:]
            cycle += 1
            if awvalid and awready:
                address_left = False
            if wvalid and wready:
                data_left = False
            ctx.set(bus.awvalid, address_left and cycle >= -skew)
            ctx.set(bus.wvalid, data_left and cycle >= skew)
            if bvalid:
                assert not address_left and not data_left, "answered before address and data were taken"
                ctx.set(bus.bready, 0)
                self._writing = False
                return int(bresp)

    async def write(self, ctx: Any, offset: int, value: int) -> None:
        assert await self.write_answer(ctx, offset, value) == Resp.OKAY

    async def read(self, ctx: Any, offset: int) -> int:
        bus = self._bus
        while self._reading:
            await ctx.tick()
        self._reading = True
        ctx.set(bus.araddr, offset)
        ctx.set(bus.arvalid, 1)
        await ctx.tick().until(bus.arready)
        ctx.set(bus.arvalid, 0)
        ctx.set(bus.rready, 1)
        data, resp = await ctx.tick().sample(bus.rdata, bus.rresp).until(bus.rvalid)
        ctx.set(bus.rready, 0)
        self._reading = False
        assert resp == Resp.OKAY
        return int(data)

    async def global_(self, ctx: Any, name: str) -> int:
        return await self.read(ctx, global_offset(name))

    async def queue(self, ctx: Any, queue: int, name: str) -> int:
        return await self.read(ctx, queue_offset(queue, name))


@dataclass
class Ring:
    """One queue as a host sees it."""

    mmio: Mmio
    hdm: Hdm
    queue: int
    base: int
    limit: int
    submission_base: int
    result_base: int
    depth: int = 4
    submission_log2: int = 11
    result_log2: int = 11
    first_pass: int = 7
    weight: int = 0
    coalesce: int = 0
    coalesce_cycles: int = 0
    posted: int = 0
    taken: int = 0

    def registers(self) -> dict[str, int]:
        values = {"PASID": 0x1234 + self.queue, "DEPTH": self.depth, "PASS": self.first_pass}
        for name, value in {
            "BASE": self.base,
            "LIMIT": self.limit,
            "SQ_BASE": self.submission_base,
            "CQ_BASE": self.result_base,
        }.items():
            values |= {f"{name}_LO": value & 0xFFFFFFFF, f"{name}_HI": value >> 32}
        return values | {
            "SLOTS": self.submission_log2 | self.result_log2 << 8,
            "VECTOR": self.queue,
            "WEIGHT": self.weight,
            "COALESCE": self.coalesce,
            "COALESCE_CYCLES": self.coalesce_cycles,
        }

    async def set_up_vector(self, ctx: Any, masked: int = 0) -> None:
        entry = {"ADDRESS_LO": self.queue, "ADDRESS_HI": 0xFEE0, "DATA": 0x40 + self.queue, "MASK": masked}
        for name, value in entry.items():
            await self.mmio.write(ctx, vector_offset(self.queue, name), value)
        await self.mmio.write(ctx, global_offset("MSIX"), 1)

    async def set_up(self, ctx: Any, *, interrupt: bool = False, enable: bool = True) -> None:
        for name, value in self.registers().items():
            await self.mmio.write(ctx, queue_offset(self.queue, name), value)
        if interrupt:
            await self.set_up_vector(ctx)
        if enable:
            await self.control(ctx, enable=True, interrupt=interrupt)
            assert await self.get(ctx, "QSTATUS") & 1, "the device refused to enable the queue"
        self.posted = self.taken = 0

    async def control(self, ctx: Any, *, enable: bool, interrupt: bool = False) -> None:
        await self.mmio.write(ctx, queue_offset(self.queue, "CTRL"), int(enable) | int(interrupt) << 1)

    async def get(self, ctx: Any, name: str) -> int:
        return await self.mmio.queue(ctx, self.queue, name)

    async def put(self, ctx: Any, name: str, value: int) -> None:
        await self.mmio.write(ctx, queue_offset(self.queue, name), value)

    def pass_of(self, number: int) -> int:
        return self.first_pass + number // self.depth

    def submission_slot(self, number: int) -> int:
        return self.submission_base + (number % self.depth << self.submission_log2)

    def result_slot(self, number: int) -> int:
        return self.result_base + (number % self.depth << self.result_log2)

    def post(self, descriptor: Descriptor) -> int:
        """Put line 0 into the next slot (one store of a whole line) and return its number."""
        number = self.posted
        self.hdm.write(self.submission_slot(number), submission_line(descriptor, self.pass_of(number)))
        self.posted += 1
        return number

    def completion(self, number: int) -> Completion | None:
        """The completion of descriptor ``number`` if its valid word is there."""
        completion = Completion.unpack(self.hdm.read(self.result_slot(number), LINE))
        valid = submission_line(completion.descriptor, self.pass_of(number))[60:]
        return completion if completion.valid == int.from_bytes(valid, "little") else None

    async def wait(self, ctx: Any, number: int, cycles: int = 3000) -> Completion:
        for _ in range(cycles):
            completion = self.completion(number)
            if completion is not None:
                return completion
            await ctx.tick()
        raise AssertionError(f"queue {self.queue}: no completion of descriptor {number} in {cycles} cycles")

    async def ring(self, ctx: Any) -> None:
        await self.put(ctx, "DOORBELL", 1)

    async def take(self, ctx: Any, count: int = 1) -> None:
        self.taken += count
        await self.put(ctx, "CQ_HEAD", self.taken & 0xFFFF)


@dataclass
class Fetched:
    """A descriptor as the core got it."""

    descriptor: Descriptor
    queue: int
    first: int
    verdict: int
    operand_address: int
    result_address: int
    base: int
    limit: int
    submission_slot_log2: int
    result_slot_log2: int
    cycle: int


@dataclass
class Outcome:
    """What the core reports."""

    status: int = 0
    numeric: int = 0
    result_bytes: int = 0
    cycles: int = 0


class ScriptedCore(wiring.Component):
    """Ports of the core without a core: a testbench drives them."""

    def __init__(self, config: NdpConfig) -> None:
        super().__init__(NdpCoreSignature(config))

    def elaborate(self, platform: object) -> Module:
        return Module()


class CoreTaps:
    """What `CoreModel` samples."""

    def __init__(self, m: Module, core: Any) -> None:
        self.control = tap(m, Cat(core.fetched.valid, core.completed.ready))
        self.payload = tap(m, Value.cast(core.fetched.payload))


@dataclass
class CoreModel:
    """Drives a `ScriptedCore`: every descriptor takes ``delay`` cycles and ends as ``judge`` says."""

    core: Any
    taps: CoreTaps
    judge: Callable[[Fetched], Outcome] = lambda fetched: Outcome(status=fetched.verdict)
    delay: int = 5
    capacity: int = 4
    """Descriptors held at most."""
    seen: list[Fetched] = field(default_factory=list)
    reported: list[int] = field(default_factory=list)
    """Cycles in which the front end took each report."""
    cycle: int = 0
    paused: bool = False

    async def run(self, ctx: Any) -> None:
        fetched, completed = self.core.fetched, self.core.completed
        layout = fetched.payload.shape()
        drive = Driver(ctx)
        held: deque[tuple[int, Fetched]] = deque()
        drive(self.core.idle, 1)
        drive(fetched.ready, 1)
        ready, report = True, False
        sample = ctx.tick().sample(self.taps.control, self.taps.payload)
        while True:
            _, _, control, payload = await sample
            valid, taken = control & 1, control >> 1
            self.cycle += 1
            if report and taken:
                held.popleft()
                self.reported.append(self.cycle)
                report = False
            if valid and ready:
                item = self._decode(layout.from_bits(payload))
                self.seen.append(item)
                held.append((self.cycle + self.delay, item))
            if held and not report and not self.paused and held[0][0] <= self.cycle:
                report = True
                item, outcome = held[0][1], self.judge(held[0][1])
                ctx.set(
                    completed.payload,
                    {
                        "descriptor": {f.name: getattr(item.descriptor, f.name) for f in FIELDS},
                        "queue": item.queue,
                        "status": outcome.status,
                        "numeric": outcome.numeric,
                        "result_bytes": outcome.result_bytes,
                        "cycles": outcome.cycles,
                    },
                )
            ready = len(held) < self.capacity
            drive(completed.valid, report)
            drive(fetched.ready, ready)

    def _decode(self, payload: Any) -> Fetched:
        names = [name for name in Fetched.__dataclass_fields__ if name not in ("descriptor", "cycle")]
        return Fetched(
            descriptor=Descriptor(**{f.name: payload.descriptor[f.name] for f in FIELDS}),
            **{name: payload[name] for name in names},
            cycle=self.cycle,
        )


class DeviceBench(Bench):
    """The device of ``config`` with a scripted core; `start` gives each run its own memories and host."""

    def __init__(self, config: NdpConfig) -> None:
        self.config = config
        self.core_ports = ScriptedCore(config)
        self.device = NdpDevice(config, self.core_ports)
        m = Module()
        m.submodules.device = self.device
        self.buses = [getattr(self.device, memory_bus(c)) for c in range(config.channels)]
        self.taps = [AxiTaps(m, bus) for bus in self.buses]
        self.core_taps = CoreTaps(m, self.core_ports)
        super().__init__(m)
        self.start()

    def start(self, **memory: Any) -> None:
        """Forget the last run: new memories (options of `AxiMemory`), core model and bus."""
        self.hdm = Hdm.of(self.buses, self.taps, self.config, **memory)
        self.mmio = Mmio(self.device.s_io)
        self.core = CoreModel(self.core_ports, self.core_taps)
        self.interrupts = InterruptSink(self.device.msix)

    def queue(self, queue: int = 0, **options: Any) -> Ring:
        """A queue of its own 64 KiB window, submission ring first, completion ring after 32 KiB."""
        base = 0x10000 * (queue + 1)
        places = {"base": base, "limit": base + 0x10000, "submission_base": base, "result_base": base + 0x8000}
        return Ring(self.mmio, self.hdm, queue, **{**places, **options})

    def only_lines_of(self, *rings: Ring) -> None:
        """Fail on any access of the device but reads of line 0 of submission slots and writes of completion lines."""
        reads = {ring.submission_slot(i) for ring in rings for i in range(ring.depth)}
        writes = {ring.result_slot(i) for ring in rings for i in range(ring.depth)}
        self.hdm.restrict(lambda address, write: address in (writes if write else reads))

    def go(self, *testbenches: Testbench, **options: Any) -> int:
        """Run ``testbenches`` beside memories, core and interrupt sink."""
        background = [*self.hdm.background, self.core.run, self.interrupts.run]
        return self.run(*testbenches, background=background, **options)


@dataclass
class InterruptSink:
    """Takes interrupts, or none while ``held``."""

    stream: Any
    held: bool = False
    seen: list[tuple[int, int]] = field(default_factory=list)
    """(address, data)"""

    async def run(self, ctx: Any) -> None:
        drive = Driver(ctx)
        ready = False
        sample = ctx.tick().sample(self.stream.valid, self.stream.payload.as_value())
        while True:
            _, _, valid, payload = await sample
            if valid and ready:
                self.seen.append((payload & (1 << 64) - 1, payload >> 64))
            ready = not self.held
            drive(self.stream.ready, ready)
