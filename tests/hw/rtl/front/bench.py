"""Models around the front end for Amaranth's simulator: memories, a host, a core that does what a test says."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from amaranth.hdl import Module
from amaranth.lib import wiring
from amaranth.sim import Simulator

from plora.hw.defs.config import WORD_BYTES, NdpConfig
from plora.hw.defs.descriptor import FIELDS, Descriptor
from plora.hw.defs.ports import Burst, Resp
from plora.hw.defs.queue import Completion, submission_line
from plora.hw.defs.registers import global_offset, queue_offset
from plora.hw.rtl.core.signature import NdpCoreSignature

LINE = WORD_BYTES
Testbench = Callable[[Any], Awaitable[None]]


def simulate(dut: Any, *testbenches: Testbench, background: Iterable[Testbench] = (), max_cycles: int = 50_000) -> int:
    """Run until every one of ``testbenches`` has ended; fail where that takes more than ``max_cycles``."""
    simulator = Simulator(dut)
    simulator.add_clock(1e-9)
    running = len(testbenches)
    cycles = 0

    def counted(bench: Testbench) -> Testbench:
        async def wrapped(ctx: Any) -> None:
            nonlocal running
            await bench(ctx)
            running -= 1

        return wrapped

    async def watchdog(ctx: Any) -> None:
        nonlocal cycles
        while running:
            await ctx.tick()
            cycles += 1
            assert cycles < max_cycles, f"nothing came of it in {max_cycles} cycles"

    for bench in testbenches:
        simulator.add_testbench(counted(bench))
    for bench in background:
        simulator.add_testbench(bench, background=True)
    simulator.add_testbench(watchdog)
    simulator.run()
    return cycles


class StableChannel:
    """Checks one AXI channel that the device drives: once valid, it and its payload stay until taken."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pending: tuple[Any, ...] | None = None

    def see(self, valid: int, ready: int, payload: tuple[Any, ...]) -> None:
        if self._pending is not None:
            assert valid, f"{self._name}: valid withdrawn"
            assert payload == self._pending, f"{self._name}: payload changed while waiting"
        self._pending = payload if valid and not ready else None


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
    cycle: int = 0

    def __post_init__(self) -> None:
        if not self.data:
            self.data = bytearray(self.size_bytes)

    async def run(self, ctx: Any) -> None:  # noqa: C901
        bus, rng = self.bus, random.Random(self.seed)
        reads: dict[int, deque[_Read]] = {}
        addresses: deque[tuple[int, int]] = deque()
        words: deque[tuple[int, int]] = deque()
        pending: dict[int, deque[tuple[int, int, int, int]]] = {}
        read_out: tuple[int, int] | None = None
        read_now: tuple[int, _Read] | None = None
        ack_out = False
        ready = {"ar": 0, "aw": 0, "w": 0}
        stable = {name: StableChannel(name) for name in ready}
        while True:
            sampled = await ctx.tick().sample(
                bus.arvalid, bus.arid, bus.araddr, bus.arlen, bus.arsize, bus.arburst,
                bus.awvalid, bus.awid, bus.awaddr, bus.awlen, bus.awsize, bus.awburst,
                bus.wvalid, bus.wdata, bus.wstrb, bus.wlast,
                bus.rready, bus.bready,
            )  # fmt: skip
            (arvalid, arid, araddr, arlen, arsize, arburst) = sampled[2:8]
            (awvalid, awid, awaddr, awlen, awsize, awburst) = sampled[8:14]
            (wvalid, wdata, wstrb, wlast, rready, bready) = sampled[14:20]
            self.cycle += 1
            stable["ar"].see(arvalid, ready["ar"], (arid, araddr, arlen, arsize, arburst))
            stable["aw"].see(awvalid, ready["aw"], (awid, awaddr, awlen, awsize, awburst))
            stable["w"].see(wvalid, ready["w"], (wdata, wstrb, wlast))

            if arvalid and ready["ar"]:
                size = (arlen + 1) * LINE
                assert arsize == 6 and arburst == Burst.INCR and araddr % LINE == 0
                assert araddr // 4096 == (araddr + size - 1) // 4096, f"burst at {araddr:#x} crosses 4 KiB"
                self._check(araddr, size, False)
                reads.setdefault(arid, deque()).append(_Read(araddr, arlen + 1, self._due(rng)))
            if awvalid and ready["aw"]:
                assert awsize == 6 and awlen == 0 and awburst == Burst.INCR and awaddr % LINE == 0
                self._check(awaddr, LINE, True)
                addresses.append((awid, awaddr))
            if wvalid and ready["w"]:
                assert wlast
                words.append((wdata, wstrb))
            while addresses and words:
                (name, address), (word, strobe) = addresses.popleft(), words.popleft()
                pending.setdefault(name, deque()).append((address, word, strobe, self._due(rng)))

            if ack_out and bready:
                ack_out = False
                ctx.set(bus.bvalid, 0)
            if not ack_out and not self.hold_acks and rng.random() >= self.stall:
                due = [name for name, queue in pending.items() if queue and queue[0][3] <= self.cycle]
                if due:
                    name = rng.choice(due)
                    address, word, strobe, _ = pending[name].popleft()
                    self._store(address, word, strobe)
                    ack_out = True
                    ctx.set(bus.bvalid, 1)
                    ctx.set(bus.bid, name)
                    ctx.set(bus.bresp, Resp.SLVERR if address in self.write_errors else Resp.OKAY)

            if read_out is not None and rready:
                read_out = None
                ctx.set(bus.rvalid, 0)
            if read_out is None and rng.random() >= self.stall:
                if read_now is None:
                    due = [name for name, queue in reads.items() if queue and queue[0].due <= self.cycle]
                    if due:
                        name = rng.choice(due)
                        read_now = name, reads[name].popleft()
                if read_now is not None:
                    name, read = read_now
                    word = int.from_bytes(self.data[read.address : read.address + LINE], "little")
                    self.reads.append((self.cycle, read.address))
                    read_out = name, word
                    ctx.set(bus.rvalid, 1)
                    ctx.set(bus.rid, name)
                    ctx.set(bus.rdata, word)
                    ctx.set(bus.rresp, Resp.SLVERR if read.address in self.read_errors else Resp.OKAY)
                    ctx.set(bus.rlast, read.beats == 1)
                    read.address += LINE
                    read.beats -= 1
                    if not read.beats:
                        read_now = None

            ready["ar"] = int(rng.random() >= self.stall)
            ready["aw"] = int(rng.random() >= self.stall and (not self.data_first or len(words) > len(addresses)))
            ready["w"] = int(rng.random() >= self.stall and (not self.address_first or len(addresses) > len(words)))
            ctx.set(bus.arready, ready["ar"])
            ctx.set(bus.awready, ready["aw"])
            ctx.set(bus.wready, ready["w"])

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
    def of(cls, dut: Any, config: NdpConfig, **options: Any) -> Hdm:
        size = (1 << config.dpa_bits) // config.channels
        seed = options.pop("seed", 0)
        return cls(
            config,
            [
                AxiMemory(getattr(dut, f"m_axi_{c}"), size, seed=1000 * seed + c, **options)
                for c in range(config.channels)
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

    @property
    def background(self) -> list[Testbench]:
        return [memory.run for memory in self.channels]


class Mmio:
    """The host's side of ``s_io``."""

    def __init__(self, bus: Any) -> None:
        self._bus = bus

    async def write_answer(self, ctx: Any, offset: int, value: int, strobe: int = 0xF, skew: int = 0) -> int:
        """Write and return the response. ``skew`` > 0: data that many cycles late, < 0: address late."""
        bus = self._bus
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
                return int(bresp)

    async def write(self, ctx: Any, offset: int, value: int) -> None:
        assert await self.write_answer(ctx, offset, value) == Resp.OKAY

    async def read(self, ctx: Any, offset: int) -> int:
        bus = self._bus
        ctx.set(bus.araddr, offset)
        ctx.set(bus.arvalid, 1)
        await ctx.tick().until(bus.arready)
        ctx.set(bus.arvalid, 0)
        ctx.set(bus.rready, 1)
        data, resp = await ctx.tick().sample(bus.rdata, bus.rresp).until(bus.rvalid)
        ctx.set(bus.rready, 0)
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
    posted: int = 0
    taken: int = 0

    def registers(self) -> dict[str, int]:
        values = {"PASID": 0x1234 + self.queue, "DEPTH": self.depth, "PASS": self.first_pass}
        for name, value in {
            "BASE": self.base,
            "LIMIT": self.limit,
            "SQ_BASE": self.submission_base,
            "CQ_BASE": self.result_base,
            "MSIX_ADDRESS": 0xFEE0_0000_0000 + self.queue,
        }.items():
            values |= {f"{name}_LO": value & 0xFFFFFFFF, f"{name}_HI": value >> 32}
        return values | {
            "SLOTS": self.submission_log2 | self.result_log2 << 8,
            "MSIX_DATA": 0x40 + self.queue,
        }

    async def set_up(self, ctx: Any, *, interrupt: bool = False, enable: bool = True) -> None:
        for name, value in self.registers().items():
            await self.mmio.write(ctx, queue_offset(self.queue, name), value)
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


@dataclass
class CoreModel:
    """Drives a `ScriptedCore`: every descriptor takes ``delay`` cycles and ends as ``judge`` says."""

    core: Any
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
        held: deque[tuple[int, Fetched]] = deque()
        ctx.set(self.core.idle, 1)
        while True:
            ctx.set(fetched.ready, len(held) < self.capacity)
            if held and not self.paused and held[0][0] <= self.cycle:
                item = held[0][1]
                outcome = self.judge(item)
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
                ctx.set(completed.valid, 1)
            else:
                ctx.set(completed.valid, 0)
            sampled = await ctx.tick().sample(
                fetched.valid, fetched.ready, fetched.payload, completed.valid, completed.ready
            )
            valid, ready, payload, report, taken = sampled[2:]
            self.cycle += 1
            if report and taken:
                held.popleft()
                self.reported.append(self.cycle)
            if valid and ready:
                item = Fetched(
                    descriptor=Descriptor(**{f.name: payload.descriptor[f.name] for f in FIELDS}),
                    **{
                        name: payload[name]
                        for name in (
                            "queue", "first", "verdict", "operand_address", "result_address", "base", "limit",
                            "submission_slot_log2", "result_slot_log2",
                        )
                    },
                    cycle=self.cycle,
                )  # fmt: skip
                self.seen.append(item)
                held.append((self.cycle + self.delay, item))
