"""The functional device through its port alone: registers, rings, chains, errors. No driver."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plora.hw.defs.config import preset
from plora.hw.defs.descriptor import Descriptor, DType, Keep, Op, Source, Type
from plora.hw.defs.errors import UserError
from plora.hw.defs.packing import pack_geometry
from plora.hw.defs.queue import RESULT_OFFSET, Completion, operand_offset, submission_line, valid_word
from plora.hw.defs.registers import GLOBAL, PENDING_BASE, QUEUE, Access, global_offset, queue_offset, vector_offset
from plora.hw.defs.status import Status
from plora.sim.functional import FunctionalDevice
from plora.sim.functional.layout import Matrix, gpu_operand_bytes, pack_operand, result_bytes, result_from_bytes
from plora.sim.golden.numerics import golden_gemm

CONFIG = preset("tiny")
SQ, CQ, W = 0x4000, 0x8000, 0x1_0000
LIMIT = 0x4_0000
LOG2 = 12


@dataclass
class RawHost:
    """Writes registers and rings by hand, without any of the driver's care."""

    device: FunctionalDevice
    queue: int = 0
    offset: int = 0
    depth: int = 4
    first_pass: int = 1

    def register(self, name: str, value: int) -> None:
        self.device.mmio_write(queue_offset(self.queue, name), value)

    def read(self, name: str) -> int:
        return self.device.mmio_read(queue_offset(self.queue, name))

    def enable(self, **registers: int) -> None:
        values = {
            "DEPTH": self.depth,
            "BASE_LO": self.offset,
            "LIMIT_LO": self.offset + LIMIT,
            "SQ_BASE_LO": self.offset + SQ,
            "CQ_BASE_LO": self.offset + CQ,
            "SLOTS": LOG2 | LOG2 << 8,
            "PASS": self.first_pass,
        } | registers
        for name, value in values.items():
            self.register(name, value)
        self.register("CTRL", 1)

    def slot(self, index: int) -> tuple[int, int, int]:
        """Submission slot, result slot and pass of descriptor ``index`` since enabling."""
        ring_pass, place = divmod(index, self.depth)
        return self.offset + SQ + (place << LOG2), self.offset + CQ + (place << LOG2), self.first_pass + ring_pass

    def submit(self, index: int, d: Descriptor, operand: Matrix | None = None) -> None:
        address, _, ring_pass = self.slot(index)
        if operand is not None:
            self.device.hdm_write(address + operand_offset(CONFIG), gpu_operand_bytes(operand, CONFIG))
            self.device.hdm_fence()
        self.device.hdm_write(address, submission_line(d, ring_pass))
        self.device.hdm_fence()

    def completion(self, index: int) -> Completion | None:
        _, address, ring_pass = self.slot(index)
        completion = Completion.unpack(self.device.hdm_read(address, 64))
        return completion if completion.valid == valid_word(ring_pass) else None

    def status(self, index: int) -> Status | None:
        completion = self.completion(index)
        return None if completion is None else Status(completion.status)

    def result(self, index: int, b: int, n: int) -> Matrix:
        _, address, _ = self.slot(index)
        return result_from_bytes(
            self.device.hdm_read(address + RESULT_OFFSET, len(result_bytes(np.zeros((b, n), np.float16)))), b, n
        )

    def product(self, d: Descriptor) -> Descriptor:
        return replace(d, device_address=d.device_address + self.offset)


def random(seed: int, *shape: int) -> Matrix:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


def gemm(n: int, k: int, b: int, **fields: int) -> Descriptor:
    """A legal descriptor of that shape, but for ``fields``."""
    d = Descriptor(
        op=Op.GEMV if b == 1 else Op.GEMM,
        device_address=W,
        device_bytes=pack_geometry(CONFIG, n, k).packed_bytes,
        device_rows=n,
        device_columns=k,
        gpu_bytes=2 * b * k,
        gpu_rows=b,
        gpu_columns=k,
    )
    return replace(d, **fields)


@pytest.fixture
def host() -> RawHost:
    host = RawHost(FunctionalDevice(CONFIG, 1 << 20))
    host.device.hdm_write(W, pack_operand(random(1, 8, 40), CONFIG))
    return host


