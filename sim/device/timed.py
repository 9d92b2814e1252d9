"""The timed device: a device port whose results are exact and whose times are the cycle model's."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf

from plora.hw.defs.config import WORD_BYTES, NdpConfig
from plora.hw.defs.descriptor import Descriptor
from plora.hw.defs.errors import UserError
from plora.hw.defs.legality import RingSetup
from plora.hw.defs.queue import (
    LINE_BYTES,
    PASS_BITS,
    RESULT_OFFSET,
    VALID_OFFSET,
    VALID_TAG,
    operand_offset,
    valid_word,
)
from plora.hw.defs.registers import QUEUE_BASE, global_offset, queue_offset
from plora.hw.defs.status import Status
from plora.sim.core.constants import load_constants
from plora.sim.core.demand import Demand, demands, shapes_of
from plora.sim.core.memory import MemoryTiming
from plora.sim.device.kernel import DeviceKernel, Unresolved
from plora.sim.device.link import BusPath, HostPath
from plora.sim.device.predict import ring_place
from plora.sim.functional.core import Outcome
from plora.sim.functional.device import FunctionalDevice

_ENABLE = 1
_WEIGHT_MASK = 0xFF


@dataclass
class _UnderWay:
    """A descriptor between its reading and its completion line."""

    queue: int
    opened: _Open
    descriptor: Descriptor
    outcome: Outcome
    result_slot: int
    valid: int


@dataclass
class _Open:
    """An enabled queue: its rings, and how far the device has read."""

    setup: RingSetup
    first_pass: int
    fetched: int = 0


@lru_cache(maxsize=4096)
def _template(config: NdpConfig, d: Descriptor) -> Demand:
    """The demand of ``d`` with its GPU operand and result at DPA 0."""
    return next(iter(demands(config, shapes_of(config, [d])).rows()))


class TimedDevice(FunctionalDevice):
    """A `plora.hw.defs.port.DevicePort` that computes exactly, and takes the cycles that the RTL would.

    Time is that of the device's clock from reset. It passes in `wait`, in `hdm_read`, `hdm_fence` and register
    accesses as on the RTL's test bench, and not in `hdm_write`: stores are on their way until a fence, a load of
    their line, or enough time. A descriptor's values are computed when the device has read it; its completion line
    is in memory in the cycle that the model says.

    Parameters:
        config, memory_bytes, fill: see `FunctionalDevice`.
        timing: the memory behind its channels.
        path: how the host's lines reach it; a `LinkPort`, or by default the test bench's bus.

    Raises:
        UserError: there is no C++ compiler, or see `FunctionalDevice`.
    """

    def __init__(
        self,
        config: NdpConfig,
        timing: MemoryTiming | None = None,
        memory_bytes: int | None = None,
        *,
        path: HostPath | None = None,
        fill: int = 0,
    ) -> None:
        super().__init__(config, memory_bytes, fill=fill)
        self._c = load_constants()
        self._kernel = DeviceKernel(
            config,
            timing or MemoryTiming(),
            poll_interval_cycles=self._globals["POLL_INTERVAL"],
            chain_timeout_cycles=self._globals["CHAIN_TIMEOUT"],
        )
        self._path: HostPath = path or BusPath()
        self._now = 0.0
        self._zero = 0.0
        """Cycle at which the counters were cleared."""
        self._stores: deque[tuple[float, int, bytes]] = deque()
        """Lines not yet sent: cycle from which they may be, address, bytes."""
        self._departed: float | None = None
        """Cycle in which the first of them leaves the host, once that is settled."""
        self._sent: deque[tuple[float, int]] = deque()
        """Lines sent and perhaps not acknowledged: cycle of the acknowledgement, line."""
        self._open: dict[int, _Open] = {}
        self._under_way: dict[int, _UnderWay] = {}
        self._tags = 0
        self._finishing: list[tuple[float, int, float]] = []
        """A heap of completions to come: cycle, tag, first to last beat."""

    # --- the port ---------------------------------------------------------------------------

    @property
    def cycles(self) -> int:
        """Cycles since reset."""
        return int(self._now)

    def hdm_write(self, address: int, data: bytes) -> None:
        """Store ``data`` (posted). Raises UserError beyond memory."""
        if address < 0 or address + len(data) > self.memory.size_bytes:
            raise UserError(
                f"HDM write of {len(data)} bytes at {address:#x}: memory has {self.memory.size_bytes} bytes"
            )
        while data:
            size = min(len(data), LINE_BYTES - address % LINE_BYTES)
            self._stores.append((self._now, address, bytes(data[:size])))
            address, data = address + size, data[size:]

    def hdm_read(self, address: int, size_bytes: int) -> bytes:
        """Load ``size_bytes`` bytes. Raises UserError beyond memory."""
        if size_bytes > 0:
            first, last = address // LINE_BYTES, (address + size_bytes - 1) // LINE_BYTES
            self._await_stores(first, last)
            done = self._now
            for line in range(first, last + 1):
                departed = self._path.depart(self._now, store=False)
                at_channel = self._path.reach(departed, store=False)
                self._follow(at_channel)
                done = self._path.answer(self._kernel.load_line(line, at_channel), store=False)
            self._pass(done + 1)
        return super().hdm_read(address, size_bytes)

    def hdm_fence(self) -> None:
        """Return once every earlier HDM write is acknowledged."""
        self._await_stores(0, self.memory.size_bytes)

    def _await_stores(self, first: int, last: int) -> None:
        """Wait for the acknowledgement of every earlier store to lines ``first`` ... ``last``."""
        while any(first <= address // LINE_BYTES <= last for _, address, _ in self._stores):
            self._send_store()
        acknowledged = max((cycle for cycle, line in self._sent if first <= line <= last), default=0.0)
        if acknowledged >= self._now:
            self._pass(acknowledged + 1)

    def mmio_write(self, offset: int, value: int) -> None:
        """Write a 32-bit register."""
        c = self._c
        commands = [queue_offset(q, name) for q in range(self.config.queues) for name in ("CTRL", "CQ_HEAD")]
        self._pass(self._now + (c.command_write if offset in commands else c.register_write))
        super().mmio_write(offset, value)

    def mmio_read(self, offset: int) -> int:
        """Read a 32-bit register."""
        self._pass(self._now + self._c.register_read)
        return super().mmio_read(offset)

    def wait(self, cycles: int) -> None:
        """Let the device run for ``cycles`` cycles."""
        self._pass(self._now + max(0, cycles))

    # --- time -------------------------------------------------------------------------------

    def _pass(self, cycle: float) -> None:
        """Let time pass up to ``cycle``."""
        while self._stores and self._next_at_channel() < cycle:
            self._send_store()
        self._follow(cycle - 1)
        self._now = cycle
        self._cycles = int(cycle - self._zero)
        self._expire()
        while self._sent and self._sent[0][0] < cycle:
            self._sent.popleft()

    def _next_at_channel(self) -> float:
        """Cycle in which the oldest waiting line is at its channel."""
        if self._departed is None:
            self._departed = self._path.depart(self._stores[0][0], store=True)
        return self._path.reach(self._departed, store=True)

    def _send_store(self) -> None:
        """Send the oldest waiting line."""
        at_channel = self._next_at_channel()
        self._departed = None
        _, address, data = self._stores.popleft()
        self._follow(at_channel)
        stored = self._kernel.store_line(address // LINE_BYTES, at_channel)
        self._sent.append((self._path.answer(stored, store=True), address // LINE_BYTES))
        self._host_write(address, data)
        self._notice(address, stored)

    def _follow(self, cycle: float) -> None:
        """Let the device go on up to cycle ``cycle``."""
        while isinstance(wanted := self._kernel.advance(cycle), Unresolved):
            self._fetch(wanted)
        for row in self._kernel.completions():
            ran = row["last_beat"] - row["first_beat"] + 1 if row["first_beat"] < inf else 0.0
            heapq.heappush(self._finishing, (float(row["completed"]), int(row["tag"]), float(ran)))
        while self._finishing and self._finishing[0][0] <= cycle:
            _, tag, cycles = heapq.heappop(self._finishing)
            self._finish(self._under_way.pop(tag), cycles)

    # --- queues -----------------------------------------------------------------------------

    def _notice(self, address: int, cycle: float) -> None:
        """A line will have changed by ``cycle``: it may hold a descriptor that the device finds from then on."""
        for index, queue in self._open.items():
            setup = queue.setup
            offset = address - setup.submission_base
            slot, within = offset >> setup.submission_slot_log2, offset & (1 << setup.submission_slot_log2) - 1
            if 0 <= slot < setup.depth and within < LINE_BYTES:
                self._publish(index, queue, slot, cycle)

    def _publish(self, index: int, queue: _Open, slot: int, cycle: float) -> None:
        line = self.memory.read(queue.setup.submission_base + (slot << queue.setup.submission_slot_log2), LINE_BYTES)
        word = int.from_bytes(line[VALID_OFFSET:], "little")
        ring_pass = (word - queue.first_pass) % (1 << PASS_BITS)
        number = ring_pass * queue.setup.depth + slot
        if word >> PASS_BITS == VALID_TAG and queue.fetched <= number < queue.fetched + 2 * queue.setup.depth:
            self._kernel.publish_unresolved(index, number, published=cycle, tag=self._tags)
            self._tags += 1

    def _control(self, index: int, value: int) -> None:
        queue = self._queues[index]
        was = queue.enabled
        if not was and value & _ENABLE and index in self._open and self._kernel.busy(index):
            queue.errors += 1
            value &= ~_ENABLE
        super()._control(index, value)
        if queue.enabled and not was:
            setup = queue.setup
            opened = self._open[index] = _Open(setup, queue.registers["PASS"])
            weight = max(1, queue.registers["WEIGHT"] & _WEIGHT_MASK)
            self._kernel.enable(index, ring_place(setup, weight=weight, interrupts=bool(value & ~_ENABLE)), self._now)
            for slot in range(setup.depth):
                self._publish(index, opened, slot, 0.0)
        elif was and not queue.enabled:
            self._kernel.disable(index)
            leaving = {tag for _, tag, _ in self._finishing}
            self._under_way = {tag: job for tag, job in self._under_way.items() if job.queue != index or tag in leaving}

    def _write_queue(self, index: int, offset: int, value: int) -> None:
        before = self._queues[index].taken if index < len(self._queues) else 0
        super()._write_queue(index, offset, value)
        if index >= len(self._queues) or not self._queues[index].enabled:
            return
        c = self._c
        if offset == queue_offset(0, "DOORBELL") - QUEUE_BASE:
            self._kernel.ring_doorbell(index, self._now - c.register_write + c.doorbell)
        elif offset == queue_offset(0, "CQ_HEAD") - QUEUE_BASE and self._queues[index].taken != before:
            self._kernel.take(index, self._queues[index].taken, self._now - c.command_write + c.command)

    def _read_queue(self, index: int, offset: int) -> int:
        value = super()._read_queue(index, offset)
        if index < len(self._queues):
            if offset == queue_offset(0, "SQ_HEAD") - QUEUE_BASE and index in self._open:
                return self._open[index].fetched & 0xFFFF
            if offset == queue_offset(0, "QSTATUS") - QUEUE_BASE:
                busy = index in self._open and self._kernel.busy(index)
                return int(self._queues[index].enabled) | 2 * busy
        return value

    def _apply_mmio(self, offset: int, value: int) -> None:
        super()._apply_mmio(offset, value)
        if offset in (global_offset(name) for name in ("POLL_INTERVAL", "CHAIN_TIMEOUT", "SHARE")):
            self._kernel.set_registers(
                poll_interval_cycles=self._globals["POLL_INTERVAL"],
                chain_timeout_cycles=self._globals["CHAIN_TIMEOUT"],
                share=self._globals["SHARE"],
            )

    def _shift_time(self) -> None:
        self._zero = self._now
        self._cycles = 0

    def _work(self) -> None:
        """Nothing: work is done as time passes."""

    def _fetch(self, wanted: Unresolved) -> None:
        """The device reads a descriptor: compute what it does, and say what it demands."""
        queue, opened = self._queues[wanted.queue], self._open[wanted.queue]
        setup = opened.setup
        ring_pass, slot = divmod(wanted.number, setup.depth)
        submission_slot = setup.submission_base + (slot << setup.submission_slot_log2)
        result_slot = setup.result_base + (slot << setup.result_slot_log2)
        if wanted.broken:
            queue.fault = Status.CHAIN_BROKEN
            self._chain_queue = None
        line = self.memory.read(submission_slot, LINE_BYTES)
        d, outcome = self._execute(wanted.queue, line, submission_slot, result_slot)
        demand = None
        if outcome.status is Status.OK:
            stripe = self.config.stripe_bytes
            demand = _template(self.config, replace(d, device_address=0))._replace(
                operand_stripe=(submission_slot + operand_offset(self.config)) // stripe,
                device_stripe=d.device_address // stripe,
                result_line=(result_slot + RESULT_OFFSET) // WORD_BYTES,
            )
        opened.fetched = wanted.number + 1
        valid = valid_word(opened.first_pass + ring_pass)
        self._under_way[wanted.tag] = _UnderWay(wanted.queue, opened, d, outcome, result_slot, valid)
        self._kernel.resolve(wanted, demand, chain=self._chain_queue == wanted.queue)

    def _finish(self, done: _UnderWay, cycles: float) -> None:
        """A completion line is in memory."""
        if self._open[done.queue] is not done.opened:
            return  # the queue was enabled again meanwhile; its counts are not those of this descriptor
        timed = replace(done.outcome, cycles=round(cycles))
        self._complete(done.queue, done.descriptor, timed, done.result_slot, done.valid)
        self._counters["BEATS"] += done.outcome.cycles - timed.cycles


__all__ = ["TimedDevice"]
