"""One host, two devices: the same driver calls leave the same bytes in the memory of model and RTL.

Both memories start as the same poison and are compared whole, so a line too many is seen as well as one
too few. Only the ``cycles`` field of completion lines may differ: the model's is that of a perfect memory,
and no RTL figure may be smaller.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from plora.hw.cosim.device import ResponseOrder, RtlDevice
from plora.hw.defs.config import NdpConfig, preset
from plora.hw.defs.descriptor import Descriptor, DType, Keep, Source
from plora.hw.defs.integers import INTEGER_BITS
from plora.hw.defs.packing import expansion_log2, pack_geometry
from plora.hw.defs.queue import LINE_BYTES, MAX_OPERAND_EXPONENT, NO_EXPONENTS, Completion, Exponents
from plora.hw.defs.registers import queue_offset
from plora.hw.defs.status import Status
from plora.sim.functional import FunctionalDevice
from plora.sim.functional.layout import Matrix, pack_integers, pack_operand
from plora.sim.golden.integers import Quantized
from plora.sw.matrix import PlacedMatrix, multiply, multiply_twice, store_matrix
from plora.sw.queue_pair import Request, Ticket
from plora.sw.session import Session, open_session
from plora.sw.tiling import SlotSizes
from tests.descriptors import product

MEMORY_BYTES = 1 << 20
POISON = 0xFF
"""Every FP16 value of memory that nobody wrote is NaN: reading too much shows."""
SLOTS = SlotSizes(12, 12)
DEPTH = 6
TINY = preset("tiny")

CALM: dict[str, Any] = {}
ROUGH: dict[str, Any] = {
    "stall": 0.3,
    "latency_jitter_cycles": 30,
    "response_order": ResponseOrder.BEATS,
    "address_waits_for_data": True,
    "host_reorder": True,
    "host_delay_cycles": 50,
}

Scenario = Callable[[Session], Sequence[Ticket]]


def both(
    scenario: Scenario, seed: int, *, config: NdpConfig = TINY, slots: SlotSizes | None = SLOTS, **rtl: Any
) -> list[Ticket]:
    """Run ``scenario`` on model and RTL, compare tickets and memories, and return the RTL's tickets."""
    model = FunctionalDevice(config, MEMORY_BYTES, reorder_seed=seed, fill=POISON)
    with RtlDevice(config, dram_bytes=MEMORY_BYTES, seed=seed, **rtl) as device:
        device.memory[:] = POISON
        sessions = [open_session(port, memory_bytes=MEMORY_BYTES, depth=DEPTH, slots=slots) for port in (model, device)]
        expected, tickets = (list(scenario(session)) for session in sessions)
        for session in sessions:
            session.queue.close()
            session.driver.port.hdm_fence()
        compare_tickets(expected, tickets, seed)
        model.memory.clear_errors()
        compare_memories(model.memory.read(0, MEMORY_BYTES), device.memory.tobytes(), sessions[0], seed)
    return tickets


def compare_tickets(expected: Sequence[Ticket], tickets: Sequence[Ticket], seed: int) -> None:
    assert len(expected) == len(tickets)
    for model, rtl in zip(expected, tickets, strict=True):
        where = f"seed {seed}, descriptor {rtl.number}: {rtl.request.descriptor.describe()}"
        a, b = model.completion, rtl.completion
        assert a is not None and b is not None, where
        assert Status(b.status) is Status(a.status), f"{where}: {Status(b.status).name}, not {Status(a.status).name}"
        assert (b.numeric, b.result_bytes) == (a.numeric, a.result_bytes), where
        assert b.cycles >= a.cycles, f"{where}: {b.cycles} cycles, fewer than it has beats ({a.cycles})"