def same_bits(a: Matrix, b: Matrix) -> bool:
    return np.array_equal(a.view(np.uint16), b.view(np.uint16))


# --- registers --------------------------------------------------------------------------------


def test_it_says_what_it_is(host: RawHost) -> None:
    read = host.device.mmio_read
    assert read(global_offset("ID")).to_bytes(4, "little") == b"PLRA"
    assert read(global_offset("CAPS")) == 2 | 2 << 8 | 2 << 16 | 24 << 24
    assert read(global_offset("BUFFERS")) == 13 | 12 << 8 | 14 << 16


def test_absent_and_read_only_registers_ignore_writes(host: RawHost) -> None:
    known = {register.offset for register in GLOBAL}
    for offset in (0x030, 0x03C, 0x0FFC, 0x1000 + 0x4C, 0x1000 + 2 * 0x80, 0xFFFC):
        assert offset not in known
        host.device.mmio_write(offset, 0xFFFF_FFFF)
        assert host.device.mmio_read(offset) == 0, hex(offset)
    before = [host.device.mmio_read(r.offset) for r in GLOBAL if r.access is Access.RO]
    for register in GLOBAL:
        if register.access is Access.RO:
            host.device.mmio_write(register.offset, 0x1234_5678)
    assert [host.device.mmio_read(r.offset) for r in GLOBAL if r.access is Access.RO] == before


def test_queue_registers_change_only_while_it_is_disabled(host: RawHost) -> None:
    fixed = [r.name for r in QUEUE if r.access is Access.RW and r.name not in ("CTRL", "CQ_HEAD")]
    host.enable(PASID=0xABCDE, VECTOR=7)
    before = {name: host.read(name) for name in fixed}
    assert before["PASID"] == 0xABCDE
    for name in fixed:
        host.register(name, 0x55)
    assert {name: host.read(name) for name in fixed} == before
    host.register("CTRL", 0)
    for name in fixed:
        host.register(name, 0x55)
    assert {host.read(name) for name in fixed} == {0x55}


@pytest.mark.parametrize(
    "wrong",
    [
        {"DEPTH": 1},
        {"DEPTH": 4097},
        {"SLOTS": 10 | 12 << 8},
        {"SLOTS": 12 | 25 << 8},
        {"SQ_BASE_LO": SQ + 64},
        {"CQ_BASE_LO": CQ + 4},
        {"SQ_BASE_HI": 1},
        {"BASE_LO": SQ + 128},
        {"LIMIT_LO": CQ + (3 << LOG2)},
        {"LIMIT_LO": 0, "LIMIT_HI": 0},
        {"LIMIT_HI": 1},
        {"SQ_BASE_LO": 0xFFFF_FF80, "SQ_BASE_HI": 0xFFFF_FFFF},
    ],
    ids=str,
)
def test_an_enable_that_makes_no_sense_is_refused_and_counted(host: RawHost, wrong: dict[str, int]) -> None:
    host.enable(**wrong)
    assert host.read("QSTATUS") == 0
    assert host.read("CTRL") == 0
    assert host.read("QERRORS") == 1
    host.enable(BASE_HI=0, LIMIT_HI=0, SQ_BASE_HI=0)
    assert host.read("QSTATUS") == 1


def test_counters_count_and_clear(host: RawHost) -> None:
    host.enable()
    host.submit(0, gemm(8, 40, 3), random(2, 3, 40))
    host.submit(1, gemm(8, 40, 3, reserved=1))
    host.device.wait(100)
    counters = {name: host.device.mmio_read(global_offset(name)) for name in ("BEATS", "DESCRIPTORS", "ERRORS")}
    # 8 rows over 2 channels, 40 columns: 4 groups of 2 beats, for each of two pairs of input rows.
    assert counters == {"BEATS": 16, "DESCRIPTORS": 2, "ERRORS": 1}
    assert host.device.mmio_read(global_offset("CYCLES_LO")) == 100
    host.device.mmio_write(global_offset("CONTROL"), 1)
    assert not any(host.device.mmio_read(global_offset(name)) for name in (*counters, "CYCLES_LO", "WORDS_READ"))
    assert host.device.mmio_read(global_offset("CONTROL")) == 0


