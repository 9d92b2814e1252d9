"""Memory that loses its answers, or gives them late: a status, no hang, nothing wrong, and the device goes on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from plora.hw.cosim.device import AccessError, ResponseOrder, RtlDevice
from plora.hw.defs.config import preset
from plora.hw.defs.queue import RESULT_OFFSET, operand_offset
from plora.hw.defs.registers import global_offset, queue_offset
from plora.hw.defs.status import Status
from plora.hw.rtl.front.links import CORE, HOST, QUEUES
from plora.sim.functional.layout import pack_operand
from plora.sim.golden.numerics import golden_gemm
from plora.sw.driver import DeviceError
from plora.sw.queue_pair import Request, Ticket
from plora.sw.session import Session, open_session
from plora.sw.tiling import SlotSizes, product_descriptor

CONFIG = preset("tiny")
PERIOD = 2000
ROWS, COLUMNS = 40, 70
WEIGHTS = np.random.default_rng(1).standard_normal((ROWS, COLUMNS)).astype(np.float16)


class Bench:
    def __init__(self, device: RtlDevice) -> None:
        self.device = device
        self.session: Session = open_session(
            device, memory_bytes=1 << 20, depth=4, slots=SlotSizes(12, 12), timeout_cycles=40_000
        )
        self.session.driver.write_register(global_offset("WATCHDOG"), PERIOD)
        packed = pack_operand(WEIGHTS, CONFIG)
        self.weights = self.session.allocator.allocate(len(packed), "weights").address
        self.session.driver.load(self.weights, packed)
        self.rng = np.random.default_rng(2)
        self.submitted = 0

    def request(self) -> Request:
        d = product_descriptor(CONFIG, self.weights, ROWS, COLUMNS, 3)
        return Request(d, self.rng.standard_normal((3, COLUMNS)).astype(np.float16))

    def submit(self) -> Ticket:
        self.submitted += 1
        return self.session.queue.submit([self.request()])[0]

    def slot(self, ahead: int = 0) -> tuple[int, int]:
        """Addresses of the submission slot and the result slot to be used next."""
        place, slot = self.session.queue.place, (self.submitted + ahead) % 4
        return (
            place.submission_base + (slot << place.submission_slot_log2),
            place.result_base + (slot << place.result_slot_log2),
        )

    def right(self, ticket: Ticket) -> bool:
        ticket.check()
        assert ticket.request.operand is not None and ticket.result is not None
        expected = golden_gemm(ticket.request.operand, WEIGHTS, CONFIG.accumulator).values
        return np.array_equal(np.asarray(ticket.result).view(np.uint16), expected.view(np.uint16))

    def trips(self) -> int:
        return self.session.driver.read_register(global_offset("WATCHDOG_TRIPS"))

    def works(self) -> None:
        for _ in range(6):
            ticket = self.submit()
            self.session.queue.drain()
            assert self.right(ticket)


@pytest.fixture
def bench() -> Iterator[Bench]:
    # In the order of requests, one late answer would keep everybody's waiting.
    with RtlDevice(
        CONFIG,
        dram_bytes=1 << 20,
        stall=0.1,
        latency_jitter_cycles=10,
        response_order=ResponseOrder.BURSTS,
        seed=5,
    ) as device:
        yield Bench(device)


@pytest.mark.parametrize("late_cycles", [0, 5 * PERIOD], ids=["lost", "late"])
@pytest.mark.parametrize("what", ["operand", "weights", "one word of weights", "result"])
def test_a_descriptor_whose_answer_is_lost_or_late_gets_memory_error(bench: Bench, what: str, late_cycles: int) -> None:
    submission, result = bench.slot()
    place = {
        "operand": (submission + operand_offset(CONFIG), 64),
        "weights": (bench.weights, 4096),
        "one word of weights": (bench.weights + 256, 64),
        "result": (result + RESULT_OFFSET + 128, 64),
    }[what]
    bench.device.silence(*place, [CORE], late_cycles)
    ticket = bench.submit()
    bench.session.queue.drain()
    assert ticket.status == Status.MEMORY_ERROR
    assert bench.trips() >= 1
    # The late answers fall among those of the next descriptors.
    bench.device.clear_errors()
    bench.works()


def test_a_lost_slot_read_uses_up_the_slot_and_the_queue_recovers_by_a_reset(bench: Bench) -> None:
    submission, _ = bench.slot()
    bench.device.silence(submission, 64, [QUEUES])
    bench.submit()
    # The completion echoes a descriptor that is not the one submitted: the driver says so.
    with pytest.raises(DeviceError, match="completed another descriptor"):
        bench.session.queue.drain()
    bench.device.clear_errors()
    lost = bench.session.queue.reset()
    assert len(lost) == 1
    bench.submitted = 0
    bench.works()


def test_a_lost_acknowledgement_of_a_completion_line_is_counted_and_the_queue_recovers(bench: Bench) -> None:
    _, result = bench.slot()
    bench.device.silence(result, 64, [QUEUES])
    bench.submit()
    with pytest.raises(DeviceError, match="no completion within"):
        bench.session.queue.drain()
    read = bench.session.driver.read_register
    assert read(queue_offset(0, "QERRORS")) == 1 and read(queue_offset(0, "CQ_TAIL")) == 1
    bench.device.clear_errors()
    assert len(bench.session.queue.reset()) == 1
    bench.submitted = 0
    bench.works()


def test_a_lost_answer_to_the_host_is_an_error_response_not_a_hang(bench: Bench) -> None:
    bench.device.silence(0xF0000, 128, [HOST])
    with pytest.raises(AccessError):
        bench.device.hdm_read(0xF0000, 128)
    bench.device.hdm_write(0xF0040, bytes(64))
    with pytest.raises(AccessError):
        bench.device.hdm_fence()
    bench.device.clear_errors()
    bench.device.hdm_write(0xF0000, b"\x5a" * 128)
    assert bench.device.hdm_read(0xF0000, 128) == b"\x5a" * 128
    bench.works()


def test_other_queues_go_on_while_one_waits_for_a_lost_answer(bench: Bench) -> None:
    """The lost answer is the slot read of a queue: only its own requester of one channel is affected."""
    bench.device.silence(bench.weights, 4096, [CORE])
    ticket = bench.submit()
    before = bench.device.cycles
    data = bench.device.hdm_read(0x80000, 4096)
    assert len(data) == 4096 and bench.device.cycles - before < PERIOD
    bench.session.queue.drain()
    assert ticket.status == Status.MEMORY_ERROR


def test_a_watchdog_that_is_off_waits_for_ever(bench: Bench) -> None:
    bench.session.driver.write_register(global_offset("WATCHDOG"), 0)
    bench.device.silence(bench.weights, 4096, [CORE])
    bench.submit()
    with pytest.raises(DeviceError, match="no completion within"):
        bench.session.queue.drain()
    assert bench.trips() == 0
    # Switched on, it ends the wait after all.
    bench.session.driver.write_register(global_offset("WATCHDOG"), PERIOD)
    bench.session.queue._progress.waited_cycles = 0
    (ticket,) = bench.session.queue.drain()
    assert ticket.status == Status.MEMORY_ERROR
