"""The device as a whole: its ports, its smallest configuration, and the course of one descriptor in cycles."""

from __future__ import annotations

import gc
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from amaranth.back import verilog
from amaranth.hdl import Cat, Module, Value
from amaranth.lib import wiring

from plora.hw.defs.config import PRESETS, NdpConfig, preset
from plora.hw.defs.descriptor import Descriptor, Op
from plora.hw.defs.packing import pack_geometry
from plora.hw.defs.ports import CLOCK, MEMORY_ID_BITS, RESET, device_ports, memory_bus
from plora.hw.defs.registers import queue_offset
from plora.hw.defs.status import Status
from plora.hw.rtl.core.core import NdpCore
from plora.hw.rtl.device import NdpDevice
from plora.hw.rtl.front.links import CORE, QUEUES
from plora.sim.functional.layout import gpu_operand_bytes, pack_operand
from tests.hw.rtl.front.bench import AxiTaps, Bench, DeviceBench, Hdm, Mmio, Ring, ScriptedCore, tap

TINY = preset("tiny")
SMALLEST = replace(TINY, name="smallest", channels=1, queues=1)


@pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")
@pytest.mark.parametrize("config", [*PRESETS.values(), SMALLEST], ids=lambda c: c.name)
def test_ports_are_those_of_the_list(config: NdpConfig) -> None:
    device = NdpDevice(config)
    ports = {}
    for path, member, value in device.signature.flatten(device):
        ports["__".join(map(str, path))] = (len(Value.cast(value)), member.flow == wiring.Out)
    listed = {p.name: (p.width, p.output) for p in device_ports(config) if p.name not in (CLOCK, RESET)}
    assert ports == listed
    del device
    gc.collect()  # here, where its never having been used is forgiven


@pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")
def test_a_core_of_another_configuration_is_refused() -> None:
    with pytest.raises(TypeError, match="core must have the signature"):
        NdpDevice(TINY, ScriptedCore(SMALLEST))
    gc.collect()


def test_verilog_of_the_smallest_front_end_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMARANTH_USE_YOSYS", "builtin")
    text = verilog.convert(NdpDevice(SMALLEST, ScriptedCore(SMALLEST)), name="device", emit_src=False)
    modules = re.findall(r"^module (\S+?)\((.*?)\);(.*?)^endmodule", text, re.MULTILINE | re.DOTALL)
    top = next(ports for name, ports, _ in modules if name == "device")
    assert {port.strip() for port in top.split(",")} == {p.name for p in device_ports(SMALLEST)}
    for name, _, body in modules:
        assert "assign" in body or "always" in body, f"module {name} is empty"
    assert "always_latch" not in text


def test_the_smallest_device_serves_its_queue() -> None:
    bench = DeviceBench(SMALLEST)
    ring = bench.queue(depth=2)
    bench.only_lines_of(ring)

    async def host(ctx: Any) -> None:
        await ring.set_up(ctx)
        for number in range(5):
            ring.post(Descriptor(device_rows=number))
            await ring.ring(ctx)
            assert (await ring.wait(ctx, number, 200)).status == Status.OK
            await ring.take(ctx)

    bench.go(host)
    assert [seen.descriptor.device_rows for seen in bench.core.seen] == list(range(5))


DOCUMENTED = {
    "doorbell write answered -> slot read": 3,
    "slot line -> descriptor in the core": 5,
    "descriptor in the core -> operand read": 19,
    "descriptor in the core -> weights read": 20,
    "first word of memory -> first beat": 3,
    "last beat -> last result line": 14,
    "last acknowledgement -> report": 5,
    "report -> completion line": 2,
    "completion acknowledged -> interrupt": 9,
}
"""The table "Overhead" of docs/architecture.md, in cycles."""


BEAT_TO_COUNTER = 2
"""Cycles from a beat to the counter that shows it."""


