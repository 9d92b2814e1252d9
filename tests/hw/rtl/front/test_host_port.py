"""The host's loads and stores: any burst reaches the right bytes, answers come in order, faults are answered."""

from __future__ import annotations

import gc
import random
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from amaranth.hdl import Cat, Module
from amaranth.lib.wiring import connect

from plora.hw.defs.config import NdpConfig, preset
from plora.hw.defs.ports import Burst, Resp
from plora.hw.rtl.front.channel_port import ChannelPort
from plora.hw.rtl.front.host_port import HostPort
from plora.hw.rtl.front.links import HOST
from tests.hw.rtl.front.bench import LINE, AxiTaps, Bench, Driver, Hdm, tap

MEMORY = 1 << 16


@dataclass
class Access:
    """A burst of the host and its outcome."""

    name: int
    address: int
    beats: int = 1
    size_log2: int = 6
    burst: int = Burst.INCR
    data: list[int] = field(default_factory=list)
    """Beats as they stand on the data lanes: written, or read."""
    strobes: list[int] = field(default_factory=list)
    resps: list[int] = field(default_factory=list)
    done_cycle: int = 0

    def lanes(self) -> list[tuple[int, int]]:
        """(address, bytes) that each beat of an INCR burst covers."""
        size = 1 << self.size_log2
        spans, address = [], self.address
        for _ in range(self.beats):
            end = (address & -size) + size
            spans.append((address, end - address))
            address = end
        return spans


class HostBus:
    """An AXI4 manager that pauses on every channel by itself."""

    def __init__(self, bus: Any, taps: list[Any], seed: int, stall: float, data_lead: bool) -> None:
        self._bus, self._taps, self._stall, self._data_lead = bus, taps, stall, data_lead
        self._rng = random.Random(seed)
        self.reads: deque[Access] = deque()
        self.writes: deque[Access] = deque()
        self.cycle = 0
        self.open = 0

    def read(self, access: Access) -> Access:
        self.reads.append(access)
        self.open += 1
        return access

    def write(self, access: Access) -> Access:
        self.writes.append(access)
        self.open += 1
        return access

    def _goes(self) -> bool:
        return not self._stall or self._rng.random() >= self._stall

    async def run(self, ctx: Any) -> None:
        bus, drive = self._bus, Driver(ctx)
        beats: deque[tuple[int, int, int]] = deque()
        addresses: deque[Access] = deque()
        read_owed: deque[Access] = deque()
        write_owed: deque[Access] = deque()
        ar: Access | None = None
        aw: Access | None = None
        w: tuple[int, int, int] | None = None
        rready = bready = False
        sample = ctx.tick().sample(*self._taps)
        while True:
            _, _, control, r, b = await sample
            self.cycle += 1
            arready, awready, wready, rvalid, bvalid = (control >> bit & 1 for bit in range(5))
            if ar is not None and arready:
                ar = None
            if aw is not None and awready:
                aw = None
            if w is not None and wready:
                w = None
            if rvalid and rready:
                access = read_owed[0]
                access.data.append(r & (1 << 512) - 1)
                access.resps.append(r >> 512 & 3)
                assert r >> 515 == access.name, "an answer out of order"
                last = len(access.resps) == access.beats
                assert (r >> 514 & 1) == last
                if last:
                    access.done_cycle = self.cycle
                    read_owed.popleft()
                    self.open -= 1
            if bvalid and bready:
                access = write_owed.popleft()
                assert b >> 2 == access.name, "an answer out of order"
                access.resps.append(b & 3)
                access.done_cycle = self.cycle
                self.open -= 1

            if ar is None and self.reads and self._goes():
                ar = self.reads.popleft()
                read_owed.append(ar)
                self._address(drive, "ar", ar)
            while self.writes:
                access = self.writes.popleft()
                addresses.append(access)
                beats.extend(
                    (data, strobe, int(i == access.beats - 1))
                    for i, (data, strobe) in enumerate(zip(access.data, access.strobes, strict=True))
                )
            # Data may lead its address, or trail it, by anything.
            if w is None and beats and self._goes():
                w = beats.popleft()
                drive(bus.wdata, w[0])
                drive(bus.wstrb, w[1])
                drive(bus.wlast, w[2])
            if aw is None and addresses and self._goes() and not (self._data_lead and w is None and beats):
                aw = addresses.popleft()
                write_owed.append(aw)
                self._address(drive, "aw", aw)
            drive(bus.arvalid, ar is not None)
            drive(bus.awvalid, aw is not None)
            drive(bus.wvalid, w is not None)
            rready, bready = self._goes(), self._goes()
            drive(bus.rready, rready)
            drive(bus.bready, bready)

    def _address(self, drive: Driver, channel: str, access: Access) -> None:
        for member, value in {
            "id": access.name,
            "addr": access.address,
            "len": access.beats - 1,
            "size": access.size_log2,
            "burst": access.burst,
        }.items():
            drive(getattr(self._bus, channel + member), value)

    async def settle(self, ctx: Any) -> None:
        while self.open:
            await ctx.tick()


