"""Two processes with different PASIDs on one device: neither sees, disturbs or delays the other for long."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from plora.hw.cosim.device import ResponseOrder, RtlDevice
from plora.hw.defs.config import preset
from plora.hw.defs.registers import global_offset, queue_offset
from plora.hw.defs.status import Status
from plora.sim.functional import FunctionalDevice
from plora.sim.functional.layout import pack_operand
from plora.sim.golden.numerics import golden_gemm
from plora.sw.queue_pair import DescriptorError, Request, Ticket
from plora.sw.session import Session, open_session
from plora.sw.tiling import SlotSizes, product_descriptor

CONFIG = preset("tiny")
HALF = 1 << 19
ROWS, COLUMNS = 6, 70


class Host:
    """A process: its session, its matrix, and requests on it."""

    def __init__(self, device: Any, queue: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.session: Session = open_session(
            device,
            memory_bytes=HALF,
            base=queue * HALF,
            queue=queue,
            pasid=0x100 + queue,
            depth=4,
            slots=SlotSizes(12, 12),
            take_interrupts=device.take_interrupts if queue else None,
            timeout_cycles=200_000,
        )
        self.matrix = self._rng.standard_normal((ROWS, COLUMNS)).astype(np.float16)
        self.address = self.session.allocator.allocate(4096, "weights").address
        self.session.driver.load(self.address, pack_operand(self.matrix, CONFIG))

    def request(self, **fields: int) -> Request:
        operand = self._rng.standard_normal((2, COLUMNS)).astype(np.float16)
        d = product_descriptor(CONFIG, self.address, ROWS, COLUMNS, 2)
        return Request(replace(d, **fields), operand)

    def right(self, request: Request, result: Any) -> bool:
        assert request.operand is not None
        expected = golden_gemm(request.operand, self.matrix, CONFIG.accumulator).values
        return np.array_equal(np.asarray(result).view(np.uint16), expected.view(np.uint16))


ROUGH: dict[str, Any] = {
    "stall": 0.3,
    "latency_jitter_cycles": 30,
    "response_order": ResponseOrder.BEATS,
    "host_reorder": True,
    "host_delay_cycles": 50,
}


@pytest.fixture(params=["model", "rtl", "rough rtl"])
def device(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "model":
        yield FunctionalDevice(CONFIG, 2 * HALF, reorder_seed=3)
        return
    with RtlDevice(CONFIG, dram_bytes=2 * HALF, seed=3, **(ROUGH if request.param == "rough rtl" else {})) as rtl:
        yield rtl


def hosts_of(device: Any) -> tuple[Host, Host]:
    return Host(device, 0, 10), Host(device, 1, 11)


def test_both_get_their_own_results_one_by_polling_one_by_interrupt(device: Any) -> None:
    hosts = hosts_of(device)
    tickets: list[list[Ticket]] = [[], []]
    for _ in range(7):
        for host, mine in zip(hosts, tickets, strict=True):
            mine += host.session.queue.submit([host.request()])
    for host, mine in zip(hosts, tickets, strict=True):
        host.session.queue.drain()
        for ticket in mine:
            ticket.check()
            assert host.right(ticket.request, ticket.result)


def test_a_host_cannot_have_the_device_read_the_others_memory(device: Any) -> None:
    thief, victim = hosts_of(device)
    for address in (victim.address, HALF, 2 * HALF - CONFIG.stripe_bytes):
        (ticket,) = thief.session.queue.submit([thief.request(device_address=address)])
        with pytest.raises(DescriptorError, match="OUT_OF_WINDOW"):
            thief.session.queue.wait_for(ticket)
    (ticket,) = victim.session.queue.submit([victim.request()])
    assert victim.right(ticket.request, victim.session.queue.wait_for(ticket).result)


def test_one_hosts_reset_loses_nothing_of_its_own_and_touches_nothing_of_the_other(device: Any) -> None:
    first, second = hosts_of(device)
    for round_ in range(5):
        mine = first.session.queue.submit([first.request() for _ in range(4)])
        others = second.session.queue.submit([second.request() for _ in range(3)])
        device.wait(90 * round_)
        lost = first.session.queue.reset()
        done = [ticket for ticket in mine if ticket.completion is not None]
        assert len(done) + len(lost) == len(mine)
        again = first.session.queue.submit(lost) if lost else []
        first.session.queue.drain()
        second.session.queue.drain()
        for host, tickets in ((first, [*done, *again]), (second, others)):
            for ticket in tickets:
                ticket.check()
                assert host.right(ticket.request, ticket.result)


def test_an_open_chain_of_one_host_holds_the_other_no_longer_than_its_time(device: Any) -> None:
    first, second = hosts_of(device)
    first.session.driver.write_register(global_offset("CHAIN_TIMEOUT"), 3000)
    # Register writes are posted: a read has it there before the chain begins.
    assert first.session.driver.read_register(global_offset("CHAIN_TIMEOUT")) == 3000
    chained = first.request(chain=1, keep=1)
    # By the back of `submit`, which would not leave a chain open.
    first.session.queue._publish([chained])
    (ticket,) = second.session.queue.submit([second.request()])
    second.session.queue.wait_for(ticket)
    assert second.right(ticket.request, ticket.result)


def test_a_host_that_writes_nonsense_to_its_registers_hurts_only_itself(device: Any) -> None:
    vandal, other = hosts_of(device)
    rng = np.random.default_rng(5)
    names = [
        "DEPTH",
        "BASE_LO",
        "LIMIT_LO",
        "SQ_BASE_LO",
        "CQ_BASE_HI",
        "SLOTS",
        "PASS",
        "DOORBELL",
        "CQ_HEAD",
        "WEIGHT",
    ]
    for _ in range(40):
        for name in rng.choice(names, 3):
            device.mmio_write(queue_offset(0, str(name)), int(rng.integers(0, 1 << 32)))
        device.mmio_write(queue_offset(0, "CTRL"), int(rng.integers(0, 4)))
        (ticket,) = other.session.queue.submit([other.request()])
        assert other.right(ticket.request, other.session.queue.wait_for(ticket).result)
    assert vandal.session.queue.index == 0 and ticket.status == Status.OK