class Timeline:
    """Cycles of the first and the last occurrence of events at the ports of device and core."""

    def __init__(self, m: Module, device: NdpDevice, core: NdpCore, weights: int) -> None:
        self._buses = [getattr(device, memory_bus(c)) for c in range(TINY.channels)]
        self._weights = weights // TINY.channels
        self._taps = [
            tap(
                m,
                Cat(
                    b.arvalid & b.arready, b.rvalid & b.rready, b.awvalid & b.awready, b.bvalid & b.bready,
                    b.arid, b.rid, b.awid, b.bid, b.araddr,
                ),
            )
            for b in self._buses
        ]  # fmt: skip
        self._device = tap(
            m,
            Cat(
                device.s_io.bvalid & device.s_io.bready,
                core.fetched.valid & core.fetched.ready,
                core.completed.valid & core.completed.ready,
                device.msix.valid,
            ),
        )
        self._beats = tap(m, core.counters.beats)
        self.first: dict[str, int] = {}
        self.last: dict[str, int] = {}
        self.cycle = 0
        self.on = False

    def _note(self, event: str, ago: int = 0) -> None:
        if self.on:
            self.first.setdefault(event, self.cycle - ago)
            self.last[event] = self.cycle - ago

    async def run(self, ctx: Any) -> None:
        sample = ctx.tick().sample(*self._taps, self._device, self._beats)
        beats = 0
        while True:
            _, _, *channels, device, counted = await sample
            self.cycle += 1
            for channel in channels:
                ids = {
                    name: channel >> 4 + MEMORY_ID_BITS * place & (1 << MEMORY_ID_BITS) - 1
                    for place, name in enumerate(("ar", "r", "aw", "b"))
                }
                for bit, name in enumerate(("ar", "r", "aw", "b")):
                    if channel >> bit & 1:
                        who = {CORE: "core", QUEUES: "queue"}[ids[name] >> 4]
                        if name == "ar" and who == "core":
                            who = "weights" if channel >> 4 + 4 * MEMORY_ID_BITS >= self._weights else "operand"
                        self._note(f"{who} {name}")
            for bit, name in enumerate(("doorbell answered", "fetched", "report", "interrupt")):
                if device >> bit & 1:
                    self._note(name)
            if counted != beats:
                self._note("beat", ago=BEAT_TO_COUNTER)
                beats = counted


def test_course_of_one_descriptor_in_cycles() -> None:
    """The figures of docs/architecture.md, "Overhead", from the ports of the device with its real core."""
    weights_at, rows, columns = 0x20000, 8, 64
    core = NdpCore(TINY)
    device = NdpDevice(TINY, core)
    m = Module()
    m.submodules.device = device
    timeline = Timeline(m, device, core, weights_at)
    buses = [getattr(device, memory_bus(c)) for c in range(TINY.channels)]
    taps = [AxiTaps(m, bus) for bus in buses]
    bench = Bench(m)
    hdm = Hdm.of(buses, taps, TINY, latency=(1, 1))
    ring = Ring(Mmio(device.s_io), hdm, 0, base=0x10000, limit=0x40000, submission_base=0x10000, result_base=0x18000)
    rng = np.random.default_rng(1)
    w = rng.integers(-4, 5, (rows, columns)).astype(np.float16)
    x = rng.integers(-4, 5, (1, columns)).astype(np.float16)

    async def sink(ctx: Any) -> None:
        ctx.set(device.msix.ready, 1)

    async def host(ctx: Any) -> None:
        await ring.set_up(ctx, interrupt=True)
        await ring.put(ctx, "DOORBELL", 0)
        await ctx.tick().repeat(30)
        hdm.write(weights_at, pack_operand(w, TINY))
        hdm.write(ring.submission_slot(0) + TINY.stripe_bytes, gpu_operand_bytes(x, TINY))
        number = ring.post(
            Descriptor(
                op=Op.GEMV,
                device_address=weights_at,
                device_bytes=pack_geometry(TINY, rows, columns).packed_bytes,
                device_rows=rows,
                device_columns=columns,
                gpu_bytes=x.nbytes,
                gpu_rows=1,
                gpu_columns=columns,
            )
        )
        timeline.on = True
        await ring.mmio.write(ctx, queue_offset(0, "DOORBELL"), 1)
        completion = await ring.wait(ctx, number, 500)
        assert completion.status == Status.OK
        while "interrupt" not in timeline.first:
            await ctx.tick()

    bench.run(host, background=[*hdm.background, timeline.run, sink], max_cycles=1000)
    y = np.frombuffer(hdm.read(ring.result_slot(0) + 64, 2 * rows), np.float16)
    # Small integers: every order of summation gives the same, exact value.
    assert np.array_equal(y, (x.astype(np.int64) @ w.astype(np.int64).T)[0].astype(np.float16))
    first, last = timeline.first, timeline.last
    steps = {
        "doorbell write answered -> slot read": first["queue ar"] - first["doorbell answered"],
        "slot line -> descriptor in the core": first["fetched"] - first["queue r"],
        "descriptor in the core -> operand read": first["operand ar"] - first["fetched"],
        "descriptor in the core -> weights read": first["weights ar"] - first["fetched"],
        "first word of memory -> first beat": first["beat"] - first["core r"],
        "last beat -> last result line": last["core aw"] - last["beat"],
        "last acknowledgement -> report": first["report"] - last["core b"],
        "report -> completion line": first["queue aw"] - first["report"],
        "completion acknowledged -> interrupt": first["interrupt"] - first["queue b"],
    }
    assert steps.keys() == DOCUMENTED.keys()
    slower = {step: (cycles, DOCUMENTED[step]) for step, cycles in steps.items() if cycles > DOCUMENTED[step]}
    assert not slower, "cycles measured, and those that docs/architecture.md promises"
    assert all(cycles > 0 for cycles in steps.values())


def test_documented_cycles_stand_in_the_architecture_page(repository: Path) -> None:
    page = (repository / "docs" / "architecture.md").read_text()
    for step, cycles in DOCUMENTED.items():
        assert f"| {step} | {cycles} |" in page, step
