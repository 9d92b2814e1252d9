"""What one descriptor costs beside its work, measured on the RTL: cycles before and after, bytes on the link."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from plora.hw.defs.config import NdpConfig
from plora.hw.defs.registers import global_offset, queue_offset
from plora.sim.functional.layout import pack_operand
from plora.sw.driver import DeviceError, LinkTraffic
from plora.sw.queue_pair import Request
from plora.sw.session import open_session
from plora.sw.tiling import product_descriptor

if TYPE_CHECKING:
    from plora.hw.cosim.device import RtlDevice

SHAPES = ((8, 64, 1), (32, 256, 1), (64, 1024, 1), (32, 256, 2))
"""N, K and B of the descriptors, which every preset takes."""

LATENCIES = ((40, 20), (140, 20), (40, 120))
"""Read and write latency of the three runs: the first is what is stated, the others say how often each counts."""

DESCRIPTORS = 8
"""One after the other, for the bytes; the last of them is timed."""

_CORE, _QUEUES = 0, 2


@dataclass(frozen=True)
class Times:
    """Cycles of one descriptor on an idle device, its line 0 and operand in memory before the doorbell."""

    doorbell_to_first_word: int
    """From the answer to the doorbell to the first word that memory gives the core."""
    first_to_last_word: int
    last_word_to_completion: int
    """From the last word that memory gives the core to the completion line being in memory."""
    result_to_completion: int
    """Of these, from the last result line being in memory."""


@dataclass(frozen=True)
class Overhead:
    """One shape's costs."""

    device_rows: int
    device_columns: int
    gpu_rows: int
    times: Times
    read_latencies_before: float
    """How often memory's read latency is in ``doorbell_to_first_word``."""
    write_latencies_after: float
    """How often memory's write latency is in ``last_word_to_completion``."""
    link_bytes: dict[str, float]
    """Bytes over the link for one descriptor, by purpose, with a host that polls."""
    link_bytes_interrupt: dict[str, float]
    """The same with a host that waits for interrupts."""


class _Observed:
    """A device port whose stores are in memory when they return, and which remembers the last doorbell."""

    def __init__(self, device: RtlDevice) -> None:
        self._device = device
        self.config = device.config
        self.hdm_read, self.mmio_read = device.hdm_read, device.mmio_read
        self.hdm_fence, self.wait = device.hdm_fence, device.wait
        self.take_interrupts = device.take_interrupts
        self.rung = 0
        self._news = False

    def hdm_write(self, address: int, data: bytes) -> None:
        self._device.hdm_write(address, data)
        self._device.hdm_fence()
        self._news = True

    def mmio_write(self, offset: int, value: int) -> None:
        # A host that waits long rings again: not that, but the doorbell of a descriptor is meant.
        first = offset == queue_offset(0, "DOORBELL") and self._news
        if first:
            self._device.clear_events()
        self._device.mmio_write(offset, value)
        if first:
            self.rung, self._news = self._device.cycles, False


def _one(
    config: NdpConfig, shape: tuple[int, int, int], latency: tuple[int, int], *, interrupts: bool
) -> tuple[Times, dict[str, float]]:
    from plora.hw.cosim.device import RtlDevice

    rows, columns, batch = shape
    rng = np.random.default_rng(1)
    weights = rng.standard_normal((rows, columns)).astype(np.float16)
    with RtlDevice(
        config, dram_bytes=1 << 24, read_latency_cycles=latency[0], write_latency_cycles=latency[1]
    ) as device:
        port = _Observed(device)
        session = open_session(
            port, memory_bytes=1 << 24, depth=4, take_interrupts=port.take_interrupts if interrupts else None
        )
        packed = pack_operand(weights, config)
        region = session.allocator.allocate(len(packed), "weights")
        session.driver.load(region.address, packed)
        # An idle queue is looked at so rarely that the doorbell decides.
        session.driver.write_register(global_offset("POLL_INTERVAL"), 1 << 20)
        d = product_descriptor(config, region.address, rows, columns, batch)
        operand = rng.standard_normal((batch, columns)).astype(np.float16)
        before = session.driver.traffic.copy()
        for _ in range(DESCRIPTORS):
            # The look that follows a completion must not find the next descriptor: a doorbell is to be timed.
            device.wait(3000)
            session.queue.wait_for(session.queue.submit([Request(d, operand)])[0])
        moved = session.driver.traffic.since(before)
        events = device.events
        first, last = events.first_read_beat[_CORE], events.last_read_beat[_CORE]
        result, completion = events.last_write_committed[_CORE], events.last_write_committed[_QUEUES]
        if not port.rung < first <= last < result < completion:
            raise DeviceError(f"events out of order: {port.rung}, {first}, {last}, {result}, {completion}")
        times = Times(first - port.rung, last - first, completion - last, completion - result)
    return times, {f.name: getattr(moved, f.name) / DESCRIPTORS for f in fields(LinkTraffic)}


def measure_overhead(config: NdpConfig) -> list[Overhead]:
    """Run every shape of `SHAPES` on the RTL of ``config``, which is built where absent.

    Raises:
        UserError: a tool is missing, or the build failed.
    """
    found = []
    base, slow_read, slow_write = LATENCIES
    for shape in SHAPES:
        times, link = _one(config, shape, base, interrupts=False)
        reads, _ = _one(config, shape, slow_read, interrupts=False)
        writes, _ = _one(config, shape, slow_write, interrupts=False)
        _, by_interrupt = _one(config, shape, base, interrupts=True)
        found.append(
            Overhead(
                *shape,
                times,
                (reads.doorbell_to_first_word - times.doorbell_to_first_word) / (slow_read[0] - base[0]),
                (writes.last_word_to_completion - times.last_word_to_completion) / (slow_write[1] - base[1]),
                link,
                by_interrupt,
            )
        )
    return found


def as_dict(config: NdpConfig, found: list[Overhead]) -> dict[str, object]:
    """The measurement as plain data."""
    return {
        "preset": config.name,
        "read_latency_cycles": LATENCIES[0][0],
        "write_latency_cycles": LATENCIES[0][1],
        "descriptors": [asdict(one) for one in found],
    }