class HostBench(Bench):
    """The host port with the channel ports and memories behind it."""

    def __init__(self, channels: int) -> None:
        self.config: NdpConfig = replace(preset("tiny"), channels=channels, dpa_bits=16)
        m = Module()
        m.submodules.host = host = HostPort(self.config)
        self.buses, self.taps = [], []
        for index in range(channels):
            port = ChannelPort(self.config)
            m.submodules[f"channel_{index}"] = port
            connect(m, host.reads[index], port.reads[HOST])
            connect(m, host.writes[index], port.writes[HOST])
            self.buses.append(port.axi)
            self.taps.append(AxiTaps(m, port.axi))
        self.bus = bus = host.s_mem
        self.bus_taps = [
            tap(m, Cat(bus.arready, bus.awready, bus.wready, bus.rvalid, bus.bvalid)),
            tap(m, Cat(bus.rdata, bus.rresp, bus.rlast, bus.rid)),
            tap(m, Cat(bus.bresp, bus.bid)),
        ]
        super().__init__(m)

    def start(self, *, seed: int = 0, stall: float = 0.0, data_lead: bool = False, **memory: Any) -> None:
        self.hdm = Hdm.of(self.buses, self.taps, self.config, seed=seed, stall=stall, **memory)
        self.host = HostBus(self.bus, self.bus_taps, seed, stall, data_lead)

    def go(self, testbench: Any, **options: Any) -> int:
        return self.run(testbench, background=[*self.hdm.background, self.host.run], **options)


_benches: dict[int, HostBench] = {}


def bench_of(channels: int) -> HostBench:
    if channels not in _benches:
        _benches[channels] = HostBench(channels)
    return _benches[channels]


def some_burst(rng: random.Random, write: bool) -> Access:
    size_log2 = rng.choice([6, 6, 6, 5, 3, 2, 0])
    beats = rng.choice([1, 1, 2, 3, 16, 40])
    address = rng.choice(
        [
            rng.randrange(MEMORY - 4096),
            rng.randrange(16) * 4096,
            rng.randrange(1, 16) * 4096 - rng.choice([1, 63, 64, 65]),
        ]
    )
    # An INCR burst may not cross 4 KiB.
    size = 1 << size_log2
    room = (4096 - (address & -size) % 4096) // size
    access = Access(rng.getrandbits(8), address, min(beats, room), size_log2)
    if write:
        for start, count in access.lanes():
            access.data.append(rng.getrandbits(512))
            lanes = (1 << count) - 1 << start % LINE
            access.strobes.append(rng.choice([lanes, lanes & rng.getrandbits(64), 0]))
    return access


def apply(memory: bytearray, access: Access) -> None:
    for (start, count), data, strobe in zip(access.lanes(), access.data, access.strobes, strict=True):
        for address in range(start, start + count):
            lane = address % LINE
            if strobe >> lane & 1:
                memory[address] = data >> 8 * lane & 255


@pytest.mark.parametrize(
    ("channels", "stall", "data_lead"),
    [(1, 0.3, False), (2, 0.0, False), (2, 0.4, True), (4, 0.2, False)],
)
def test_random_bursts_reach_the_right_bytes(channels: int, stall: float, data_lead: bool) -> None:
    bench = bench_of(channels)
    rng = random.Random(channels + 7 * data_lead)
    bench.start(seed=channels, stall=stall, data_lead=data_lead, latency=(1, 25))
    expected = bytearray(rng.randbytes(MEMORY))
    bench.hdm.write(0, bytes(expected))

    async def host(ctx: Any) -> None:
        for _ in range(3):
            for _ in range(12):
                # Stores are carried out in order, so they may overlap.
                apply(expected, bench.host.write(some_burst(rng, True)))
            await bench.host.settle(ctx)
            reads = [bench.host.read(some_burst(rng, False)) for _ in range(12)]
            await bench.host.settle(ctx)
            for access in reads:
                for (start, count), data in zip(access.lanes(), access.data, strict=True):
                    lanes = data.to_bytes(LINE, "little")[start % LINE :][:count]
                    assert lanes == expected[start : start + count], f"{access.address:#x} size {access.size_log2}"
                assert set(access.resps) == {Resp.OKAY}

    bench.go(host)
    assert bench.hdm.read(0, MEMORY) == expected


def full_write(address: int, values: list[int], **fields: Any) -> Access:
    return Access(3, address, len(values), data=values, strobes=[(1 << LINE) - 1] * len(values), **fields)


