"""Sparse memory behaves like a bytearray of the same size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plora.sim.functional.memory import PAGE_BYTES, MemoryFault, SparseMemory

SIZE = 4 * PAGE_BYTES
near_pages = st.integers(0, 3).flatmap(lambda page: st.integers(-70, 70).map(lambda d: max(0, page * PAGE_BYTES + d)))


@given(st.lists(st.tuples(near_pages, st.binary(max_size=200)), max_size=20), near_pages, st.integers(0, 300))
def test_it_is_a_bytearray(writes: list[tuple[int, bytes]], address: int, size: int) -> None:
    memory, plain = SparseMemory(SIZE, fill=0xA5), bytearray([0xA5]) * SIZE
    for start, data in writes:
        memory.write(start, data)
        plain[start : start + len(data)] = data
    assert memory.read(address, size) == plain[address : address + size]


def test_half_a_terabyte_costs_what_is_written() -> None:
    memory = SparseMemory(512 << 30)
    assert memory.read((512 << 30) - 64, 64) == bytes(64)
    assert memory.resident_bytes == 0
    memory.write(300 << 30, b"x")
    assert memory.resident_bytes == PAGE_BYTES
    assert memory.read((300 << 30) - 1, 3) == b"\0x\0"


@pytest.mark.parametrize(("address", "size"), [(SIZE, 1), (SIZE - 1, 2), (1 << 63, 64), (-1, 1)])
def test_accesses_beyond_the_end_fault_and_change_nothing(address: int, size: int) -> None:
    memory = SparseMemory(SIZE)
    with pytest.raises(MemoryFault):
        memory.read(address, size)
    with pytest.raises(MemoryFault):
        memory.write(address, b"\xff" * size)
    assert memory.resident_bytes == 0


def test_the_last_byte_is_there() -> None:
    memory = SparseMemory(SIZE)
    memory.write(SIZE - 1, b"z")
    assert memory.read(SIZE - 1, 1) == b"z"
    assert memory.read(SIZE, 0) == b""


def test_error_ranges_fault_where_they_overlap_and_nowhere_else() -> None:
    memory = SparseMemory(SIZE)
    memory.add_error_range(128, 64)
    for address, size in ((64, 65), (128, 1), (191, 1), (100, 200)):
        with pytest.raises(MemoryFault, match="is in error"):
            memory.read(address, size)
    memory.write(64, bytes(64))
    memory.write(192, bytes(64))


@pytest.mark.parametrize(("size", "fill"), [(-1, 0), (64, 256)])
def test_a_memory_that_makes_no_sense_is_refused(size: int, fill: int) -> None:
    with pytest.raises(ValueError, match="need a size"):
        SparseMemory(size, fill)