# --- rings ------------------------------------------------------------------------------------


def test_a_product_leaves_result_and_completion_and_nothing_else(host: RawHost) -> None:
    host.enable()
    x, d = random(2, 3, 40), gemm(8, 40, 3)
    host.submit(0, d, x)
    before = host.device.memory.read(0, 1 << 20)
    host.device.wait(1)
    y = golden_gemm(x, random(1, 8, 40), CONFIG.accumulator).values
    line = Completion(Status.OK, 0, 3 * 64, 16, d, valid_word(1)).pack()
    expected = bytearray(before)
    expected[CQ : CQ + 64 + 3 * 64] = line + result_bytes(y)
    assert host.device.memory.read(0, 1 << 20) == expected
    assert (host.read("SQ_HEAD"), host.read("CQ_TAIL"), host.read("CQ_HEAD")) == (1, 1, 0)


@pytest.mark.parametrize("fill", [0x00, 0xFF, 0xA5, 0x5C])
def test_memory_that_nobody_wrote_is_never_valid(fill: int) -> None:
    host = RawHost(FunctionalDevice(CONFIG, 1 << 20, fill=fill))
    host.enable()
    for doorbell in (0, 1, 0xFFFF_FFFF):
        host.register("DOORBELL", doorbell)
        host.device.wait(10_000)
    assert (host.read("SQ_HEAD"), host.read("CQ_TAIL"), host.read("QERRORS")) == (0, 0, 0)


@pytest.mark.parametrize("ring_pass", [0, 2, (1 << 24) - 1])
def test_a_slot_of_another_pass_is_not_valid(host: RawHost, ring_pass: int) -> None:
    host.enable()
    host.device.hdm_write(host.slot(0)[0], submission_line(gemm(8, 40, 1), ring_pass))
    host.device.wait(1)
    assert host.read("SQ_HEAD") == 0


@pytest.mark.parametrize("depth", [2, 3, 4])
@pytest.mark.parametrize("first_pass", [1, (1 << 24) - 1])
def test_the_ring_wraps_at_its_size_and_the_pass_at_its_own(host: RawHost, depth: int, first_pass: int) -> None:
    host.depth, host.first_pass = depth, first_pass
    host.enable()
    for index in range(3 * depth + 1):
        x = random(index, 1, 40)
        host.submit(index, gemm(8, 40, 1), x)
        host.device.wait(1)
        assert host.status(index) is Status.OK, f"descriptor {index}"
        assert same_bits(host.result(index, 1, 8), golden_gemm(x, random(1, 8, 40), CONFIG.accumulator).values)
        host.register("CQ_HEAD", index + 1)


def test_a_full_completion_ring_holds_the_device_back(host: RawHost) -> None:
    host.enable()
    for index in range(4):
        host.submit(index, gemm(8, 40, 1), random(index, 1, 40))
    host.device.wait(1)
    before = host.device.memory.read(CQ, 4 << LOG2)
    host.submit(4, gemm(8, 40, 1), random(9, 1, 40))
    host.device.wait(10_000)
    assert host.read("CQ_TAIL") == 4
    assert host.device.memory.read(CQ, 4 << LOG2) == before, "a completion was overwritten before it was taken"
    host.register("CQ_HEAD", 1)
    host.device.wait(1)
    assert host.status(4) is Status.OK


@pytest.mark.parametrize("value", [2, 5, 0xFFFF, 0x1_0001, 0xFFFF_FFFF])
def test_a_cq_head_beyond_what_is_completed_is_ignored_and_counted(host: RawHost, value: int) -> None:
    host.enable()
    host.submit(0, gemm(8, 40, 1), random(0, 1, 40))
    host.device.wait(1)
    host.register("CQ_HEAD", value)
    assert (host.read("CQ_HEAD"), host.read("QERRORS")) == (0, 1)
    host.register("CQ_HEAD", 1)
    assert (host.read("CQ_HEAD"), host.read("QERRORS")) == (1, 1)