def compare_memories(expected: bytes, found: bytes, session: Session, seed: int) -> None:
    place = session.queue.place
    images = [bytearray(image) for image in (expected, found)]
    for image in images:
        for slot in range(place.depth):
            start = place.result_base + (slot << place.result_slot_log2)
            if bytes(image[start : start + LINE_BYTES]) != bytes([POISON]) * LINE_BYTES:
                line = replace(Completion.unpack(bytes(image[start : start + LINE_BYTES])), cycles=0).pack()
                image[start : start + LINE_BYTES] = line
    if images[0] != images[1]:
        at = next(i for i, pair in enumerate(zip(*images, strict=True)) if pair[0] != pair[1])
        raise AssertionError(
            f"seed {seed}: memories differ, first at {at:#x}: model {images[0][at]:#04x}, RTL {images[1][at]:#04x};"
            f" rings at {place.submission_base:#x} and {place.result_base:#x}"
        )


# --- random streams of descriptors ------------------------------------------------------------

SPECIALS = np.array([0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E01], np.uint16)


def values(rng: random.Random, rows: int, columns: int) -> Matrix:
    """Values of widely differing size, in one matrix of four with a few special ones."""
    generator = np.random.default_rng(rng.getrandbits(32))
    matrix = generator.standard_normal((rows, columns)) * 2.0 ** generator.integers(-14, 6, (rows, columns))
    bits = matrix.astype(np.float16).view(np.uint16)
    if rng.random() < 0.25:
        chosen = generator.random((rows, columns)) < 0.02
        bits[chosen] = generator.choice(SPECIALS, int(chosen.sum()))
    return bits.view(np.float16)


def integers(rng: random.Random, tokens: int, columns: int, dtype: int) -> Quantized:
    """Integers with scales of widely differing size, in one matrix of four with a few that are no numbers."""
    generator = np.random.default_rng(rng.getrandbits(32))
    reach = 1 << INTEGER_BITS[dtype] - 1
    scales = generator.integers(0, 0xA0 if rng.random() < 0.75 else 0x100, tokens).astype(np.uint8)
    return Quantized(generator.integers(-reach, reach, (tokens, columns)).astype(np.int8), scales)


