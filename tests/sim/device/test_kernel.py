"""The walk through the device: order, back-pressure, chains, polling and time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plora.hw.defs.config import NdpConfig, preset
from plora.hw.defs.descriptor import Descriptor
from plora.sim.core.demand import Demand, demands, shapes_of
from plora.sim.core.memory import MemoryTiming
from plora.sim.device.kernel import NEVER, DeviceKernel, RingPlace, Unresolved

SMALL = preset("small")


def place(queue: int, depth: int = 64, *, interrupts: bool = False) -> RingPlace:
    base = queue << 24
    return RingPlace(depth, base, 256, base + (1 << 23), 256, interrupts)


def demand(n: int, k: int, b: int = 1, config: NdpConfig = SMALL) -> Demand:
    d = Descriptor(device_rows=n, device_columns=k, gpu_rows=b, device_address=1 << 29)
    return next(iter(demands(config, shapes_of(config, [d])).rows()))


IDEAL = MemoryTiming()


def device(queues: int = 1, depth: int = 64, timing: MemoryTiming = IDEAL, **settings: float) -> DeviceKernel:
    kernel = DeviceKernel(SMALL, timing, **{"poll_interval_cycles": NEVER, **settings})
    for queue in range(queues):
        kernel.enable(queue, place(queue, depth), 0)
    kernel.advance(1000)
    return kernel


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 60), st.integers(1, 600), st.integers(1, 6), st.booleans()),
        min_size=1,
        max_size=30,
    ),
    st.sampled_from([0.0, 0.3]),
)
def test_everything_completes_once_and_each_queue_in_order(
    jobs: list[tuple[int, int, int, int, bool]], stall: float
) -> None:
    kernel = device(4, timing=MemoryTiming(stall=stall))
    counts = [0] * 4
    for tag, (queue, n, k, b, refused) in enumerate(jobs):
        kernel.publish(queue, counts[queue], [demand(n, k, b)], published=1000, tag=tag, refused=[refused])
        counts[queue] += 1
    for queue in range(4):
        kernel.ring_doorbell(queue, 1004)
    assert kernel.advance(NEVER) == NEVER
    done = kernel.completions()
    assert sorted(done["tag"]) == list(range(len(jobs)))
    for queue in range(4):
        own = done[done["queue"] == queue]
        assert own["number"].tolist() == list(range(counts[queue]))
        assert (np.diff(own["completed"]) > 0).all()
    for row in done:
        refused = jobs[row["tag"]][4]
        assert refused == (row["first_beat"] == NEVER)
        if not refused:
            assert 1000 < row["fetched"] < row["first_beat"] <= row["last_beat"] < row["completed"]
    assert len(kernel.completions()) == 0


def test_walking_in_small_steps_changes_nothing() -> None:
    def run(step: float) -> list[tuple[float, ...]]:
        kernel = device(2)
        for queue in range(2):
            kernel.publish(queue, 0, [demand(20, 500), demand(3, 40, 4)], published=1000, tag=10 * queue)
            kernel.ring_doorbell(queue, 1004)
        present = 1000.0
        while present < 4000:
            present += step
            kernel.advance(present)
        return [tuple(row) for row in kernel.completions()]

    assert run(1) == run(7) == run(3000)


def test_a_descriptor_that_comes_after_its_doorbell_waits_for_the_next_look() -> None:
    kernel = device()
    kernel.ring_doorbell(0, 1004)
    kernel.advance(1500)
    kernel.publish(0, 0, [demand(4, 64)], published=1500, tag=0)
    assert kernel.advance(5000) == NEVER
    assert len(kernel.completions()) == 0
    kernel.ring_doorbell(0, 5000)
    kernel.advance(NEVER)
    assert len(kernel.completions()) == 1


def test_polling_finds_a_descriptor_without_a_doorbell() -> None:
    kernel = device(poll_interval_cycles=64)
    kernel.publish(0, 0, [demand(4, 64)], published=1100, tag=0)
    kernel.advance(1100 + 64 * 2**7 + 500)
    (done,) = kernel.completions()
    assert done["fetched"] > 1100


def test_a_full_completion_ring_holds_the_device_back_until_the_host_takes() -> None:
    kernel = device(depth=2)
    kernel.publish(0, 0, [demand(4, 64)] * 3, published=1000, tag=0)
    kernel.ring_doorbell(0, 1004)
    kernel.advance(20_000)
    assert kernel.completions()["tag"].tolist() == [0, 1]
    kernel.take(0, 1, 20_000)
    kernel.advance(40_000)
    (third,) = kernel.completions()
    assert third["completed"] > 20_000


def test_an_open_chain_holds_other_queues_off() -> None:
    kernel = device(2, chain_timeout_cycles=NEVER)
    kernel.publish(0, 0, [demand(4, 64)], published=1000, tag=0, chain=[True])
    kernel.ring_doorbell(0, 1004)
    kernel.advance(1200)
    kernel.publish(1, 0, [demand(4, 64)], published=1200, tag=1)
    kernel.ring_doorbell(1, 1204)
    kernel.advance(10_000)
    assert kernel.completions()["tag"].tolist() == [0]
    kernel.publish(0, 1, [demand(4, 64)], published=10_000, tag=2)
    kernel.ring_doorbell(0, 10_004)
    kernel.advance(NEVER)
    assert kernel.completions()["tag"].tolist() == [2, 1]


def test_a_chain_that_does_not_go_on_in_time_is_closed_and_the_next_is_told_so() -> None:
    kernel = device(2, chain_timeout_cycles=500)
    kernel.publish(0, 0, [demand(4, 64)], published=1000, tag=0, chain=[True])
    kernel.publish(1, 0, [demand(4, 64)], published=1000, tag=1)
    kernel.ring_doorbell(0, 1004)
    kernel.ring_doorbell(1, 1005)
    kernel.advance(5000)
    done = kernel.completions()
    assert done["tag"].tolist() == [0, 1]
    assert done["fetched"][1] > done["fetched"][0] + 500
    kernel.publish_unresolved(0, 1, published=5000, tag=2)
    kernel.ring_doorbell(0, 5004)
    wanted = kernel.advance(9000)
    assert isinstance(wanted, Unresolved)
    assert (wanted.queue, wanted.number, wanted.tag, wanted.broken) == (0, 1, 2, 1)
    kernel.resolve(wanted, None, chain=False)
    kernel.advance(NEVER)
    assert kernel.completions()["tag"].tolist() == [2]


def test_a_disabled_queue_completes_nothing_and_can_be_enabled_again() -> None:
    kernel = device(2)
    kernel.publish(0, 0, [demand(40, 4000)] * 3, published=1000, tag=0)
    kernel.ring_doorbell(0, 1004)
    kernel.advance(1300)
    assert kernel.busy(0)
    kernel.disable(0)
    kernel.publish(1, 0, [demand(4, 64)], published=1300, tag=9)
    kernel.ring_doorbell(1, 1304)
    kernel.advance(NEVER)
    assert kernel.completions()["tag"].tolist() == [9]
    assert not kernel.busy(0)
    kernel.enable(0, place(0), 100_000)
    kernel.publish(0, 0, [demand(4, 64)], published=100_000, tag=5)
    kernel.ring_doorbell(0, 100_004)
    kernel.advance(NEVER)
    assert kernel.completions()["tag"].tolist() == [5]


@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (1, 7)])
def test_busy_queues_are_served_by_their_weights(weights: tuple[int, int]) -> None:
    kernel = DeviceKernel(SMALL, MemoryTiming(), poll_interval_cycles=NEVER)
    for queue, weight in enumerate(weights):
        kernel.enable(queue, replace(place(queue, 1024), weight=weight), 0)
        kernel.publish(queue, 0, [demand(4, 64)] * 400, published=0, tag=400 * queue)
    kernel.advance(NEVER)
    steady = kernel.completions()["queue"][40:360].tolist()
    assert steady.count(0) / len(steady) == pytest.approx(weights[0] / sum(weights), abs=0.02)


def test_share_bounds_the_words_on_their_way() -> None:
    """With SHARE s, s words come in every round trip: a burst of 64 goes when the one s words before it has come."""

    def words_a_cycle(share: int) -> float:
        kernel = device(timing=MemoryTiming(400, 20))
        kernel.set_registers(poll_interval_cycles=NEVER, chain_timeout_cycles=NEVER, share=share)
        kernel.publish(0, 0, [demand(64, 4096)] * 20, published=1000, tag=0)
        kernel.ring_doorbell(0, 1004)
        kernel.advance(NEVER)
        done = kernel.completions()["completed"]
        return kernel.words_read / SMALL.channels / float(done[-1] - 1004)

    for share in (64, 128):
        assert words_a_cycle(share) == pytest.approx(share / (400 + 64), rel=0.05)
    assert words_a_cycle(0) > words_a_cycle(256) > 1.2 * words_a_cycle(128)


def test_a_burst_that_waits_lets_single_lines_go_first() -> None:
    """A line that is asked for while SHARE holds back a burst is answered before that burst's words."""
    kernel = device(timing=MemoryTiming(400, 20))
    kernel.publish(0, 0, [demand(64, 4096)], published=1000, tag=0)
    kernel.ring_doorbell(0, 1004)
    kernel.advance(1600)
    # By then 256 words are owed, the last of them about 400 + 256 cycles after they were asked for.
    assert kernel.load_line(5, 1600) < 1600 + 400 + 64


