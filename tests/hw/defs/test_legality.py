"""Each status is reached by one fault, the first fault wins, and no address sum can wrap."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plora.hw.defs.config import PRESETS
from plora.hw.defs.descriptor import FIELDS, Descriptor, DType, Keep, Op, Source, Type
from plora.hw.defs.legality import ChainState, QueueWindow, RingSetup, check, in_window, ring_setup_allowed
from plora.hw.defs.packing import pack_geometry
from plora.hw.defs.status import Status

TINY = PRESETS["tiny"]
MEMORY = 1 << TINY.dpa_bits
WINDOW = QueueWindow(base=0x10000, limit=0x80000, submission_slot_bytes=1 << 12, result_slot_bytes=1 << 12)


def legal(rows: int = 8, columns: int = 64, batch: int = 2, **fields: int) -> Descriptor:
    """A descriptor of that shape that is right in every respect but those given."""
    right = Descriptor(
        device_address=WINDOW.base,
        device_bytes=pack_geometry(TINY, rows, columns).packed_bytes,
        device_rows=rows,
        device_columns=columns,
        gpu_bytes=batch * columns * 2,
        gpu_rows=batch,
        gpu_columns=columns,
    )
    return replace(right, **fields)


FAULTS: list[tuple[Status, Descriptor]] = [
    (Status.BAD_TYPE, legal(type=Type.LOAD)),
    (Status.BAD_TYPE, legal(type=Type.NONE)),
    (Status.BAD_OP, legal(op=Op.NONE)),
    (Status.BAD_OP, legal(op=7)),
    (Status.BAD_DTYPE, legal(dtype=DType.INT4)),
    (Status.BAD_FLAGS, legal(source=3)),
    (Status.BAD_FLAGS, legal(keep=3, chain=1)),
    (Status.BAD_FLAGS, legal(keep=Keep.NEW)),
    (Status.BAD_FLAGS, legal(acc_out=1)),
    (Status.BAD_FLAGS, legal(chain=1, keep=Keep.NEW, acc_out=1)),
    (Status.BAD_FLAGS, legal(chain=1, keep=Keep.NEW, source=Source.KEPT)),
    (Status.BAD_RESERVED, legal(reserved=1)),
    (Status.ZERO_DIMENSION, legal(device_rows=0)),
    (Status.ZERO_DIMENSION, legal(device_columns=0)),
    (Status.ZERO_DIMENSION, legal(gpu_rows=0)),
    (Status.ZERO_DIMENSION, legal(gpu_columns=0)),
    (Status.SHAPE_MISMATCH, legal(gpu_columns=63)),
    (Status.SHAPE_MISMATCH, legal(op=Op.GEMV)),
    (Status.SHAPE_MISMATCH, legal(chain=1, acc_out=1, batch=4)),
    (Status.SHAPE_MISMATCH, legal(columns=257, source=Source.KEPT)),
    (Status.SIZE_MISMATCH, legal(gpu_bytes=2 * 64 * 2 - 1)),
    (Status.SIZE_MISMATCH, legal(device_bytes=1)),
    (Status.MISALIGNED, legal(device_address=WINDOW.base + 64)),
    (Status.OUT_OF_WINDOW, legal(device_address=WINDOW.base - 128)),
    (Status.OUT_OF_WINDOW, legal(device_address=WINDOW.limit)),
    (Status.OUT_OF_WINDOW, legal(device_address=(1 << 64) - 128)),
    (Status.INPUT_TOO_LARGE, legal(columns=2048)),
    (Status.OUTPUT_TOO_LARGE, legal(rows=300, keep=Keep.NEW, chain=1)),
    (Status.OUTPUT_TOO_LARGE, legal(rows=3200, columns=8)),
    (Status.WEIGHTS_TOO_LARGE, legal(columns=1056, batch=4, source=Source.CHAIN)),
    (Status.SLOT_OVERFLOW, legal(rows=1024, columns=8, batch=2)),
    (Status.SLOT_OVERFLOW, legal(columns=1024)),
    (Status.CHAIN_BROKEN, legal(rows=2, acc_in=1)),
    (Status.CHAIN_BROKEN, legal(source=Source.KEPT)),
    (Status.CHAIN_BROKEN, legal(source=Source.CHAIN)),
    (Status.CHAIN_BROKEN, legal(keep=Keep.APPEND, chain=1)),
]


@pytest.mark.parametrize("rows", [1, 2, 31, 33, 64])
@pytest.mark.parametrize("columns", [1, 8, 9, 16, 17, 32, 33, 64, 300])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_right_descriptors_are_accepted(rows: int, columns: int, batch: int) -> None:
    assert check(legal(rows, columns, batch), TINY, WINDOW).status is Status.OK


@pytest.mark.parametrize(("status", "d"), FAULTS, ids=[f"{i}-{s.name}" for i, (s, _) in enumerate(FAULTS)])
def test_one_fault_gives_its_status(status: Status, d: Descriptor) -> None:
    assert check(d, TINY, WINDOW).status is status, d.describe()


def test_every_status_that_a_decoder_gives_is_in_the_list_of_faults() -> None:
    outside = {Status.OK, Status.CHAIN_ABORTED, Status.MEMORY_ERROR, Status.ABORTED}
    assert {status for status, _ in FAULTS} == set(Status) - outside


@given(st.builds(Descriptor, **{f.name: st.integers(0, (1 << f.width) - 1) for f in FIELDS}))
def test_any_encoding_gets_a_status(d: Descriptor) -> None:
    assert check(d, TINY, WINDOW).status in Status


def test_the_first_fault_wins() -> None:
    d = legal(type=Type.STORE, op=7, reserved=3, device_rows=0, device_address=1)
    assert check(d, TINY, WINDOW).status is Status.BAD_TYPE
    assert check(replace(d, type=Type.READ_COMPUTE), TINY, WINDOW).status is Status.BAD_OP


def test_chain_carries_kept_columns_operand_and_sums() -> None:
    first = check(legal(32, 64, 2, keep=Keep.NEW, chain=1), TINY, WINDOW)
    assert (first.chain.kept_rows, first.chain.kept_columns) == (2, 32)
    more = check(legal(32, 64, 2, keep=Keep.APPEND, chain=1, source=Source.CHAIN), TINY, WINDOW, first.chain)
    assert more.status is Status.OK and more.chain.kept_columns == 64
    last = check(legal(16, 64, 2, source=Source.KEPT), TINY, WINDOW, more.chain)
    assert (last.status, last.chain) == (Status.OK, ChainState())
    sums = check(legal(2, 64, 2, chain=1, acc_out=1), TINY, WINDOW)
    assert sums.chain.acc_terms == 64
    assert check(legal(2, 64, 2, acc_in=1), TINY, WINDOW, sums.chain).status is Status.OK
    assert check(legal(1, 64, 2, acc_in=1), TINY, WINDOW, sums.chain).status is Status.CHAIN_BROKEN
    assert check(legal(2, 64, 2), TINY, WINDOW, sums.chain).status is Status.CHAIN_BROKEN


@given(st.integers(0, (1 << 64) - 1), st.integers(0, 1 << 20), st.integers(0, MEMORY), st.integers(0, 1 << 65))
def test_in_window_is_set_inclusion(address: int, size: int, base: int, limit: int) -> None:
    expected = limit <= MEMORY and base <= address < limit and address + size <= limit
    assert in_window(address, size, base, limit, MEMORY) is expected


SETUP = RingSetup(
    base=0x10000,
    limit=0x20000,
    depth=4,
    submission_base=0x10000,
    submission_slot_log2=13,
    result_base=0x18000,
    result_slot_log2=13,
)


def test_rings_that_fill_the_window_exactly_are_allowed() -> None:
    assert ring_setup_allowed(TINY, SETUP)


@pytest.mark.parametrize(
    "change",
    [
        {"depth": 1},
        {"depth": 0},
        {"depth": 5},
        {"depth": 4097},
        {"submission_slot_log2": 10},
        {"submission_slot_log2": 15},
        {"submission_slot_log2": 25},
        {"result_slot_log2": 10},
        {"result_slot_log2": 31},
        {"submission_base": 0x10040},
        {"submission_base": 0xFF80},
        {"submission_base": 0x18080},
        {"result_base": 0x18020},
        {"result_base": 0x18040},
        {"result_base": 0x20000},
        {"result_base": (1 << 64) - 64},
        {"base": 0x10001},
        {"base": 0x20000},
        {"limit": 0x1FFFF},
        {"limit": 0},
        {"limit": MEMORY + 1},
        {"limit": (1 << 64) - 1},
    ],
    ids=str,
)
def test_one_fault_refuses_the_set_up(change: dict[str, int]) -> None:
    assert not ring_setup_allowed(TINY, replace(SETUP, **change))
