"""The closed form agrees with the walk: for a descriptor alone to the cycle, for long streams to a few percent."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from plora.hw.defs.config import NdpConfig, preset
from plora.hw.defs.descriptor import MAX_OPERAND_BYTES, Descriptor
from plora.hw.defs.packing import ceil_div, operand_row_stripes, pack_geometry
from plora.sim.core.closed import BOUNDS, alone, interval
from plora.sim.core.constants import load_constants
from plora.sim.core.demand import Demand, Demands, demands, shapes_of
from plora.sim.core.memory import MemoryTiming
from plora.sim.device.kernel import NEVER, DeviceKernel, RingPlace

PLACE = RingPlace(depth=4096, submission_line=0, submission_lines=1 << 12, result_line=1 << 25, result_lines=1 << 10)


def demand_of(config: NdpConfig, n: int, k: int, b: int, stripe: int = 0, operand: int = 0) -> Demands:
    d = Descriptor(device_rows=n, device_columns=k, gpu_rows=b, device_address=stripe * config.stripe_bytes)
    return demands(config, shapes_of(config, [d], [operand * config.stripe_bytes], [0]))


@settings(max_examples=150)
@given(
    st.sampled_from(["small", "full"]),
    st.integers(1, 400),
    st.integers(1, 4096),
    st.integers(1, 12),
    st.integers(0, 200),
    st.integers(0, 200),
    st.sampled_from([20, 40, 100]),
)
def test_a_descriptor_alone_takes_what_the_walk_says(
    name: str, n: int, k: int, b: int, stripe: int, operand: int, latency: int
) -> None:
    config, timing = preset(name), MemoryTiming(latency, latency // 2)
    geometry, pairs = pack_geometry(config, n, k), ceil_div(b, 2)
    assume(geometry.packed_bytes <= MAX_OPERAND_BYTES)
    assume(pairs * operand_row_stripes(config, k) <= config.input_half_stripes)
    wanted = demand_of(config, n, k, b, stripe, operand)
    kernel = DeviceKernel(config, timing, poll_interval_cycles=NEVER)
    kernel.enable(0, PLACE, 0)
    kernel.advance(10_000)
    kernel.publish(0, 0, wanted, published=10_000, tag=0)
    kernel.ring_doorbell(0, 10_004)
    kernel.advance(NEVER)
    (walked,) = kernel.completions()
    closed = alone(config, wanted, timing)
    c = load_constants()
    # A burst cut off at the edge of a page, shorter than the two cycles to the next, leaves memory idle for one.
    assert closed.first_beat[0] == pytest.approx(walked["first_beat"] - walked["fetched"], abs=1)
    assert closed.last_beat[0] == pytest.approx(walked["last_beat"] - walked["fetched"], abs=1)
    stored = closed.completed[0] + c.engine_job + timing.write_latency_cycles
    assert stored == pytest.approx(walked["completed"] - walked["fetched"], abs=3)


@pytest.mark.parametrize(
    ("n", "k", "b", "latencies", "bound"),
    [
        (256, 4096, 1, (40, 20), "memory"),
        (64, 4096, 8, (40, 20), "array"),
        (2048, 8, 1, (40, 20), "array"),
        (16, 4096, 1, (40, 20), "memory"),
        (16, 256, 1, (150, 20), "latency"),
        (16, 256, 1, (40, 90), "results"),
        (16, 32, 1, (10, 5), "decoder"),
    ],
)
@pytest.mark.parametrize("stall", [0.0, 0.2])
def test_a_long_stream_is_bound_by_the_slowest_resource(
    n: int, k: int, b: int, latencies: tuple[int, int], bound: str, stall: float
) -> None:
    config, timing = preset("full"), MemoryTiming(*latencies, stall)
    count = 600
    one = next(iter(demand_of(config, n, k, b).rows()))
    rows = [one._replace(device_stripe=i * 1024, operand_stripe=i * 16, result_line=i * 64) for i in range(count)]
    kernel = DeviceKernel(config, timing, poll_interval_cycles=NEVER)
    kernel.enable(0, PLACE, 0)
    kernel.publish(0, 0, rows, published=0, tag=0)
    kernel.advance(NEVER)
    completed = kernel.completions()["completed"]
    walked = (completed[-1] - completed[100]) / (count - 101)
    found = interval(config, demand_of(config, n, k, b), timing)
    assert BOUNDS[int(found.bound[0])] == bound
    assert found.cycles[0] == pytest.approx(walked, rel=0.02)


def test_longer_latency_and_stalls_never_make_it_faster() -> None:
    config = preset("small")
    rng = np.random.default_rng(3)
    shapes = shapes_of(
        config,
        [
            Descriptor(device_rows=int(rng.integers(1, 200)), device_columns=int(rng.integers(1, 2000)))
            for _ in range(200)
        ],
    )
    wanted = demands(config, shapes)
    base = MemoryTiming(40, 20)
    times = alone(config, wanted, base).completed
    for slower in (replace(base, read_latency_cycles=60), replace(base, stall=0.2), replace(base, beat_cycles=1.5)):
        assert (alone(config, wanted, slower).completed >= times).all()


def test_demand_rows_and_arrays_say_the_same() -> None:
    config = preset("tiny")
    wanted = demand_of(config, 5, 6, 7)
    (row,) = wanted.rows()
    assert all(getattr(row, name) == getattr(wanted, name)[0] for name in Demand._fields)