def test_interrupts_are_sent_where_they_are_wanted(host: RawHost) -> None:
    vector = {"ADDRESS_LO": 0xFEE0_0000, "DATA": 77, "MASK": 0}
    for name, value in vector.items():
        host.device.mmio_write(vector_offset(1, name), value)
        assert host.device.mmio_read(vector_offset(1, name)) == value
    host.device.mmio_write(global_offset("MSIX"), 1)
    host.enable(VECTOR=1)
    host.submit(0, gemm(8, 40, 1), random(0, 1, 40))
    host.device.wait(1)
    assert host.device.messages == []
    host.register("CTRL", 3)
    host.submit(1, gemm(8, 40, 1), random(0, 1, 40))
    host.device.wait(1)
    assert host.device.messages == [(0xFEE0_0000, 77)]
    host.device.mmio_write(vector_offset(1, "MASK"), 1)
    host.submit(2, gemm(8, 40, 1), random(0, 1, 40))
    host.device.wait(1)
    assert host.device.mmio_read(PENDING_BASE) == 2 and len(host.device.messages) == 1
    host.device.mmio_write(vector_offset(1, "MASK"), 0)
    assert host.device.mmio_read(PENDING_BASE) == 0 and len(host.device.messages) == 2


def test_completions_are_gathered_by_count_and_time_and_forgotten_when_taken(host: RawHost) -> None:
    host.device.mmio_write(vector_offset(0, "MASK"), 0)
    host.device.mmio_write(global_offset("MSIX"), 1)
    host.enable(COALESCE=2, COALESCE_CYCLES=1000)
    host.register("CTRL", 3)
    sent = []
    for number in range(3):
        host.submit(number, gemm(8, 40, 1), random(0, 1, 40))
        host.device.wait(1)
        sent.append(len(host.device.messages))
    assert sent == [0, 1, 1]
    host.device.wait(1000)
    assert len(host.device.messages) == 2
    host.submit(3, gemm(8, 40, 1), random(0, 1, 40))
    host.device.wait(1)
    host.register("CQ_HEAD", 4)
    host.device.wait(2000)
    assert len(host.device.messages) == 2


def test_an_endless_chain_is_closed_at_its_limit(host: RawHost) -> None:
    host.device.mmio_write(global_offset("CHAIN_LIMIT"), 2)
    host.enable()
    for number in range(4):
        host.submit(number, replace(gemm(8, 40, 1), chain=int(number < 3)), random(0, 1, 40))
    host.device.wait(1)
    expected = [Status.OK, Status.OK, Status.CHAIN_BROKEN, Status.CHAIN_ABORTED]
    assert [host.status(index) for index in range(4)] == expected


def test_a_limit_below_the_length_of_an_open_chain_closes_it(host: RawHost) -> None:
    host.device.mmio_write(global_offset("CHAIN_LIMIT"), 0)
    host.enable()
    for number in range(2):
        host.submit(number, replace(gemm(8, 40, 1), chain=1), random(0, 1, 40))
    host.device.wait(1)
    host.device.mmio_write(global_offset("CHAIN_LIMIT"), 1)
    for number in range(2, 4):
        host.submit(number, replace(gemm(8, 40, 1), chain=int(number < 3)), random(0, 1, 40))
    host.device.wait(1)
    assert [host.status(index) for index in range(4)] == [Status.OK] * 3 + [Status.CHAIN_BROKEN]


def test_enabling_again_starts_over(host: RawHost) -> None:
    host.enable()
    host.submit(0, gemm(8, 40, 1), random(0, 1, 40))
    host.device.wait(1)
    host.register("CTRL", 0)
    host.first_pass = 9
    host.enable()
    assert (host.read("SQ_HEAD"), host.read("CQ_TAIL"), host.read("CQ_HEAD")) == (0, 0, 0)
    host.submit(0, gemm(8, 40, 1), random(0, 1, 40))
    host.device.wait(1)
    assert host.status(0) is Status.OK


