"""Round robin: nobody who keeps asking waits for more than one grant of each other."""

import gc
from typing import Any

import pytest
from amaranth.sim import Simulator
from hypothesis import given, settings
from hypothesis import strategies as st

from plora.hw.rtl.front.round_robin import RoundRobin


def grants(count: int, patterns: list[int]) -> list[tuple[int, int]]:
    """(any, grant) of each cycle; every grant is taken."""
    dut = RoundRobin(count)
    seen: list[tuple[int, int]] = []

    async def bench(ctx: Any) -> None:
        ctx.set(dut.taken, 1)
        for pattern in patterns:
            ctx.set(dut.requests, pattern)
            _, _, some, grant = await ctx.tick().sample(dut.any, dut.grant)
            seen.append((some, grant))

    simulator = Simulator(dut)
    simulator.add_clock(1e-9)
    simulator.add_testbench(bench)
    simulator.run()
    return seen


@given(st.integers(1, 9), st.lists(st.integers(0, 511), min_size=1, max_size=30))
@settings(max_examples=25)
def test_a_grant_goes_to_a_requester_and_exists_if_there_is_one(count: int, raw: list[int]) -> None:
    patterns = [value % (1 << count) for value in raw]
    for pattern, (some, grant) in zip(patterns, grants(count, patterns), strict=True):
        assert some == (pattern != 0)
        assert not some or pattern >> grant & 1


@given(st.integers(2, 6), st.data())
@settings(max_examples=25)
def test_between_two_grants_of_one_every_other_is_granted_once_at_most(count: int, data: st.DataObject) -> None:
    patient = data.draw(st.integers(0, count - 1))
    patterns = [
        pattern | 1 << patient
        for pattern in data.draw(st.lists(st.integers(0, (1 << count) - 1), min_size=20, max_size=20))
    ]
    waited: list[int] = []
    for _, grant in grants(count, patterns):
        if grant == patient:
            waited = []
        else:
            assert grant not in waited, f"{grant} twice while {patient} waited"
            waited.append(grant)


@pytest.mark.parametrize("count", [0, -1, 2.0])
@pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")
def test_count_must_be_positive(count: object) -> None:
    with pytest.raises(TypeError, match="positive integer"):
        RoundRobin(count)  # type: ignore[arg-type]
    gc.collect()  # here, where its never having been used is forgiven