def test_beats_beyond_memory_are_refused_and_touch_nothing() -> None:
    bench = bench_of(2)
    bench.start()

    async def host(ctx: Any) -> None:
        over = bench.host.read(Access(1, MEMORY - 2 * LINE, 4))
        far = bench.host.read(Access(2, (1 << 48) - LINE, 2))
        await bench.host.settle(ctx)
        assert over.resps == [Resp.OKAY, Resp.OKAY, Resp.DECERR, Resp.DECERR]
        assert far.resps == [Resp.DECERR, Resp.DECERR]
        assert far.data == [0, 0]
        over = bench.host.write(full_write(MEMORY - LINE, [5, 6]))
        wrapped = bench.host.write(full_write((1 << 48) - LINE, [7, 8]))
        await bench.host.settle(ctx)
        assert over.resps == wrapped.resps == [Resp.DECERR]

    bench.go(host)
    assert bench.hdm.read(MEMORY - LINE, 1) == b"\x05", "the beat within memory was carried out"
    assert bench.hdm.read(0, MEMORY - LINE) == bytes(MEMORY - LINE), "an address wrapped around"


@pytest.mark.parametrize("burst", [Burst.FIXED, Burst.WRAP, 3])
def test_other_burst_types_are_refused_and_touch_nothing(burst: int) -> None:
    bench = bench_of(2)
    bench.start()

    async def host(ctx: Any) -> None:
        read = bench.host.read(Access(1, 0x100, 4, burst=burst))
        write = bench.host.write(full_write(0x100, [1, 2, 3, 4], burst=burst))
        after = bench.host.write(full_write(0x200, [9]))
        await bench.host.settle(ctx)
        assert read.resps == [Resp.SLVERR] * 4
        assert write.resps == [Resp.SLVERR]
        assert after.resps == [Resp.OKAY]

    bench.go(host)
    assert not any(memory.reads for memory in bench.hdm.channels)
    assert sum(len(memory.writes) for memory in bench.hdm.channels) == 1


def test_an_error_of_memory_is_answered_for_its_own_burst_only() -> None:
    bench = bench_of(2)
    bench.start(latency=(1, 10))
    for address in (0x1040, 0x2080):
        memory, local = bench.hdm.channel_line(address)
        memory.read_errors.add(local)
        memory.write_errors.add(local)

    async def host(ctx: Any) -> None:
        reads = [bench.host.read(Access(i, base, 4)) for i, base in enumerate((0x1000, 0x2000, 0x3000))]
        writes = [bench.host.write(full_write(base, [1, 2, 3, 4])) for base in (0x1000, 0x3000, 0x2000)]
        await bench.host.settle(ctx)
        bad, ok = Resp.SLVERR, Resp.OKAY
        assert [a.resps for a in reads] == [[ok, bad, ok, ok], [ok, ok, bad, ok], [ok] * 4]
        assert [a.resps for a in writes] == [[bad], [ok], [bad]]

    bench.go(host)


@pytest.mark.parametrize("beats", [1, 16])
@pytest.mark.parametrize("write", [False, True], ids=["loads", "stores"])
def test_one_line_a_cycle_at_the_latency_of_a_memory(beats: int, write: bool) -> None:
    bench = bench_of(4)
    bench.start(latency=(40, 40))
    total = 256

    async def host(ctx: Any) -> None:
        accesses = []
        for address in range(0, total * LINE, beats * LINE):
            if write:
                accesses.append(bench.host.write(full_write(address, [address] * beats)))
            else:
                accesses.append(bench.host.read(Access(1, address, beats)))
        await bench.host.settle(ctx)
        cycles.append(accesses[-1].done_cycle)

    cycles: list[int] = []
    bench.go(host)
    assert cycles[0] < 1.05 * total + 60, f"{total} lines in {cycles[0]} cycles"


def test_a_write_is_answered_only_after_every_line_is_acknowledged() -> None:
    bench = bench_of(2)
    bench.start()

    async def host(ctx: Any) -> None:
        # One of the two channels keeps its acknowledgements to itself.
        bench.hdm.channels[1].hold_acks = True
        access = bench.host.write(full_write(0, [1, 2, 3, 4]))
        await ctx.tick().repeat(100)
        assert not access.resps
        bench.hdm.channels[1].hold_acks = False
        await bench.host.settle(ctx)
        assert access.resps == [Resp.OKAY]

    bench.go(host)


@pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")
def test_lines_must_be_enough_for_its_buffers() -> None:
    with pytest.raises(TypeError, match="not 3"):
        HostPort(preset("tiny"), lines=3)
    gc.collect()  # here, where its never having been used is forgiven