def test_queues_do_not_see_each_other(host: RawHost) -> None:
    other = RawHost(host.device, queue=1, offset=0x8_0000)
    host.device.hdm_write(other.offset + W, pack_operand(random(7, 8, 40), CONFIG))
    host.enable()
    other.enable()
    x = random(3, 1, 40)
    host.submit(0, gemm(8, 40, 1, device_address=other.offset + W), x)  # the other's operand
    other.submit(0, other.product(gemm(8, 40, 1)), x)
    host.device.wait(1)
    assert host.status(0) is Status.OUT_OF_WINDOW
    assert same_bits(other.result(0, 1, 8), golden_gemm(x, random(7, 8, 40), CONFIG.accumulator).values)
    assert (host.read("QERRORS"), other.read("QERRORS")) == (1, 0)


# --- statuses ---------------------------------------------------------------------------------

REFUSED = {
    Status.BAD_TYPE: gemm(8, 40, 1, type=Type.LOAD),
    Status.BAD_OP: gemm(8, 40, 1, op=5),
    Status.BAD_DTYPE: gemm(8, 40, 1, dtype=DType.INT8),
    Status.BAD_FLAGS: gemm(8, 40, 1, keep=Keep.NEW),
    Status.BAD_RESERVED: gemm(8, 40, 1, reserved=8),
    Status.ZERO_DIMENSION: gemm(8, 40, 1, device_rows=0),
    Status.SHAPE_MISMATCH: gemm(8, 40, 2, op=Op.GEMV),
    Status.SIZE_MISMATCH: gemm(8, 40, 1, gpu_bytes=81),
    Status.MISALIGNED: gemm(8, 40, 1, device_address=W + 64),
    Status.OUT_OF_WINDOW: gemm(8, 40, 1, device_address=(1 << 64) - 128),
    Status.INPUT_TOO_LARGE: gemm(1, 1024 + 1, 1),
    Status.OUTPUT_TOO_LARGE: gemm(32 * 49, 8, 1),
    Status.WEIGHTS_TOO_LARGE: gemm(2, 1 << 14, 3, source=Source.CHAIN),
    Status.SLOT_OVERFLOW: gemm(8, 1024, 2),
    Status.CHAIN_BROKEN: gemm(8, 40, 1, source=Source.CHAIN),
}


@pytest.mark.parametrize("status", REFUSED, ids=lambda status: status.name)
def test_every_refusal_has_its_status_and_the_next_descriptor_runs(host: RawHost, status: Status) -> None:
    host.enable()
    host.submit(0, REFUSED[status], random(0, 1, 40))
    host.submit(1, gemm(8, 40, 1), random(0, 1, 40))
    before = host.device.memory.read(CQ + 64, (1 << LOG2) - 64)
    host.device.wait(1)
    completion = host.completion(0)
    assert completion is not None
    assert Status(completion.status) is status
    assert completion.result_bytes == 0
    assert completion.descriptor == REFUSED[status]
    assert host.device.memory.read(CQ + 64, (1 << LOG2) - 64) == before, "a refused descriptor wrote a result"
    assert host.status(1) is Status.OK


@pytest.mark.parametrize("where", ["operand", "weights", "result"])
def test_bad_memory_gives_a_status_and_aborts_the_chain(host: RawHost, where: str) -> None:
    host.enable()
    keeping = where != "result"
    first = gemm(8, 40, 1, chain=1, keep=Keep.NEW if keeping else Keep.NONE)
    host.submit(0, first, random(0, 1, 40))
    host.submit(1, gemm(8, 40, 1, source=Source.CHAIN))
    host.submit(2, gemm(8, 40, 1, device_address=0x2_0000), random(0, 1, 40))
    bad = {"operand": host.slot(0)[0] + operand_offset(CONFIG), "weights": W + 128, "result": host.slot(0)[1] + 64}
    host.device.memory.add_error_range(bad[where], 1)
    host.device.wait(1)
    assert [host.status(index) for index in range(3)] == [Status.MEMORY_ERROR, Status.CHAIN_ABORTED, Status.OK]


