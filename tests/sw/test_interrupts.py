"""A host that waits for interrupts: what it reads, what it does when one is lost, and which set-ups are refused."""

from __future__ import annotations

import numpy as np
import pytest

from plora.hw.defs.config import preset
from plora.hw.defs.descriptor import Descriptor, Op
from plora.hw.defs.errors import UserError
from plora.hw.defs.packing import pack_geometry
from plora.hw.defs.queue import LINE_BYTES
from plora.sim.functional import FunctionalDevice
from plora.sim.functional.layout import pack_operand
from plora.sw.driver import Driver
from plora.sw.interrupts import Interrupts, Notice
from plora.sw.queue_pair import QueuePair, Request
from plora.sw.session import Session, open_session
from plora.sw.tiling import SlotSizes

CONFIG = preset("tiny")
WEIGHTS = np.ones((6, 40), np.float16)


def open_with_interrupts(device: FunctionalDevice) -> tuple[Session, Request]:
    session = open_session(
        device, memory_bytes=1 << 20, depth=4, slots=SlotSizes(12, 12), take_interrupts=device.take_interrupts
    )
    region = session.allocator.allocate(4096, "weights")
    session.driver.load(region.address, pack_operand(WEIGHTS, CONFIG))
    d = Descriptor(
        op=Op.GEMV,
        device_address=region.address,
        device_bytes=pack_geometry(CONFIG, *WEIGHTS.shape).packed_bytes,
        device_rows=6,
        device_columns=40,
        gpu_bytes=80,
        gpu_rows=1,
        gpu_columns=40,
    )
    return session, Request(d, np.ones((1, 40), np.float16))


def test_nothing_is_read_before_the_message() -> None:
    device = FunctionalDevice(CONFIG, 1 << 20)
    session, request = open_with_interrupts(device)
    for _ in range(9):
        ticket = session.queue.wait_for(session.queue.submit([request])[0])
        assert ticket.result is not None and (ticket.result == 40).all()
    traffic = session.driver.traffic
    assert traffic.completion_bytes == 9 * LINE_BYTES
    # `poll` looks once beyond what it took, if more is outstanding: here nothing is.
    assert traffic.poll_bytes == 0


def test_a_lost_message_costs_time_and_nothing_else() -> None:
    device = FunctionalDevice(CONFIG, 1 << 20)
    session, request = open_with_interrupts(device)
    assert session.queue.notice is not None
    session.queue.notice.interrupts.mask(0, masked=True)
    ticket = session.queue.wait_for(session.queue.submit([request])[0])
    assert ticket.completion is not None
    assert session.queue.notice.interrupts.pending(0)
    session.queue.notice.interrupts.mask(0, masked=False)
    assert not session.queue.notice.interrupts.pending(0)


def test_gathered_completions_come_with_few_messages() -> None:
    device = FunctionalDevice(CONFIG, 1 << 20)
    session, request = open_with_interrupts(device)
    session.queue.close()
    assert session.queue.notice is not None
    interrupts = session.queue.notice.interrupts
    before = interrupts.arrived(1)
    pair = QueuePair(
        session.driver,
        1,
        pasid=2,
        place=session.queue.place,
        first_pass=100,
        notice=Notice(interrupts, 1, completions=4, wait_cycles=10_000),
    )
    assert len(list(pair.run([[request]] * 16))) == 16
    assert interrupts.arrived(1) - before <= 4


def test_set_ups_that_make_no_sense_are_refused() -> None:
    device = FunctionalDevice(CONFIG)
    interrupts = Interrupts(Driver(device), device.take_interrupts)
    for vector in (-1, 2, 5000):
        for use in (interrupts.open, interrupts.pending, interrupts.arrived, lambda v: interrupts.mask(v, masked=True)):
            with pytest.raises(UserError, match=rf"vector {vector}: this device has 0 \.\.\. 1"):
                use(vector)
    with pytest.raises(UserError, match="choose 1"):
        Notice(interrupts, 0, completions=0)
    with pytest.raises(UserError, match="choose 0"):
        Notice(interrupts, 0, wait_cycles=-1)