class Stream:
    """Random requests: legal ones of any shape, chains of every kind, and some with a fault."""

    def __init__(self, session: Session, seed: int, fault_rate: float) -> None:
        self.session = session
        self.rng = random.Random(seed)
        self.fault_rate = fault_rate

    def product(self, n: int, k: int, b: int, **fields: int) -> Request:
        """A request with a new device operand, and a GPU operand where it takes one from its slot."""
        config, dtype = self.session.driver.config, fields.get("dtype", DType.FP16)
        if expansion_log2(dtype):
            data = pack_integers(integers(self.rng, n, k, dtype), config, dtype)
        else:
            data = pack_operand(values(self.rng, n, k), config)
        region = self.session.allocator.allocate(len(data), "operand")
        self.session.driver.load(region.address, data)
        # The same patterns are other values in BF16: of all sizes, with exponents to match.
        exponents = NO_EXPONENTS
        if "dtype" not in fields and self.rng.random() < 0.3:
            fields["dtype"] = DType.BF16
            most = MAX_OPERAND_EXPONENT + (self.rng.random() < self.fault_rate)
            exponents = Exponents(*(self.rng.choice([0, 2, -3, 5, most]) for _ in range(3)))
        d = product(region.address, pack_geometry(config, n, k, dtype).packed_bytes, n, k, b, **fields)
        operand = values(self.rng, b, k) if d.source == Source.SLOT else None
        return Request(self.spoil(d) if self.rng.random() < self.fault_rate else d, operand, exponents=exponents)

    def spoil(self, d: Descriptor) -> Descriptor:
        """Change one field to anything."""
        rng = self.rng
        return replace(
            d,
            **rng.choice(
                [
                    {"type": rng.randrange(4)},
                    {"op": rng.randrange(8)},
                    {"dtype": rng.randrange(1, 8)},
                    {"source": rng.randrange(4)},
                    {"keep": rng.randrange(4)},
                    {"acc_in": 1},
                    {"acc_out": 1},
                    {"reserved": 1 << rng.randrange(4)},
                    {"device_address": d.device_address + 64},
                    {"device_address": rng.getrandbits(64)},
                    {"device_address": MEMORY_BYTES - 128 * rng.randrange(4)},
                    {"device_bytes": d.device_bytes + rng.choice([-1, 1])},
                    {"device_rows": rng.choice([0, d.device_rows + 1, (1 << 20) - 1])},
                    {"device_columns": rng.choice([0, d.device_columns + 1, (1 << 20) - 1])},
                    {"gpu_rows": rng.choice([0, d.gpu_rows + 1, (1 << 20) - 1])},
                    {"gpu_columns": rng.choice([0, d.gpu_columns + 1])},
                    {"gpu_bytes": d.gpu_bytes ^ 2},
                ]
            ),
        )

    def chain(self) -> list[Request]:
        """One chain, or one descriptor that is none."""
        rng = self.rng
        kind = rng.choice(["single", "single", "shared", "kept", "accumulated"])
        b, k = rng.randint(1, 4), rng.choice([rng.randint(1, 40), rng.randint(41, 300)])
        if kind == "single":
            return [self.product(rng.randint(1, 70), k, b)]
        if kind == "shared":
            count = rng.randint(2, 4)
            flags = [
                {"source": Source.SLOT if i == 0 else Source.CHAIN, "chain": int(i < count - 1)} for i in range(count)
            ]
            return [self.product(rng.randint(1, 40), k, b, **flag) for flag in flags]
        if kind == "accumulated":
            count, n, b = rng.randint(2, 4), rng.randint(1, TINY.channels), rng.randint(1, 2)
            return [
                self.product(
                    n, rng.randint(17, 250), b, chain=int(i < count - 1), acc_in=int(i > 0), acc_out=int(i < count - 1)
                )
                for i in range(count)
            ]
        widths = [32] * rng.randint(0, 3) + [rng.randint(1, 64)]
        chain = [
            self.product(
                width,
                k,
                b,
                chain=1,
                source=Source.SLOT if i == 0 else Source.CHAIN,
                keep=Keep.NEW if i == 0 else Keep.APPEND,
            )
            for i, width in enumerate(widths)
        ]
        uses = rng.randint(1, 2)
        return chain + [
            self.product(rng.randint(1, 70), sum(widths), b, source=Source.KEPT, chain=int(i < uses - 1))
            for i in range(uses)
        ]

    def run(self, descriptors: int) -> list[Ticket]:
        """Submit chains until there were so many descriptors, several at a time, and drain."""
        queue = self.session.queue
        tickets: list[Ticket] = []
        while len(tickets) < descriptors:
            submission = [request for _ in range(self.rng.randint(1, 3)) for request in self.chain()]
            # The host may not end a submission inside a chain, whatever the fault.
            last = submission[-1]
            submission[-1] = replace(last, descriptor=replace(last.descriptor, chain=0))
            tickets += queue.submit(submission)
        queue.drain()
        return tickets


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("manners", [CALM, ROUGH], ids=["calm", "rough"])
def test_random_legal_streams(seed: int, manners: dict[str, Any]) -> None:
    tickets = both(lambda session: Stream(session, seed, 0.0).run(60), seed, **manners)
    assert {ticket.status for ticket in tickets} == {Status.OK}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("manners", [CALM, ROUGH], ids=["calm", "rough"])
def test_random_streams_with_faults(seed: int, manners: dict[str, Any]) -> None:
    tickets = both(lambda session: Stream(session, 100 + seed, 0.3).run(100), seed, **manners)
    statuses = {Status(ticket.status or 0) for ticket in tickets}
    assert {Status.OK, Status.CHAIN_ABORTED} < statuses
    assert len(statuses) >= 8, f"too few kinds of refusal to show anything: {statuses}"