def test_interrupts_follow_completions() -> None:
    kernel = DeviceKernel(SMALL, MemoryTiming(), poll_interval_cycles=NEVER)
    kernel.enable(0, place(0, interrupts=True), 0)
    kernel.publish(0, 0, [demand(4, 64)], published=0, tag=0)
    kernel.advance(NEVER)
    (done,), (signal,) = kernel.completions(), kernel.interrupts()
    assert signal["queue"] == 0
    assert done["completed"] < signal["cycle"] < done["completed"] + 20


@pytest.mark.parametrize(
    "slower",
    [MemoryTiming(80, 20), MemoryTiming(40, 60), MemoryTiming(40, 20, 0.2), MemoryTiming(40, 20, 0.0, 1.4)],
)
def test_a_slower_memory_makes_a_stream_slower(slower: MemoryTiming) -> None:
    def last(timing: MemoryTiming) -> float:
        kernel = device(timing=timing)
        kernel.publish(0, 0, [demand(30, 800), demand(3, 40, 4)] * 10, published=1000, tag=0)
        kernel.ring_doorbell(0, 1004)
        kernel.advance(NEVER)
        return float(kernel.completions()["completed"].max())

    assert last(slower) > last(MemoryTiming()) + 30


def test_host_traffic_slows_a_stream_down_and_is_slowed_down_by_it() -> None:
    def run(lines: int) -> tuple[float, float]:
        kernel = device()
        kernel.publish(0, 0, [demand(60, 8000)], published=1000, tag=0)
        kernel.ring_doorbell(0, 1004)
        cycle = 1300.0
        arrived = 0.0
        for _ in range(lines):
            kernel.advance(cycle)
            arrived = kernel.load_line(0, cycle) - cycle
            cycle += 2
        kernel.advance(NEVER)
        (done,) = kernel.completions()
        return float(done["completed"]), arrived

    alone, _ = run(0)
    with_host, arrived = run(200)
    assert alone + 150 < with_host < alone + 250
    assert arrived > 41


def test_memory_does_not_grow_with_the_number_of_descriptors() -> None:
    resource = pytest.importorskip("resource")
    kernel = device(depth=4096)
    before = 0
    for batch in range(40):
        kernel.publish(0, batch * 1000, [demand(4, 64)] * 1000, published=0, tag=batch * 1000)
        kernel.ring_doorbell(0, 1e6 * batch + 1004)
        kernel.advance(1e6 * (batch + 1))
        assert len(kernel.completions()) == 1000
        kernel.take(0, (batch + 1) * 1000, 1e6 * (batch + 1))
        if batch == 9:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2048  # KiB
