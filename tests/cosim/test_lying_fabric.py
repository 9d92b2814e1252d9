"""Stores and doorbells that come in any order, late, twice or never: each descriptor runs once, in order."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from plora.hw.cosim.device import ResponseOrder, RtlDevice
from plora.hw.defs.config import NdpConfig, preset
from plora.hw.defs.descriptor import Descriptor, Op
from plora.hw.defs.packing import pack_geometry
from plora.hw.defs.registers import QUEUE_BASE, QUEUE_STRIDE, global_offset, queue_offset
from plora.sim.functional.layout import pack_operand
from plora.sim.golden.numerics import golden_gemm
from plora.sw.queue_pair import Request, Ticket
from plora.sw.session import open_session
from plora.sw.tiling import SlotSizes

CONFIG = preset("tiny")
HALF = 1 << 19
ROWS, COLUMNS, BATCH = 5, 70, 2
WEIGHTS = np.random.default_rng(3).standard_normal((ROWS, COLUMNS)).astype(np.float16)


class LyingPort:
    """Passes everything on, but doorbells: those come late, several times, at the wrong queue, or never.

    Stores go on as the simulated host sends them: line by line, held back, in random order until a fence.
    """

    def __init__(self, device: RtlDevice, seed: int) -> None:
        self._device = device
        self._rng = random.Random(seed)
        self._late: list[tuple[int, int]] = []
        self.config: NdpConfig = device.config
        self.hdm_read, self.hdm_fence, self.mmio_read = device.hdm_read, device.hdm_fence, device.mmio_read
        self.rung = self.dropped = 0

    def hdm_write(self, address: int, data: bytes) -> None:
        self._device.hdm_write(address, data)
        self._some_late_ones()

    def mmio_write(self, offset: int, value: int) -> None:
        if (offset - QUEUE_BASE) % QUEUE_STRIDE != queue_offset(0, "DOORBELL") - QUEUE_BASE:
            self._device.mmio_write(offset, value)
            return
        times = self._rng.choice([0, 1, 1, 2, 5])
        self.dropped += times == 0
        for _ in range(times):
            queue = self._rng.randrange(CONFIG.queues + 1)  # one that is not there, too
            ring = (queue_offset(queue, "DOORBELL") if self._rng.random() < 0.2 else offset, self._rng.getrandbits(32))
            if self._rng.random() < 0.5:
                self._late.append(ring)
            else:
                self._ring(*ring)

    def wait(self, cycles: int) -> None:
        self._some_late_ones()
        self._device.wait(cycles)

    def _some_late_ones(self) -> None:
        while self._late and self._rng.random() < 0.4:
            self._ring(*self._late.pop(self._rng.randrange(len(self._late))))

    def _ring(self, offset: int, value: int) -> None:
        self.rung += 1
        self._device.mmio_write(offset, value)


def request(address: int, rng: np.random.Generator, chain: int) -> Request:
    d = Descriptor(
        op=Op.GEMM,
        device_address=address,
        device_bytes=pack_geometry(CONFIG, ROWS, COLUMNS).packed_bytes,
        device_rows=ROWS,
        device_columns=COLUMNS,
        gpu_bytes=BATCH * 2 * COLUMNS,
        gpu_rows=BATCH,
        gpu_columns=COLUMNS,
    )
    return Request(replace(d, chain=chain), rng.standard_normal((BATCH, COLUMNS)).astype(np.float16))


def right(ticket: Ticket) -> bool:
    ticket.check()
    assert ticket.request.operand is not None
    expected = golden_gemm(ticket.request.operand, WEIGHTS, CONFIG.accumulator).values
    return np.array_equal(np.asarray(ticket.result).view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("poll_interval", [4, 1 << 20], ids=["polls", "hints only"])
@pytest.mark.parametrize("seed", range(5))
def test_each_descriptor_runs_once_in_order_with_its_own_data(seed: int, poll_interval: int) -> None:
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    manners: dict[str, Any] = {
        "stall": rng.choice([0.0, 0.3]),
        "latency_jitter_cycles": rng.choice([0, 30]),
        "response_order": rng.choice(list(ResponseOrder)),
        "host_delay_cycles": rng.choice([10, 300]),
    }
    with RtlDevice(CONFIG, dram_bytes=2 * HALF, seed=seed, host_reorder=True, **manners) as device:
        # What lies in the slots before looks like NaN operands and like anything but a valid word.
        device.memory[:] = 0xFF
        port = LyingPort(device, seed)
        sessions = [
            open_session(port, memory_bytes=HALF, base=q * HALF, queue=q, pasid=q + 1, depth=5, slots=SlotSizes(12, 12))
            for q in range(CONFIG.queues)
        ]
        port.mmio_write(global_offset("POLL_INTERVAL"), poll_interval)
        addresses = []
        for session in sessions:
            packed = pack_operand(WEIGHTS, CONFIG)
            addresses.append(session.allocator.allocate(len(packed), "weights").address)
            session.driver.load(addresses[-1], packed)
            session.driver.clear_counters()
        tickets: list[list[Ticket]] = [[] for _ in sessions]
        for _ in range(12):
            for session, address, mine in zip(sessions, addresses, tickets, strict=True):
                length = rng.choice([1, 1, 2, 3])
                mine += session.queue.submit([request(address, numbers, int(i < length - 1)) for i in range(length)])
        for session in sessions:
            session.queue.drain()
        device.wait(2000)
        total = sum(len(mine) for mine in tickets)
        assert device.mmio_read(global_offset("DESCRIPTORS")) == total
        assert device.mmio_read(global_offset("ERRORS")) == 0
        for queue, mine in enumerate(tickets):
            assert all(right(ticket) for ticket in mine)
            for name in ("SQ_HEAD", "CQ_TAIL"):
                assert device.mmio_read(queue_offset(queue, name)) == len(mine), name
            assert device.mmio_read(queue_offset(queue, "QERRORS")) == 0
        assert port.rung > total // 2 and port.dropped