def test_a_single_wrong_byte_would_be_seen() -> None:
    def scenario(session: Session) -> list[Ticket]:
        tickets = Stream(session, 1, 0.0).run(5)
        if not isinstance(session.driver.port, FunctionalDevice):
            session.driver.port.hdm_write(MEMORY_BYTES - 1, b"x")
        return tickets

    with pytest.raises(AssertionError, match="memories differ, first at 0xfffff: model 0xff, RTL 0x78"):
        both(scenario, 1)


# --- what users do ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
@pytest.mark.parametrize("manners", [CALM, ROUGH], ids=["calm", "rough"])
def test_products_and_adapters_of_awkward_sizes(manners: dict[str, Any], dtype: DType) -> None:
    shapes = [(1, 1, 1), (70, 513, 3), (3, 1100, 3), (300, 20, 9)]
    adapters = [(8, 64, 160, 5), (40, 300, 70, 9), (200, 60, 33, 2), (4, 1500, 20, 3)]

    def scenario(session: Session) -> list[Ticket]:
        rng = random.Random(5)

        def matrix(rows: int, columns: int) -> Any:
            bits = values(rng, rows, columns)
            return bits.view(np.uint16) if dtype == DType.BF16 else bits

        def store(rows: int, columns: int) -> PlacedMatrix:
            return store_matrix(session.driver, session.allocator, matrix(rows, columns), "w", dtype)

        for n, k, b in shapes:
            multiply(session.queue, store(n, k), matrix(b, k))
        for rank, k, n, batch in adapters:
            multiply_twice(session.queue, store(rank, k), store(n, rank), matrix(batch, k))
        return []

    both(scenario, 7, slots=SlotSizes(13, 13), **manners)


def inject(session: Session, address: int) -> None:
    """Let memory fail at ``address`` from now on."""
    port: Any = session.driver.port
    (port.memory.add_error_range if isinstance(port, FunctionalDevice) else port.inject_error)(address, 1)


@pytest.mark.parametrize("where", ["weights", "operand", "result"])
def test_bad_memory_behind_a_descriptor(where: str) -> None:
    def scenario(session: Session) -> list[Ticket]:
        stream = Stream(session, 11, 0.0)
        chain = [stream.product(8, 40, 2, chain=1), stream.product(5, 40, 2, source=Source.CHAIN)]
        place, port = session.queue.place, session.driver.port
        bad = {
            "weights": chain[0].descriptor.device_address + 128,
            "operand": place.submission_base + 128,
            "result": place.result_base + 64,
        }[where]
        # The first descriptor is held back until memory has failed: the host itself still had to write there.
        write, held = port.hdm_write, []

        def hold(address: int, data: bytes) -> None:
            if address == place.submission_base:
                held.append(data)
            else:
                write(address, data)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(port, "hdm_write", hold)
            tickets = session.queue.submit([*chain, stream.product(8, 40, 2)])
        inject(session, bad)
        write(place.submission_base, *held)
        session.queue.drain()
        return tickets

    tickets = both(scenario, 3)
    assert [ticket.status for ticket in tickets] == [Status.MEMORY_ERROR, Status.CHAIN_ABORTED, Status.OK]


def test_a_slot_in_bad_memory_is_used_up() -> None:
    def scenario(session: Session) -> list[Ticket]:
        inject(session, session.queue.place.submission_base)
        session.queue.ring_doorbell()
        session.driver.port.wait(20_000)
        head = session.driver.read_register(queue_offset(session.queue.index, "SQ_HEAD"))
        assert head == 1, "the slot was not used up, or more than it"
        return []

    both(scenario, 3)


def test_a_ring_smaller_than_its_chain_and_a_reset_in_between() -> None:
    def scenario(session: Session) -> list[Ticket]:
        stream = Stream(session, 13, 0.0)
        members = [
            stream.product(20, 60, 2, chain=int(i < 3 * DEPTH - 1), source=Source.CHAIN if i else Source.SLOT)
            for i in range(3 * DEPTH)
        ]
        tickets = session.queue.submit(members)
        session.queue.drain()
        assert session.queue.reset() == []
        return [*tickets, *stream.run(20)]

    both(scenario, 2, **ROUGH)
