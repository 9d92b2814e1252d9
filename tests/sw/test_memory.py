"""The allocator never hands out a byte twice, and gets all of them back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plora.hw.defs.errors import UserError
from plora.sw.memory import HdmAllocator, Region

BASE, LIMIT, GRANULE = 0x1000, 0x1_1040, 128


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9000), st.sampled_from([1, 64, 256, 4096]))))
def test_regions_are_aligned_disjoint_and_inside_and_freed_ones_are_whole_again(
    steps: list[tuple[bool, int, int]],
) -> None:
    allocator = HdmAllocator(BASE, LIMIT, GRANULE)
    total = allocator.free_bytes
    held: list[Region] = []
    for free, size, alignment in steps:
        if free and held:
            allocator.free(held.pop(size % len(held)))
            continue
        try:
            region = allocator.allocate(size, "x", alignment)
        except UserError:
            continue
        assert region.address % max(GRANULE, alignment) == 0
        assert region.size_bytes >= size
        assert region.address >= BASE
        assert region.end <= LIMIT
        assert all(region.end <= other.address or other.end <= region.address for other in held)
        held.append(region)
        assert allocator.free_bytes == total - sum(other.size_bytes for other in held)
    assert set(allocator.held) == set(held)
    for region in held:
        allocator.free(region)
    assert allocator.allocate(total, "all").size_bytes == total


def test_a_full_memory_says_what_is_free_and_in_how_large_a_piece() -> None:
    allocator = HdmAllocator(0, 1024, 128)
    parts = [allocator.allocate(128, f"part {i}") for i in range(8)]
    allocator.free(parts[1])
    allocator.free(parts[3])
    with pytest.raises(
        UserError, match="adapter needs 256 bytes in one piece, 256 are free, the largest piece has 128"
    ):
        allocator.allocate(200, "adapter")


def test_giving_back_twice_or_what_is_not_held_is_refused() -> None:
    allocator = HdmAllocator(0, 1024, 128)
    region = allocator.allocate(100, "x")
    allocator.free(region)
    for wrong in (region, Region("y", 256, 128)):
        with pytest.raises(UserError, match="is not held"):
            allocator.free(wrong)


@pytest.mark.parametrize(("base", "limit", "granule"), [(64, 1024, 128), (0, 0, 128), (1024, 512, 128), (0, 64, 96)])
def test_a_range_that_makes_no_sense_is_refused(base: int, limit: int, granule: int) -> None:
    with pytest.raises(UserError, match="device memory"):
        HdmAllocator(base, limit, granule)


@pytest.mark.parametrize(("size", "alignment"), [(0, 1), (-5, 1), (64, 3), (64, 0)])
def test_a_request_that_makes_no_sense_is_refused(size: int, alignment: int) -> None:
    with pytest.raises(UserError, match="choose at least one byte and a power of two"):
        HdmAllocator(0, 1024, 64).allocate(size, "x", alignment)
