"""Posted writes: any order until a fence, but never another result behind it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plora.sim.functional.posted import LONGEST_FLIGHT_CYCLES, PostedWrites

writes = st.lists(st.tuples(st.integers(0, 300), st.binary(min_size=1, max_size=150)), max_size=12)


class Bench:
    def __init__(self, seed: int | None) -> None:
        self.memory = bytearray(512)
        self.registers: list[tuple[int, int]] = []
        self.landed: list[int] = []
        self.posted = PostedWrites(self.store, lambda offset, value: self.registers.append((offset, value)), seed)

    def store(self, address: int, data: bytes) -> None:
        assert address // 64 == (address + len(data) - 1) // 64, "a write was not cut into lines"
        self.memory[address : address + len(data)] = data
        self.landed.append(address // 64)


@given(st.integers(0, 50), writes, st.integers(0, 10))
def test_behind_a_fence_memory_is_as_if_nothing_had_been_reordered(
    seed: int, stores: list[tuple[int, bytes]], landings: int
) -> None:
    bench, plain = Bench(seed), bytearray(512)
    for address, data in stores:
        bench.posted.hdm(address, data)
        plain[address : address + len(data)] = data
        assert bench.posted.overlay(0, bytes(bench.memory)) == plain, "the writer does not see its own store"
        for _ in range(landings):
            bench.posted.land_some(1)
    bench.posted.fence()
    assert bench.memory == plain
    assert bench.posted.pending == 0


def test_lines_do_land_out_of_order() -> None:
    orders = set()
    for seed in range(20):
        bench = Bench(seed)
        for line in range(4):
            bench.posted.hdm(64 * line, b"x")
        for _ in range(200):
            bench.posted.land_some(1)
        assert sorted(bench.landed) == [0, 1, 2, 3]
        orders.add(tuple(bench.landed))
    assert len(orders) > 5


def test_register_writes_keep_their_order_but_overtake_and_are_overtaken() -> None:
    first = set()
    for seed in range(20):
        bench = Bench(seed)
        bench.posted.hdm(0, b"x")
        bench.posted.mmio(0, 1)
        bench.posted.mmio(4, 2)
        while bench.posted.pending:
            bench.posted.land_some(1)
            if bench.landed or bench.registers:
                first.add("store" if bench.landed and not bench.registers else "register" if not bench.landed else "")
        assert bench.registers == [(0, 1), (4, 2)]
    assert {"store", "register"} <= first


def test_without_a_seed_nothing_is_posted() -> None:
    landed: list[int] = []
    posted = PostedWrites(lambda address, _: landed.append(address), lambda *_: None, None)
    posted.hdm(5, bytes(200))
    posted.mmio(0, 1)
    assert landed == [5]
    assert posted.pending == 0


def test_a_long_wait_lets_everything_land() -> None:
    bench = Bench(1)
    for line in range(6):
        bench.posted.hdm(64 * line, b"x")
        bench.posted.mmio(0, line)
    while bench.posted.land_some(LONGEST_FLIGHT_CYCLES):
        pass
    assert bench.posted.pending == 0
    assert bench.landed != sorted(bench.landed)
