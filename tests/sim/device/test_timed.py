"""The timed device: the functional device's bytes, in time."""

from __future__ import annotations

import numpy as np
import pytest

from plora.hw.defs.config import preset
from plora.hw.defs.descriptor import Descriptor, Keep
from plora.hw.defs.errors import UserError
from plora.hw.defs.packing import pack_geometry
from plora.hw.defs.queue import LINE_BYTES, Completion
from plora.hw.defs.registers import queue_offset
from plora.hw.defs.status import Status
from plora.sim.core.memory import MemoryTiming
from plora.sim.device.link import LinkPort
from plora.sim.device.timed import TimedDevice
from plora.sim.functional.device import FunctionalDevice
from plora.sim.functional.layout import pack_operand
from plora.sim.hardware.link import load_link
from plora.sw.matrix import multiply, multiply_twice, store_matrix
from plora.sw.queue_pair import Request
from plora.sw.session import Session, open_session
from plora.sw.tiling import SlotSizes

TINY = preset("tiny")
MEMORY_BYTES = 1 << 20
SLOTS = SlotSizes(12, 12)


def matrix(rows: int, columns: int, seed: int) -> np.ndarray[tuple[int, int], np.dtype[np.float16]]:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float16)


def session_of(device: FunctionalDevice, queue: int = 0, base: int = 0, size: int = MEMORY_BYTES) -> Session:
    return open_session(device, memory_bytes=size, base=base, queue=queue, pasid=queue + 1, depth=6, slots=SLOTS)


def masked(memory: bytes) -> bytes:
    """Memory without the ``cycles`` of completion lines: those differ by design."""
    words = bytearray(memory)
    for start in range(0, len(words), LINE_BYTES):
        if words[start + LINE_BYTES - 1] == 0x5C and words[start + 8 : start + 12] != b"\0\0\0\0":
            words[start + 8 : start + 12] = b"\0\0\0\0"
    return bytes(words)


def test_the_same_driver_leaves_the_same_bytes_as_on_the_functional_device() -> None:
    memories = []
    for make in (FunctionalDevice, TimedDevice):
        device = make(TINY, memory_bytes=MEMORY_BYTES, fill=0xFF)
        session = session_of(device)
        a = store_matrix(session.driver, session.allocator, matrix(16, 300, 1), "A")
        b = store_matrix(session.driver, session.allocator, matrix(90, 16, 2), "B")
        products = [
            multiply(session.queue, a, matrix(3, 300, 3)).y,
            multiply_twice(session.queue, a, b, matrix(9, 300, 4)).y,
        ]
        session.queue.close()
        device.hdm_fence()
        memories.append((products, masked(device.memory.read(0, MEMORY_BYTES))))
    for functional, timed in zip(memories[0][0], memories[1][0], strict=True):
        assert np.array_equal(functional.view(np.uint16), timed.view(np.uint16))
    assert memories[0][1] == memories[1][1]


def test_time_passes_as_the_host_waits_and_not_while_it_stores() -> None:
    device = TimedDevice(TINY, memory_bytes=MEMORY_BYTES)
    device.hdm_write(0, bytes(640))
    assert device.cycles == 0
    device.hdm_fence()
    after_fence = device.cycles
    # Ten lines, one a cycle, then to memory and back.
    assert 20 + 10 < after_fence < 20 + 10 + 15
    device.wait(1000)
    assert device.cycles == after_fence + 1000
    assert device.hdm_read(0, 64) == bytes(64)
    assert 40 < device.cycles - after_fence - 1000 < 55


def test_a_slower_memory_takes_longer_and_gives_the_same_result() -> None:
    def run(timing: MemoryTiming) -> tuple[int, int, bytes]:
        device = TimedDevice(TINY, timing, MEMORY_BYTES)
        session = session_of(device)
        a = store_matrix(session.driver, session.allocator, matrix(30, 700, 1), "A")
        start = device.cycles
        product = multiply(session.queue, a, matrix(2, 700, 3))
        return device.cycles - start, product.cycles, product.y.tobytes()

    fast, slow = run(MemoryTiming(20, 10)), run(MemoryTiming(200, 100, 0.2))
    assert fast[2] == slow[2]
    assert slow[0] > fast[0] + 400
    assert slow[1] > fast[1]


def test_a_link_adds_its_latency_to_every_step() -> None:
    def run(path: LinkPort | None) -> int:
        device = TimedDevice(TINY, memory_bytes=MEMORY_BYTES, path=path)
        session = session_of(device)
        a = store_matrix(session.driver, session.allocator, matrix(4, 64, 1), "A")
        start = device.cycles
        multiply(session.queue, a, matrix(1, 64, 3))
        return device.cycles - start

    over_the_link = run(LinkPort(load_link("cxl3.1-x16"), TINY))
    # Operand and fence, descriptor, polling, result: several round trips of 400 ns.
    assert over_the_link > run(None) + 2 * 400


