"""The host's end of a queue: order of its writes, wrap, errors, time-outs, recovery, and a device that lies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plora.hw.defs.config import NdpConfig, preset
from plora.hw.defs.descriptor import Descriptor, DType, Keep, Source
from plora.hw.defs.errors import UserError
from plora.hw.defs.legality import ChainState, QueueWindow, check
from plora.hw.defs.queue import Completion, operand_offset, valid_word
from plora.hw.defs.registers import queue_offset
from plora.hw.defs.status import Status
from plora.sim.functional import FunctionalDevice
from plora.sim.functional.layout import Matrix, pack_operand
from plora.sim.golden.numerics import golden_gemm
from plora.sw.driver import DeviceError
from plora.sw.queue_pair import DescriptorError, QueuePair, Request, Ticket
from plora.sw.session import Session, open_session
from plora.sw.tiling import SlotSizes, product_descriptor

CONFIG = preset("tiny")
SLOTS = SlotSizes(12, 12)
N, K = 6, 40
WEIGHTS = np.random.default_rng(0).standard_normal((N, K)).astype(np.float16)


@dataclass(frozen=True)
class Entry:
    """Something the host did at the port."""

    what: str
    place: int = 0
    value: bytes | int = 0


class Stoppable(FunctionalDevice):
    """A device that can stop working and still answers its registers."""

    stopped = False

    def _work(self) -> None:
        if not self.stopped:
            super()._work()


class Spy:
    """A port that writes down what the host does, and lets a test change what it reads."""

    def __init__(self, device: Stoppable) -> None:
        self.device = device
        self.config: NdpConfig = device.config
        self.log: list[Entry] = []
        self.falsify: Callable[[int, bytes], bytes] = lambda _, data: data
        self.on_mmio: Callable[[int, int], None] = lambda *_: None
        self.waited: list[int] = []

    def hdm_write(self, address: int, data: bytes) -> None:
        self.log.append(Entry("write", address, data))
        self.device.hdm_write(address, data)

    def hdm_read(self, address: int, size_bytes: int) -> bytes:
        return self.falsify(address, self.device.hdm_read(address, size_bytes))

    def hdm_fence(self) -> None:
        self.log.append(Entry("fence"))
        self.device.hdm_fence()

    def mmio_write(self, offset: int, value: int) -> None:
        self.log.append(Entry("register", offset, value))
        self.on_mmio(offset, value)
        self.device.mmio_write(offset, value)

    def mmio_read(self, offset: int) -> int:
        return self.device.mmio_read(offset)

    def wait(self, cycles: int) -> None:
        self.waited.append(cycles)
        self.device.wait(cycles)


@dataclass
class Bench:
    port: Spy
    session: Session
    address: int

    @property
    def queue(self) -> QueuePair:
        return self.session.queue

    def request(self, seed: int = 0, **fields: int) -> Request:
        """A legal request, but for ``fields``."""
        operand = np.random.default_rng(seed).standard_normal((2, K)).astype(np.float16)
        d = product_descriptor(CONFIG, self.address, N, K, 2)
        d = replace(d, **fields)
        return Request(d, operand if d.source == Source.SLOT else None)


def bench(depth: int = 4, timeout_cycles: int = 50_000, seed: int | None = None, fill: int = 0) -> Bench:
    port = Spy(Stoppable(CONFIG, 1 << 20, reorder_seed=seed, fill=fill))
    session = open_session(port, memory_bytes=1 << 20, depth=depth, slots=SLOTS, timeout_cycles=timeout_cycles, pasid=5)
    region = session.allocator.allocate(4096, "weights")
    session.driver.load(region.address, pack_operand(WEIGHTS, CONFIG))
    port.log.clear()
    return Bench(port, session, region.address)


def golden(request: Request) -> Matrix:
    assert request.operand is not None
    return golden_gemm(request.operand, WEIGHTS, CONFIG.accumulator).values


def assert_right(ticket: Ticket) -> None:
    assert ticket.result is not None
    assert np.array_equal(ticket.result.view(np.uint16), golden(ticket.request).view(np.uint16))


# --- what the host does -----------------------------------------------------------------------


def test_a_chain_is_published_operands_first_its_first_descriptor_last() -> None:
    b = bench()
    chain = [b.request(1, chain=1), b.request(2, chain=1), b.request(3)]
    b.queue.submit(chain)
    place = b.queue.place
    slot = {place.submission_base + (i << place.submission_slot_log2): i for i in range(4)}
    operands = {address + operand_offset(CONFIG) for address in slot}
    steps = []
    for entry in b.port.log:
        if entry.what != "write":
            steps.append(entry.what)
        elif entry.place in slot:
            steps.append(f"line {slot[entry.place]}")
        else:
            assert entry.place in operands
            steps.append("operand")
    assert steps == ["operand"] * 3 + ["fence", "line 1", "line 2", "fence", "line 0", "register"]
    assert b.port.log[-1].place == queue_offset(0, "DOORBELL")


def test_a_chain_that_fits_the_ring_is_never_published_in_parts() -> None:
    b = bench(depth=4)
    place = b.queue.place
    slots = {place.submission_base + (i << place.submission_slot_log2) for i in range(4)}
    b.queue.submit([b.request(seed, chain=int(seed % 3 < 2)) for seed in range(9)])
    b.queue.drain()
    published = [0]
    for entry in b.port.log:
        if entry.what == "write" and entry.place in slots:
            published[-1] += 1
        elif entry.what == "register" and entry.place == queue_offset(0, "DOORBELL"):
            published.append(0)
    assert [count for count in published if count] == [3, 3, 3]


def test_a_result_is_read_before_its_slot_is_given_back() -> None:
    b = bench()
    place = b.queue.place

    def poison(offset: int, value: int) -> None:
        if offset == queue_offset(0, "CQ_HEAD"):
            slot = (value - 1) % place.depth
            b.port.device.memory.write(place.result_base + (slot << place.result_slot_log2) + 64, b"\xff" * 512)

    b.port.on_mmio = poison
    for ticket in b.queue.run([[b.request(seed)] for seed in range(10)]):
        assert_right(ticket)


@pytest.mark.parametrize("depth", [2, 3, 7])
def test_tickets_come_back_in_order_through_many_wraps(depth: int) -> None:
    b = bench(depth)
    tickets = list(b.queue.run([[b.request(seed)] for seed in range(5 * depth + 1)]))
    assert [ticket.number for ticket in tickets] == list(range(5 * depth + 1))
    for ticket in tickets:
        assert_right(ticket)
    assert b.queue.outstanding == 0


def test_as_many_as_the_ring_holds_are_outstanding_and_no_more() -> None:
    b = bench(depth=4)
    tickets = b.queue.submit([b.request(seed) for seed in range(4)])
    assert b.queue.outstanding == 4
    assert [ticket.status for ticket in tickets] == [None] * 4
    b.queue.submit([b.request(9)])  # waits for room
    assert tickets[0].status == Status.OK
    b.queue.drain()
    assert b.queue.outstanding == 0


def test_poll_does_not_wait_and_wait_for_does() -> None:
    b = bench()
    (ticket,) = b.queue.submit([b.request()])
    assert b.queue.poll() == []
    assert b.queue.wait_for(ticket) is ticket
    assert_right(ticket)
    assert b.queue.wait_for(ticket) is ticket


def test_only_used_lines_of_an_operand_cross_the_link() -> None:
    b = bench()
    b.queue.submit([b.request()])  # 40 values: two lines a row, as much as a stripe
    assert b.session.driver.traffic.operand_bytes == 2 * 128
    narrow = Request(
        replace(b.request().descriptor, device_columns=8, gpu_columns=8, gpu_bytes=32, device_bytes=128),
        np.ones((2, 8), np.float16),
    )
    b.queue.submit([narrow])
    assert b.session.driver.traffic.operand_bytes == 2 * 128 + 2 * 64


def test_what_is_no_whole_chain_is_not_submitted() -> None:
    b = bench()
    with pytest.raises(UserError, match="nothing to submit"):
        b.queue.submit([])
    with pytest.raises(UserError, match="continues its chain"):
        b.queue.submit([b.request(chain=1)])
    assert b.queue.outstanding == 0


@pytest.mark.parametrize(
    ("operand", "message"),
    [
        (np.zeros((40, 64), np.float16), "needs a submission slot of 5248 bytes, not 4096"),
        (np.zeros((2, 4), np.float32), "give a matrix of FP16 values"),
        (np.zeros(4, np.float16), "give a matrix of FP16 values"),
    ],
)
def test_an_operand_that_does_not_fit_is_not_submitted(operand: np.ndarray, message: str) -> None:
    b = bench()
    with pytest.raises(UserError, match=message):
        b.queue.submit([b.request(), Request(Descriptor(), operand)])
    assert not [entry for entry in b.port.log if entry.what == "write"], "part of a refused submission was written"


def test_a_value_too_wide_for_its_field_is_not_submitted() -> None:
    b = bench()
    with pytest.raises(UserError, match="descriptor field device_rows is 1048576"):
        b.queue.submit([b.request(), b.request(device_rows=1 << 20)])
    assert_right(b.queue.wait_for(b.queue.submit([b.request(3)])[0]))


# --- errors -----------------------------------------------------------------------------------


def test_a_refusal_says_status_meaning_and_descriptor() -> None:
    b = bench()
    (ticket,) = b.queue.submit([b.request(dtype=DType.INT8)])
    with pytest.raises(DescriptorError) as caught:
        b.queue.wait_for(ticket)
    message = str(caught.value)
    for part in ("BAD_DTYPE", "data type is not supported", "descriptor 0", "gemm int8 x[2x40]", "W[6x40]"):
        assert part in message, message
    assert "\n" not in message
    assert caught.value.ticket is ticket


def test_run_stops_at_the_first_failure_and_the_rest_can_be_drained() -> None:
    b = bench(depth=8)
    run = b.queue.run([[b.request(1)], [b.request(2, reserved=1)], [b.request(3)]])
    assert_right(next(run))
    with pytest.raises(DescriptorError, match="BAD_RESERVED"):
        next(run)
    b.queue.drain()
    assert_right(b.queue.wait_for(b.queue.submit([b.request(4)])[0]))


def test_a_silent_device_is_reported_with_all_that_is_known() -> None:
    b = bench(timeout_cycles=10_000)
    b.port.falsify = lambda address, data: bytes(len(data))
    tickets = b.queue.submit([b.request(1), b.request(2)])
    b.port.waited.clear()
    with pytest.raises(DeviceError) as caught:
        b.queue.wait_for(tickets[0])
    assert sum(b.port.waited) == 10_000
    for part in (
        "no completion within 10000 cycles",
        "valid word 0x00000000, not 0x5c000001",
        "SQ_HEAD",
        "2 outstanding",
    ):
        assert part in str(caught.value)


def test_the_doorbell_is_rung_again_while_nothing_happens() -> None:
    b = bench()
    b.port.falsify = lambda address, data: bytes(len(data))
    (ticket,) = b.queue.submit([b.request()])
    with pytest.raises(DeviceError):
        b.queue.wait_for(ticket)
    assert sum(entry.place == queue_offset(0, "DOORBELL") for entry in b.port.log) > 5


def lie(**fields: object) -> Callable[[bytes], bytes]:
    def change(line: bytes) -> bytes:
        return replace(Completion.unpack(line), **fields).pack()  # type: ignore[arg-type]

    return change


LIES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "another descriptor": (lie(descriptor=Descriptor(device_rows=1)), "completed another descriptor"),
    "no result": (lie(result_bytes=0), "wrote 0 result bytes, not 128"),
    "too large a result": (lie(result_bytes=1 << 31), "wrote 2147483648 result bytes, not 128"),
    "result of a failure": (lie(status=Status.BAD_OP), "wrote 128 result bytes, not 0"),
    "unknown status": (lie(status=200, result_bytes=0), "unknown status 200"),
    "stale pass": (lie(valid=valid_word(0)), "no completion within"),
    "next pass": (lie(valid=valid_word(2)), "no completion within"),
    "other tag": (lie(valid=0x5B00_0001), "no completion within"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lying_device_is_caught_and_the_queue_recovers(name: str) -> None:
    b = bench(timeout_cycles=20_000)
    change, message = LIES[name]
    b.port.falsify = lambda _, data: change(data) if len(data) == 64 and any(data) else data
    (ticket,) = b.queue.submit([b.request(1)])
    with pytest.raises(DeviceError, match=message):
        b.queue.wait_for(ticket)
    b.port.falsify = lambda _, data: data
    b.queue.reset()
    for again in b.queue.run([[b.request(seed)] for seed in range(6)]):
        assert_right(again)


def test_a_result_that_cannot_have_fitted_its_slot_is_a_lie() -> None:
    b = bench()
    large = b.request(device_rows=1 << 12, gpu_rows=200)
    size = 200 * (1 << 12) * 2
    b.port.falsify = lambda _, data: lie(status=Status.OK, result_bytes=size)(data) if any(data) else data
    (ticket,) = b.queue.submit([large])
    with pytest.raises(DeviceError, match="fitted its slot"):
        b.queue.wait_for(ticket)


# --- recovery ---------------------------------------------------------------------------------


def test_reset_takes_what_arrived_and_returns_the_rest_for_another_try() -> None:
    b = bench(depth=8)
    done = b.queue.submit([b.request(1), b.request(2)])
    b.port.wait(1)
    b.port.device.stopped = True
    lost = b.queue.submit([b.request(3), b.request(4)])
    requests = b.queue.reset()
    assert requests == [ticket.request for ticket in lost]
    for ticket in done:
        assert_right(ticket)
    with pytest.raises(DescriptorError, match="not completed"):
        b.queue.wait_for(lost[0])
    b.port.device.stopped = False
    for ticket in b.queue.run([[request] for request in requests]):
        assert_right(ticket)


def test_reset_in_the_middle_of_a_chain_returns_all_of_it() -> None:
    b = bench(depth=8)
    chain = [
        b.request(1, chain=1, keep=Keep.NEW, device_rows=N),
        b.request(2, chain=1),
        b.request(3),
    ]
    tickets = b.queue.submit([b.request(9), *chain])
    # The device gets only as far as the second member.
    b.port.device.memory.write(b.queue.place.submission_base + (3 << 12) + 60, bytes(4))
    b.port.wait(1)
    assert b.queue.reset() == chain
    assert [ticket.status for ticket in tickets] == [Status.OK, Status.OK, Status.OK, None]
    assert b.queue.reset() == []


def test_a_queue_that_was_reset_takes_no_old_slot_for_valid() -> None:
    b = bench(depth=2)
    for _ in range(5):
        list(b.queue.run([[b.request(seed)] for seed in range(3)]))
        b.queue.reset()
        b.port.wait(10_000)
        assert b.port.mmio_read(queue_offset(0, "SQ_HEAD")) == 0, "an old descriptor ran again"


@pytest.mark.parametrize("fill", [0x00, 0xFF, 0xA5])
def test_another_process_s_rings_are_not_taken_for_its_own(fill: int) -> None:
    device = Stoppable(CONFIG, 1 << 20, fill=fill)
    for _ in range(3):  # each starts at the same pass, in the same place
        s = open_session(device, memory_bytes=1 << 20, depth=4, slots=SLOTS)
        region = s.allocator.allocate(4096, "weights")
        s.driver.load(region.address, pack_operand(WEIGHTS, CONFIG))
        b = Bench(Spy(device), s, region.address)
        device.wait(10_000)
        assert s.queue.poll() == []
        for ticket in s.queue.run([[b.request(seed)] for seed in range(6)]):
            assert_right(ticket)
        s.queue.close()
        assert device.mmio_read(queue_offset(0, "QSTATUS")) == 0


def test_two_processes_share_a_device() -> None:
    device = Stoppable(CONFIG, 1 << 20, reorder_seed=3)
    benches = []
    for index in range(2):
        s = open_session(
            device, memory_bytes=1 << 19, base=index << 19, queue=index, pasid=10 + index, depth=3, slots=SLOTS
        )
        region = s.allocator.allocate(4096, "weights")
        s.driver.load(region.address, pack_operand(WEIGHTS, CONFIG))
        benches.append(Bench(Spy(device), s, region.address))
    runs = [b.queue.run([[b.request(seed)] for seed in range(10)]) for b in benches]
    for pair in zip(*runs, strict=True):
        for ticket in pair:
            assert_right(ticket)


# --- anything in any order --------------------------------------------------------------------

fields = st.fixed_dictionaries(
    {},
    optional={
        "op": st.integers(0, 7),
        "dtype": st.sampled_from([0, 0, 0, 2]),
        "chain": st.integers(0, 1),
        "source": st.integers(0, 3),
        "keep": st.integers(0, 3),
        "acc_in": st.integers(0, 1),
        "acc_out": st.integers(0, 1),
        "reserved": st.sampled_from([0, 0, 0, 8]),
        "gpu_rows": st.sampled_from([1, 2, 2, 3]),
        "device_rows": st.sampled_from([N, N, 2, 0]),
    },
)


def expected_statuses(descriptors: list[Descriptor], window: QueueWindow) -> list[Status]:
    statuses, state, aborted = [], ChainState(), False
    for d in descriptors:
        verdict = check(d, CONFIG, window, state)
        status = Status.CHAIN_ABORTED if aborted else verdict.status
        statuses.append(status)
        aborted = bool(d.chain) and status is not Status.OK
        state = verdict.chain if d.chain and status is Status.OK else ChainState()
    return statuses


@settings(max_examples=60)
@given(st.lists(fields, min_size=1, max_size=12), st.integers(2, 6), st.integers(0, 1000))
def test_every_descriptor_gets_the_status_of_the_specification(
    changes: list[dict[str, int]], depth: int, seed: int
) -> None:
    b = bench(depth=depth, seed=seed, fill=0xA5)
    requests = [b.request(index, **change) for index, change in enumerate(changes)]
    last = requests[-1]
    requests[-1] = Request(replace(last.descriptor, chain=0), last.operand)
    tickets = b.queue.submit(requests)
    b.queue.drain()
    place = b.queue.place
    window = QueueWindow(place.window_base, place.window_limit, place.submission_slot_bytes, place.result_slot_bytes)
    expected = expected_statuses([request.descriptor for request in requests], window)
    assert [Status(ticket.status or 0) for ticket in tickets] == expected
    assert all(
        (ticket.result is not None) == (s is Status.OK)
        for ticket, s in zip(tickets, expected, strict=True)
        if not ticket.request.descriptor.keep and not ticket.request.descriptor.acc_out
    )
