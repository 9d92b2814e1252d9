from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plora.hw.defs.config import preset
from plora.hw.defs.descriptor import Descriptor, Keep, Op, Source
from plora.sim.core.closed import interval
from plora.sim.core.demand import demands, shapes_of
from plora.sim.device.dram import dram_timing
from plora.sim.hardware.device import load_device
from plora.sim.system.config import RunOptions, resolve
from plora.sim.system.coretime import CoreTimes, core_times
from plora.sim.system.decode import machine_of
from plora.sim.system.overhead import measured_overhead

DEVICE = load_device("plora")
# The memory of the paper's device as the cycle model has it: 1000 of 1024 GB/s.
CORE = CoreTimes(DEVICE, 1000.0 / DEVICE.dram_gb_per_s)


@pytest.mark.parametrize(("rank", "rows"), [(8, 1), (16, 4), (64, 2), (128, 17)])
def test_a_product_takes_what_its_descriptors_add_to_a_stream(rank: int, rows: int) -> None:
    config = preset("full")
    # 128 x 4096 is one byte too large for a descriptor: whole groups of 16 rows.
    heights = [112, 16] if rank == 128 else [rank]
    a = [
        Descriptor(op=Op.GEMM, device_rows=n, device_columns=4096, gpu_rows=rows, device_address=0, keep=Keep.NEW)
        for n in heights
    ]
    b_heights = [4080, 16] if rank == 128 else [4096]
    b = [
        Descriptor(op=Op.GEMM, device_rows=n, device_columns=rank, gpu_rows=rows, device_address=0, source=Source.KEPT)
        for n in b_heights
    ]
    cycles = interval(config, demands(config, shapes_of(config, [*a, *b])), dram_timing(config)).cycles.sum()
    time, _ = CORE.products_ps(rows, [(rank, 4096, False), (4096, rank, True)])
    assert time == pytest.approx(1000 * cycles, rel=0.01)


def test_many_rows_are_bound_by_the_core_and_few_by_memory() -> None:
    products = [(64, 4096, False), (4096, 64, True)]
    assert CORE.products_ps(1, products)[1]
    time, memory = CORE.products_ps(64, products)
    assert not memory
    stated = 2 * 64 * 64 * 8192 / 2.048e12 * 1e12
    assert time == pytest.approx(stated, rel=0.03)


@given(st.integers(1, 300), st.sampled_from([8, 16, 64, 128]), st.sampled_from([1024, 4096, 16384]))
def test_time_grows_with_rows_and_is_no_less_than_the_rates_allow(rows: int, rank: int, width: int) -> None:
    one, more = (CORE.products_ps(r, [(rank, width, False)])[0] for r in (rows, rows + 1))
    assert more >= one
    assert one >= 0.99 * 2 * rank * width * max(rows / 2.048, 1 / 1.0)


def test_a_slower_memory_and_another_clock_scale_what_they_bound() -> None:
    memory = [(64, 4096, False)]
    half = CoreTimes(replace(DEVICE, dram_gb_per_s=DEVICE.dram_gb_per_s / 2), 1000.0 / DEVICE.dram_gb_per_s)
    assert half.products_ps(1, memory)[0] == pytest.approx(2 * CORE.products_ps(1, memory)[0], rel=0.01)
    twice = CoreTimes(replace(DEVICE, ndp_tflops=2 * DEVICE.ndp_tflops), 1000.0 / DEVICE.dram_gb_per_s)
    assert twice.products_ps(64, memory)[0] == pytest.approx(CORE.products_ps(64, memory)[0] / 2, rel=0.01)


def test_latencies_are_those_of_an_idle_device() -> None:
    # docs/device-model.md, "How a descriptor passes": 12 + L to the core, 15 + 4 + L + 1 + 3 to the first beat.
    latency = dram_timing(preset("full")).read_latency_cycles
    assert CORE.command_ps == pytest.approx(1000 * (35 + 2 * latency), abs=3000)
    assert 20_000 < CORE.completion_ps < 60_000


def test_latencies_agree_with_those_measured_on_the_rtl() -> None:
    measured = measured_overhead()
    cycles, timing = CORE.command_ps / 1000, dram_timing(preset("full"))
    for one in measured.descriptors:
        # To the first word, at the measurement's latency; the first beat follows within a few cycles.
        elsewhere = one.read_latencies_before * (timing.read_latency_cycles - measured.read_latency_cycles)
        assert 0 <= cycles - elsewhere - one.times.doorbell_to_first_word <= 12
    after = measured.descriptors[0]
    elsewhere = after.write_latencies_after * (timing.write_latency_cycles - measured.write_latency_cycles)
    # The last beat comes a few cycles after the last word.
    assert 0 <= after.times.last_word_to_completion - (CORE.completion_ps / 1000 - elsewhere) <= 12


@pytest.mark.parametrize(("group", "heads"), [(1, 32), (4, 8), (8, 4), (16, 2)])
def test_attention_streams_as_the_stated_rates_say_where_rows_come_in_pairs(group: int, heads: int) -> None:
    found = CORE.attention(128, group, heads)
    memory, compute = 4 * 128 * heads / 1.0, 4 * 128 * heads * group / 2.048
    assert found.token_ps == pytest.approx(max(memory, compute), rel=0.03)
    assert found.memory == (group == 1)
    assert 0 < found.request_ps < 100_000 * heads


def test_a_single_row_left_over_takes_as_long_as_a_pair() -> None:
    assert CORE.attention(128, 3, 8).token_ps == CORE.attention(128, 4, 8).token_ps


def test_attention_of_a_machine_is_that_of_its_share_of_the_heads() -> None:
    for gpus, heads, group in ((1, 8, 4), (2, 4, 4), (16, 1, 2)):
        resolved = resolve(RunOptions(model="llama3-8b", tensor_parallel_size=gpus))
        machine = machine_of(resolved, resolved.systems[0])
        assert machine.core is not None
        assert machine.attention == machine.core.attention(128, group, heads)
    integer = resolve(RunOptions(kv_cache_dtype="int8"))
    assert machine_of(integer, integer.systems[0]).attention is None


def test_a_device_without_a_core_has_none_and_presets_say_which_times_count() -> None:
    assert core_times(load_device("cxl-expander"), 1.0) is None
    for name, there in (("paper", False), ("priced", True)):
        resolved = resolve(RunOptions(preset=name))  # type: ignore[arg-type]
        assert (machine_of(resolved, resolved.systems[0]).core is not None) == there
    stated = resolve(RunOptions(costs={"device_timing": "stated"}))
    assert machine_of(stated, stated.systems[0]).command_ps == 108_000


def test_every_row_count_of_a_serving_batch_has_a_time() -> None:
    assert (np.array([CORE.products_ps(r, [(8, 53248, False)])[0] for r in (1, 9, 10, 256, 4096)]) > 0).all()