def submit(session: Session, *requests: Request) -> list[Completion]:
    tickets = session.queue.submit(requests)
    session.queue.drain()
    return [ticket.completion for ticket in tickets if ticket.completion is not None]


def request(session: Session, n: int = 4, k: int = 40, **changes: int) -> Request:
    geometry = pack_geometry(TINY, n, k)
    region = session.allocator.allocate(geometry.packed_bytes, "W")
    session.driver.load(region.address, pack_operand(matrix(n, k, 5), TINY))
    fields = {
        "op": 1,
        "device_rows": n,
        "device_columns": k,
        "gpu_rows": 1,
        "gpu_columns": k,
        "gpu_bytes": 2 * k,
        "device_bytes": geometry.packed_bytes,
        "device_address": region.address,
    }
    return Request(Descriptor(**{**fields, **changes}), matrix(1, k, 6))


def test_refused_descriptors_get_their_status_and_the_next_runs() -> None:
    session = session_of(TimedDevice(TINY, memory_bytes=MEMORY_BYTES))
    bad, good = request(session, gpu_bytes=3), request(session)
    first, second = submit(session, bad, good)
    assert (first.status, second.status) == (Status.SIZE_MISMATCH, Status.OK)
    assert first.cycles == 0 < second.cycles


def test_a_chain_aborts_after_its_first_fault() -> None:
    session = session_of(TimedDevice(TINY, memory_bytes=MEMORY_BYTES))
    bad = request(session, chain=1, keep=Keep.NEW, gpu_bytes=3)
    assert [c.status for c in submit(session, bad, request(session))] == [Status.SIZE_MISMATCH, Status.CHAIN_ABORTED]


def test_a_chain_that_never_goes_on_is_closed_in_time() -> None:
    device = TimedDevice(TINY, memory_bytes=MEMORY_BYTES)
    driver_session = session_of(device)
    driver_session.driver.write_register(0x018, 500)  # CHAIN_TIMEOUT
    head = request(driver_session, chain=1, keep=Keep.NEW)
    tickets = driver_session.queue._publish([head])
    device.wait(3000)
    assert [ticket.completion.status for ticket in driver_session.queue.poll() if ticket.completion] == [Status.OK]
    assert tickets[0].completion is not None
    (late,) = submit(driver_session, request(driver_session))
    assert late.status == Status.CHAIN_BROKEN


def test_two_queues_work_side_by_side() -> None:
    device = TimedDevice(TINY, memory_bytes=MEMORY_BYTES)
    half = MEMORY_BYTES // 2
    sessions = [session_of(device, queue, queue * half, half) for queue in range(2)]
    tickets = [session.queue.submit([request(session) for _ in range(3)]) for session in sessions]
    for session in sessions:
        session.queue.drain()
    for own in tickets:
        assert [ticket.completion.status for ticket in own if ticket.completion] == [Status.OK] * 3


def test_a_queue_can_be_reset_with_work_under_way() -> None:
    device = TimedDevice(TINY, memory_bytes=MEMORY_BYTES)
    session = session_of(device)
    session.queue.submit([request(session, 30, 900) for _ in range(4)])
    device.wait(150)
    lost = session.queue.reset()
    assert lost
    assert [c.status for c in submit(session, *lost)] == [Status.OK] * len(lost)


def test_registers_read_as_on_the_functional_device() -> None:
    devices = [FunctionalDevice(TINY, MEMORY_BYTES), TimedDevice(TINY, memory_bytes=MEMORY_BYTES)]
    values = []
    for device in devices:
        session = session_of(device)
        submit(session, request(session), request(session))
        counters = session.driver.counters()
        names = ("BEATS", "WORDS_READ", "WORDS_WRITTEN", "DESCRIPTORS", "ERRORS")
        heads = [device.mmio_read(queue_offset(0, name)) for name in ("SQ_HEAD", "CQ_TAIL", "CQ_HEAD", "QERRORS")]
        values.append(([counters[name] for name in names], heads))
        assert counters["SPAN"] >= counters["BEATS"]
    assert values[0] == values[1]


def test_memory_beyond_the_device_is_refused() -> None:
    device = TimedDevice(TINY, memory_bytes=MEMORY_BYTES)
    with pytest.raises(UserError, match="HDM write"):
        device.hdm_write(MEMORY_BYTES - 1, b"ab")
    with pytest.raises(UserError, match="HDM read"):
        device.hdm_read(MEMORY_BYTES, 64)