def test_a_slot_that_cannot_be_read_is_used_up_with_a_memory_error(host: RawHost) -> None:
    host.enable()
    host.submit(0, gemm(8, 40, 1), random(0, 1, 40))
    host.submit(1, gemm(8, 40, 1), random(0, 1, 40))
    host.device.memory.add_error_range(host.slot(0)[0], 64)
    host.device.wait(1)
    completion = host.completion(0)
    assert completion is not None
    assert Status(completion.status) is Status.MEMORY_ERROR
    assert completion.descriptor == Descriptor.unpack(bytes(64))
    assert host.status(1) is Status.OK


def test_memory_beyond_its_end_is_bad_memory() -> None:
    host = RawHost(FunctionalDevice(CONFIG, 0x2_0000))
    host.enable()
    host.submit(0, gemm(8, 40, 1, device_address=0x2_0000 - 512), random(0, 1, 40))
    host.device.wait(1)
    assert host.status(0) is Status.MEMORY_ERROR
    with pytest.raises(UserError, match="memory has 131072 bytes"):
        host.device.hdm_read(0x2_0000, 1)
    with pytest.raises(UserError, match="memory has 131072 bytes"):
        host.device.hdm_write(0x2_0000 - 1, b"xy")


# --- chains -----------------------------------------------------------------------------------


def test_a_kept_intermediate_grows_and_is_used(host: RawHost) -> None:
    a, b, x = random(1, 48, 40), random(2, 5, 48), random(3, 3, 40)
    first, second = pack_operand(a[:32], CONFIG), pack_operand(a[32:], CONFIG)
    host.device.hdm_write(W, first + second + pack_operand(b, CONFIG))
    host.enable()
    host.submit(2, gemm(5, 48, 3, source=Source.KEPT, device_address=W + len(first) + len(second)))
    host.submit(1, gemm(16, 40, 3, source=Source.CHAIN, keep=Keep.APPEND, chain=1, device_address=W + len(first)))
    host.submit(0, gemm(32, 40, 3, keep=Keep.NEW, chain=1), x)
    host.device.wait(1)
    m = golden_gemm(x, a, CONFIG.accumulator).values
    assert same_bits(host.result(2, 3, 5), golden_gemm(m, b, CONFIG.accumulator).values)
    assert [(c.result_bytes if (c := host.completion(i)) else None) for i in range(3)] == [0, 0, 3 * 64]


def test_accumulators_carry_on_over_descriptors(host: RawHost) -> None:
    w, x = random(1, 2, 100), random(2, 2, 100)
    parts = [pack_operand(np.ascontiguousarray(w[:, s]), CONFIG) for s in (slice(0, 33), slice(33, 100))]
    host.device.hdm_write(W, b"".join(parts))
    host.enable()
    host.submit(0, gemm(2, 33, 2, acc_out=1, chain=1), np.ascontiguousarray(x[:, :33]))
    host.submit(1, gemm(2, 67, 2, acc_in=1, device_address=W + len(parts[0])), np.ascontiguousarray(x[:, 33:]))
    host.device.wait(1)
    assert same_bits(host.result(1, 2, 2), golden_gemm(x, w, CONFIG.accumulator).values)


def test_a_failed_member_aborts_the_rest_of_its_chain_only(host: RawHost) -> None:
    host.enable()
    host.submit(0, gemm(8, 40, 1, chain=1, reserved=1), random(0, 1, 40))
    host.submit(1, gemm(8, 40, 1, chain=1, type=Type.STORE))  # its own fault does not matter any more
    host.submit(2, gemm(8, 40, 1))
    host.submit(3, gemm(8, 40, 1), random(0, 1, 40))
    host.device.wait(1)
    assert [host.status(index) for index in range(4)] == [
        Status.BAD_RESERVED,
        Status.CHAIN_ABORTED,
        Status.CHAIN_ABORTED,
        Status.OK,
    ]


