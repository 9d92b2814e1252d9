"""The registers over AXI4-Lite, and which set-ups an enable accepts."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from amaranth.hdl import Module, ResetInserter, Signal
from amaranth.lib.wiring import connect

from plora.hw.defs.config import preset
from plora.hw.defs.legality import RingSetup, ring_setup_allowed
from plora.hw.defs.ports import Resp
from plora.hw.defs.registers import (
    GLOBAL,
    ID_VALUE,
    INTERFACE_VERSION,
    PENDING_BASE,
    QUEUE,
    QUEUE_BASE,
    QUEUE_STRIDE,
    RESET_CHAIN_LIMIT,
    RESET_CHAIN_TIMEOUT,
    RESET_POLL_INTERVAL,
    RESET_SHARE,
    RESET_WATCHDOG,
    VECTOR,
    VECTOR_BASE,
    Access,
    global_offset,
    queue_offset,
    vector_offset,
)
from plora.hw.rtl.front.queue_engine import QueueEngine
from plora.hw.rtl.front.records import CONFIG_REGISTERS, LIVE_REGISTERS
from plora.hw.rtl.front.registers import RegisterFile
from tests.hw.rtl.front.bench import Bench, Mmio

CONFIG = replace(preset("tiny"), queues=3)


class RegisterBench(Bench):
    """Registers and queue engine without memory and core."""

    def __init__(self) -> None:
        m = Module()
        self.reset = Signal()
        m.submodules.registers = self.registers = registers = RegisterFile(CONFIG)
        m.submodules.engine = self.engine = engine = QueueEngine(CONFIG)
        connect(m, registers.queues, engine.control)
        m.d.comb += registers.core_idle.eq(1)
        self.mmio = Mmio(registers.s_io)
        super().__init__(ResetInserter(self.reset)(m))

    async def get(self, ctx: Any, queue: int, name: str) -> int:
        return await self.mmio.queue(ctx, queue, name)

    async def put(self, ctx: Any, queue: int, name: str, value: int) -> None:
        await self.mmio.write(ctx, queue_offset(queue, name), value)

    async def set_up(self, ctx: Any, queue: int, setup: RingSetup) -> None:
        words = {
            "BASE": setup.base,
            "LIMIT": setup.limit,
            "SQ_BASE": setup.submission_base,
            "CQ_BASE": setup.result_base,
        }
        for name, value in words.items():
            await self.put(ctx, queue, f"{name}_LO", value & 0xFFFF_FFFF)
            await self.put(ctx, queue, f"{name}_HI", value >> 32)
        await self.put(ctx, queue, "DEPTH", setup.depth)
        await self.put(ctx, queue, "SLOTS", setup.submission_slot_log2 | setup.result_slot_log2 << 8)


@pytest.fixture(scope="module")
def shared() -> RegisterBench:
    return RegisterBench()


@pytest.fixture
def bench(shared: RegisterBench) -> RegisterBench:
    shared.mmio = Mmio(shared.registers.s_io)
    return shared


GOOD = RingSetup(
    base=0x10000,
    limit=0x20000,
    depth=4,
    submission_base=0x10000,
    submission_slot_log2=11,
    result_base=0x18000,
    result_slot_log2=12,
)


def test_values_after_reset(bench: RegisterBench) -> None:
    expected = {
        "ID": ID_VALUE,
        "INTERFACE": INTERFACE_VERSION,
        "CAPS": 2 | 2 << 8 | 3 << 16 | 24 << 24,
        "BUFFERS": 13 | 12 << 8 | 14 << 16,
        "CHAIN_TIMEOUT": RESET_CHAIN_TIMEOUT,
        "POLL_INTERVAL": RESET_POLL_INTERVAL,
        "CHAIN_LIMIT": RESET_CHAIN_LIMIT,
        "WATCHDOG": RESET_WATCHDOG,
        "SHARE": RESET_SHARE,
    }

    async def host(ctx: Any) -> None:
        for register in GLOBAL:
            value = await bench.mmio.read(ctx, register.offset)
            if register.name != "CYCLES_LO":
                assert value == expected.get(register.name, 0), register.name
        for queue in range(CONFIG.queues):
            for register in QUEUE:
                assert await bench.get(ctx, queue, register.name) == 0, (queue, register.name)
            for register in VECTOR:
                shown = await bench.mmio.read(ctx, vector_offset(queue, register.name))
                assert shown == (register.name == "MASK"), (queue, register.name)
        assert await bench.mmio.read(ctx, PENDING_BASE) == 0

    bench.run(host)


def test_each_register_of_the_vector_table_keeps_its_own_value(bench: RegisterBench) -> None:
    rng = random.Random(2)
    values = {
        vector_offset(vector, register.name): rng.getrandbits(1 if register.name == "MASK" else 32)
        for vector in range(CONFIG.queues)
        for register in VECTOR
    }
    absent = [vector_offset(CONFIG.queues, "DATA"), VECTOR_BASE - 4, PENDING_BASE - 4, PENDING_BASE + 4]

    async def host(ctx: Any) -> None:
        for offset, value in values.items():
            await bench.mmio.write(ctx, offset, value)
        for offset in absent:
            await bench.mmio.write(ctx, offset, 0xFFFF_FFFF)
            assert await bench.mmio.read(ctx, offset) == 0
        for offset, value in values.items():
            assert await bench.mmio.read(ctx, offset) == value, hex(offset)

    bench.run(host)


def test_global_settings_are_read_back(bench: RegisterBench) -> None:
    settings = {
        "CHAIN_TIMEOUT": 123,
        "POLL_INTERVAL": 9,
        "CHAIN_LIMIT": 300,
        "WATCHDOG": 77,
        "SHARE": 0x0007_0123,
        "MSIX": 2,
    }

    async def host(ctx: Any) -> None:
        for name, value in settings.items():
            await bench.mmio.write(ctx, global_offset(name), value)
        for name, value in settings.items():
            assert await bench.mmio.global_(ctx, name) == value, name
        await bench.mmio.write(ctx, global_offset("MSIX"), 0xFFFF_FFFD)
        assert await bench.mmio.global_(ctx, "MSIX") == 1

    bench.run(host)


@pytest.mark.parametrize("period", [0, 1, 5, 40])
def test_the_watchdog_ticks_once_a_period(bench: RegisterBench, period: int) -> None:
    ticks: list[int] = []

    async def listen(ctx: Any) -> None:
        cycle = 0
        while True:
            _, _, tick = await ctx.tick().sample(bench.registers.tick)
            cycle += 1
            if tick:
                ticks.append(cycle)

    async def host(ctx: Any) -> None:
        await bench.mmio.write(ctx, global_offset("WATCHDOG"), period)
        ticks.clear()
        await ctx.tick().repeat(201)

    bench.run(host, background=[listen])
    if period:
        assert {b - a for a, b in pairwise(ticks)} == {period}
        assert len(ticks) >= 200 // period - 1
    else:
        assert not ticks


def test_each_configuration_register_keeps_its_own_value_and_none_changes_while_enabled(bench: RegisterBench) -> None:
    rng = random.Random(1)
    values = {
        (queue, register.name): rng.getrandbits(32) for queue in range(CONFIG.queues) for register in CONFIG_REGISTERS
    }

    async def host(ctx: Any) -> None:
        for (queue, name), value in values.items():
            await bench.put(ctx, queue, name, value)
        for (queue, name), value in values.items():
            assert await bench.get(ctx, queue, name) == value
        await bench.set_up(ctx, 1, GOOD)
        await bench.put(ctx, 1, "CTRL", 1)
        assert await bench.get(ctx, 1, "QSTATUS") == 1
        before = {register.name: await bench.get(ctx, 1, register.name) for register in CONFIG_REGISTERS}
        for register in CONFIG_REGISTERS:
            await bench.put(ctx, 1, register.name, ~before[register.name] & 0xFFFF_FFFF)
            await bench.put(ctx, 2, register.name, 5)
        for register in CONFIG_REGISTERS:
            assert await bench.get(ctx, 1, register.name) == before[register.name], register.name
            assert await bench.get(ctx, 2, register.name) == 5
            assert await bench.get(ctx, 0, register.name) == values[0, register.name]
        await bench.put(ctx, 1, "CTRL", 0)
        await bench.put(ctx, 1, "DEPTH", 9)
        assert await bench.get(ctx, 1, "DEPTH") == 9

    bench.run(host)


def test_interrupt_enable_can_be_changed_at_any_time_and_is_read_back(bench: RegisterBench) -> None:
    async def host(ctx: Any) -> None:
        await bench.set_up(ctx, 2, GOOD)
        for value in (2, 0, 1, 3, 1, 2):
            await bench.put(ctx, 2, "CTRL", value)
            assert await bench.get(ctx, 2, "CTRL") == value
        assert await bench.get(ctx, 2, "QERRORS") == 0

    bench.run(host)


def test_absent_and_read_only_registers_ignore_writes_and_absent_ones_read_zero(bench: RegisterBench) -> None:
    used = {register.offset for register in GLOBAL}
    used |= {QUEUE_BASE + q * QUEUE_STRIDE + register.offset for q in range(CONFIG.queues) for register in QUEUE}
    absent = [0x03C, 0xFFC, QUEUE_BASE + CONFIG.queues * QUEUE_STRIDE, QUEUE_BASE + 0x4C, QUEUE_BASE + 0x7C, 0xFFFC]
    # An address whose low bits are those of a register of queue 0, and one of a queue that does not exist.
    absent += [0x9008, queue_offset(CONFIG.queues, "PASID")]
    read_only = [r.offset for r in GLOBAL if r.access is Access.RO and not r.name.startswith("CYCLES")]
    read_only += [queue_offset(0, r.name) for r in QUEUE if r.access is Access.RO]

    async def host(ctx: Any) -> None:
        for offset in absent:
            assert offset not in used
            assert await bench.mmio.read(ctx, offset) == 0
        before = [await bench.mmio.read(ctx, offset) for offset in sorted(used) if offset not in (0x40, 0x44)]
        for offset in absent + read_only:
            assert await bench.mmio.write_answer(ctx, offset, 0xFFFF_FFFF) == Resp.OKAY
        after = [await bench.mmio.read(ctx, offset) for offset in sorted(used) if offset not in (0x40, 0x44)]
        assert before == after
        assert await bench.mmio.read(ctx, queue_offset(0, "DOORBELL")) == 0

    bench.run(host)


@pytest.mark.parametrize("strobe", [0b0000, 0b0001, 0b0111, 0b1110, 0b1100])
def test_partial_writes_are_refused_and_change_nothing(bench: RegisterBench, strobe: int) -> None:
    async def host(ctx: Any) -> None:
        await bench.mmio.write(ctx, global_offset("POLL_INTERVAL"), 77)
        for offset in (global_offset("POLL_INTERVAL"), queue_offset(0, "DEPTH"), queue_offset(0, "CTRL")):
            before = await bench.mmio.read(ctx, offset)
            assert await bench.mmio.write_answer(ctx, offset, 0xFFFF_FFFF, strobe) == Resp.SLVERR
            assert await bench.mmio.read(ctx, offset) == before

    bench.run(host)


@pytest.mark.parametrize("skew", [-7, -3, -2, -1, 0, 1, 2, 3, 7])
def test_address_and_data_come_in_any_order(bench: RegisterBench, skew: int) -> None:
    async def host(ctx: Any) -> None:
        for value in (5, 0x8000_0001):
            assert await bench.mmio.write_answer(ctx, queue_offset(1, "COALESCE_CYCLES"), value, skew=skew) == Resp.OKAY
            assert await bench.get(ctx, 1, "COALESCE_CYCLES") == value

    bench.run(host)


def test_reads_and_writes_go_on_at_the_same_time(bench: RegisterBench) -> None:
    async def writes(ctx: Any) -> None:
        for value in range(20):
            await bench.put(ctx, 0, "COALESCE_CYCLES", value)

    async def reads(ctx: Any) -> None:
        seen = [await bench.get(ctx, 0, "COALESCE_CYCLES") for _ in range(20)]
        assert seen == sorted(seen) and len(set(seen)) > 3

    bench.run(writes, reads)


def test_each_doorbell_rings_once_for_its_queue(bench: RegisterBench) -> None:
    rung: list[int] = []

    async def listen(ctx: Any) -> None:
        registers = bench.registers.queues
        while True:
            _, _, doorbell, queue = await ctx.tick().sample(registers.doorbell, registers.doorbell_queue)
            if doorbell:
                rung.append(queue)

    async def host(ctx: Any) -> None:
        for queue, value in ((0, 0), (2, 0xFFFF_FFFF), (1, 7), (2, 2)):
            await bench.put(ctx, queue, "DOORBELL", value)
        await bench.mmio.write(ctx, queue_offset(3, "DOORBELL"), 1)

    bench.run(host, background=[listen])
    assert rung == [0, 2, 1, 2]


def test_cycle_counter_counts_and_is_cleared_and_its_halves_belong_together(bench: RegisterBench) -> None:
    async def host(ctx: Any) -> None:
        first = await bench.mmio.global_(ctx, "CYCLES_LO")
        await ctx.tick().repeat(100)
        second = await bench.mmio.global_(ctx, "CYCLES_LO")
        assert 100 < second - first < 110
        await bench.mmio.write(ctx, global_offset("CONTROL"), 1)
        assert await bench.mmio.global_(ctx, "CYCLES_LO") < 10
        assert await bench.mmio.global_(ctx, "CONTROL") == 0
        # Across the carry: the high half is that of the moment in which the low half was read.
        ctx.set(bench.registers._cycles, 0xFFFF_FFFC)
        low = await bench.mmio.global_(ctx, "CYCLES_LO")
        await ctx.tick().repeat(20)
        high = await bench.mmio.global_(ctx, "CYCLES_HI")
        assert (high << 32 | low) < 0x1_0000_0008 and high == low >> 31 ^ 1

    bench.run(host)


def test_live_registers_are_those_that_say_so() -> None:
    assert {*LIVE_REGISTERS} | {r.name for r in CONFIG_REGISTERS} == {r.name for r in QUEUE if r.access is Access.RW}


def boundary_setups(count: int) -> list[RingSetup]:
    """Set-ups near every limit of what is allowed, about half of them good."""
    rng = random.Random(3)
    memory, stripe = 1 << CONFIG.dpa_bits, CONFIG.stripe_bytes
    setups = []
    for _ in range(count):
        depth = rng.choice([2, 3, 4, 64, 4096])
        logs = [rng.choice([11, 12, 13]) for _ in range(2)]
        sizes = [depth << log2 for log2 in logs]
        total = sum(sizes)
        base = rng.choice([0, stripe, memory - total, rng.randrange(0, max(1, memory - total), stripe)])
        base = max(0, base)
        limit = base + total
        setup = RingSetup(base, limit, depth, base, logs[0], base + sizes[0], logs[1])
        changes: list[dict[str, int]] = [
            {},
            {},
            {},
            {"limit": limit - 1},
            {"limit": limit + rng.choice([1, 64, 1 << 20])},
            {"limit": memory},
            {"limit": memory + 1},
            {"limit": 1 << 63 | limit},
            {"base": base + 1},
            {"base": max(0, base - 1)},
            {"depth": rng.choice([0, 1, 4097, 0x1_0004, 1 << 31, depth + 1])},
            {"submission_slot_log2": rng.choice([0, 10, 24, 25, 31])},
            {"result_slot_log2": rng.choice([0, 10, 24, 25, 31])},
            {"submission_base": base + rng.choice([1, 64, stripe, -stripe, 1 << 40]) & (1 << 64) - 1},
            {"result_base": setup.result_base + rng.choice([1, 32, 64, -64, 1 << 63]) & (1 << 64) - 1},
            {"submission_base": (1 << 64) - stripe},
            {"result_base": (1 << 64) - 64},
        ]
        setups.append(replace(setup, **rng.choice(changes)))
    return setups


def test_enable_accepts_exactly_the_set_ups_that_the_specification_allows(bench: RegisterBench) -> None:
    setups = boundary_setups(120)
    accepted = [ring_setup_allowed(CONFIG, setup) for setup in setups]
    assert 0.2 < sum(accepted) / len(accepted) < 0.8, "the cases are one-sided"

    async def host(ctx: Any) -> None:
        errors = 0
        for setup, allowed in zip(setups, accepted, strict=True):
            await bench.set_up(ctx, 2, setup)
            await bench.put(ctx, 2, "CTRL", 1)
            enabled = await bench.get(ctx, 2, "QSTATUS")
            assert enabled == int(allowed), setup
            errors += not allowed
            assert await bench.get(ctx, 2, "QERRORS") == errors
            await bench.put(ctx, 2, "CTRL", 0)
            # The look that an enable starts must not find a memory here: let it come and go.
            while await bench.get(ctx, 2, "QSTATUS"):
                ctx.set(bench.engine.slot_request.ready, 1)
                ctx.set(bench.engine.slot.valid, 1)
            ctx.set(bench.engine.slot.valid, 0)

    bench.run(host, max_cycles=60_000)


def test_reset_forgets_queues_whatever_the_memories_held(bench: RegisterBench) -> None:
    async def host(ctx: Any) -> None:
        await bench.set_up(ctx, 1, GOOD)
        await bench.put(ctx, 1, "CTRL", 3)
        await bench.put(ctx, 1, "CQ_HEAD", 99)
        await bench.mmio.write(ctx, global_offset("CHAIN_TIMEOUT"), 5)
        assert await bench.get(ctx, 1, "QERRORS") == 1
        assert await bench.get(ctx, 1, "QSTATUS") & 1
        ctx.set(bench.reset, 1)
        await ctx.tick()
        ctx.set(bench.reset, 0)
        await ctx.tick().repeat(10)
        for register in QUEUE:
            assert await bench.get(ctx, 1, register.name) == 0, register.name
        assert await bench.mmio.global_(ctx, "CHAIN_TIMEOUT") == RESET_CHAIN_TIMEOUT
        await bench.set_up(ctx, 1, GOOD)
        await bench.put(ctx, 1, "CTRL", 1)
        assert await bench.get(ctx, 1, "QSTATUS") & 1

    bench.run(host)


def test_cycles_that_the_engine_documents(bench: RegisterBench) -> None:
    """Doorbell to request 4, valid line to descriptor 3, report to completion line 3."""
    engine = bench.engine

    async def until(ctx: Any, signal: Any) -> int:
        cycles = 0
        while True:
            _, _, value = await ctx.tick().sample(signal)
            if value:
                return cycles
            cycles += 1

    async def host(ctx: Any) -> None:
        await bench.mmio.write(ctx, global_offset("POLL_INTERVAL"), 0xFFFF_FFFF)
        await bench.set_up(ctx, 0, GOOD)
        await bench.put(ctx, 0, "PASS", 9)
        await bench.put(ctx, 0, "CTRL", 1)
        # The look of the enable finds nothing.
        ctx.set(engine.slot_request.ready, 1)
        await until(ctx, engine.slot_request.valid)
        ctx.set(engine.slot.valid, 1)
        await until(ctx, engine.slot.ready)
        ctx.set(engine.slot.valid, 0)
        await ctx.tick().repeat(10)
        bus = bench.registers.s_io
        ctx.set(bus.awaddr, queue_offset(0, "DOORBELL"))
        ctx.set(bus.wstrb, 0xF)
        for valid in (bus.awvalid, bus.wvalid, bus.bready):
            ctx.set(valid, 1)
        await until(ctx, bench.registers.queues.doorbell)
        # `until` consumed the cycle of the doorbell itself: the next one is the first after it.
        assert await until(ctx, engine.slot_request.valid) + 1 == 4
        for valid in (bus.awvalid, bus.wvalid, bus.bready):
            ctx.set(valid, 0)
        ctx.set(engine.slot.payload, {"descriptor": {}, "valid": 0x5C000009, "error": 0})
        ctx.set(engine.slot.valid, 1)
        await ctx.tick()
        assert await until(ctx, engine.fetched.valid) + 1 == 3
        ctx.set(engine.slot.valid, 0)
        ctx.set(engine.fetched.ready, 1)
        await ctx.tick().repeat(20)
        ctx.set(engine.completed.valid, 1)
        await ctx.tick()
        assert await until(ctx, engine.line.valid) + 1 == 3
        ctx.set(engine.completed.valid, 0)

    bench.run(host)