def test_an_open_chain_holds_other_queues_until_its_time_is_out(host: RawHost) -> None:
    other = RawHost(host.device, queue=1, offset=0x8_0000)
    host.device.mmio_write(global_offset("CHAIN_TIMEOUT"), 1000)
    host.enable()
    other.enable()
    host.submit(0, gemm(8, 40, 1, chain=1), random(0, 1, 40))
    host.device.wait(1)
    other.submit(0, other.product(gemm(8, 40, 1)), random(0, 1, 40))
    host.device.wait(900)
    assert host.status(0) is Status.OK
    assert other.status(0) is None
    host.device.wait(200)
    assert other.status(0) is Status.OK
    host.submit(1, gemm(8, 40, 1, chain=1, source=Source.CHAIN))
    host.submit(2, gemm(8, 40, 1, source=Source.CHAIN))
    host.submit(3, gemm(8, 40, 1), random(0, 1, 40))
    host.device.wait(1)
    assert [host.status(i) for i in (1, 2, 3)] == [Status.CHAIN_BROKEN, Status.CHAIN_ABORTED, Status.OK]


def test_a_member_that_comes_in_time_goes_on(host: RawHost) -> None:
    host.device.mmio_write(global_offset("CHAIN_TIMEOUT"), 1000)
    host.enable()
    for index in range(4):
        last = index == 3
        d = gemm(8, 40, 1, chain=int(not last), source=Source.SLOT if index == 0 else Source.CHAIN)
        host.submit(index, d, random(0, 1, 40) if index == 0 else None)
        host.device.wait(999)
    assert [host.status(index) for index in range(4)] == [Status.OK] * 4


def test_disabling_a_queue_frees_the_core_from_its_chain(host: RawHost) -> None:
    other = RawHost(host.device, queue=1, offset=0x8_0000)
    host.enable()
    other.enable()
    host.submit(0, gemm(8, 40, 1, chain=1), random(0, 1, 40))
    host.device.wait(1)
    host.register("CTRL", 0)
    other.submit(0, other.product(gemm(8, 40, 1)), random(0, 1, 40))
    host.device.wait(1)
    assert other.status(0) is Status.OK
    host.first_pass = 5
    host.enable()
    host.submit(0, gemm(8, 40, 1, source=Source.CHAIN))
    host.device.wait(1)
    assert host.status(0) is Status.CHAIN_BROKEN, "a chain survived its queue"


# --- disorder ---------------------------------------------------------------------------------


def run_without_fence(seed: int) -> bool:
    """Submit with the operand still on its way; True if the device used what was there before."""
    device = FunctionalDevice(CONFIG, 1 << 20, reorder_seed=seed)
    host = RawHost(device)
    device.hdm_write(W, pack_operand(np.ones((8, 40), np.float16), CONFIG))
    host.enable()
    device.hdm_fence()
    address, _, _ = host.slot(0)
    device.hdm_write(address + operand_offset(CONFIG), gpu_operand_bytes(np.ones((1, 40), np.float16), CONFIG))
    device.hdm_write(address, submission_line(gemm(8, 40, 1), 1))
    while host.completion(0) is None:
        device.wait(1)
    return not np.all(host.result(0, 1, 8) == 40)


def test_disorder_is_real_without_the_fence() -> None:
    assert any(run_without_fence(seed) for seed in range(20))


@given(st.integers(0, 1000))
def test_with_the_fence_disorder_does_no_harm(seed: int) -> None:
    device = FunctionalDevice(CONFIG, 1 << 20, reorder_seed=seed)
    host = RawHost(device)
    device.hdm_write(W, pack_operand(np.ones((8, 40), np.float16), CONFIG))
    host.enable()
    address, _, _ = host.slot(0)
    host.register("DOORBELL", 1)
    device.hdm_write(address + operand_offset(CONFIG), gpu_operand_bytes(np.ones((1, 40), np.float16), CONFIG))
    device.hdm_fence()
    device.hdm_write(address, submission_line(gemm(8, 40, 1), 1))
    while host.completion(0) is None:
        device.wait(1)
    assert np.all(host.result(0, 1, 8) == 40)


@pytest.mark.parametrize("size", [0, -128, 100, (1 << 24) + 128])
def test_a_memory_size_that_makes_no_sense_is_refused(size: int) -> None:
    with pytest.raises(UserError, match="takes a multiple of 128"):
        FunctionalDevice(CONFIG, size)
