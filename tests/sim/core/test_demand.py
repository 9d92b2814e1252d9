"""What descriptors demand, on arrays, is what the definitions say of each."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plora.hw.defs.config import PE_ROWS, PRESETS, preset
from plora.hw.defs.descriptor import Descriptor, DType, Keep, Op, Source
from plora.hw.defs.packing import (
    ceil_div,
    operand_row_stripes,
    pack_geometry,
    pack_geometry_transposed,
    result_row_words,
)
from plora.sim.core.constants import load_constants
from plora.sim.core.demand import (
    TO_ACCUMULATORS,
    TO_KEPT,
    TO_MEMORY,
    Demand,
    demands,
    shapes_of,
)

_SHAPES = st.tuples(st.integers(1, 3000), st.integers(1, 70_000), st.integers(1, 64))


@given(st.sampled_from(sorted(PRESETS)), st.lists(_SHAPES, min_size=1, max_size=20))
def test_geometry_is_that_of_the_packing(name: str, shapes: list[tuple[int, int, int]]) -> None:
    config = preset(name)
    descriptors = [Descriptor(device_rows=n, device_columns=k, gpu_rows=b) for n, k, b in shapes]
    for (n, k, b), demand in zip(shapes, demands(config, shapes_of(config, descriptors)).rows(), strict=True):
        geometry = pack_geometry(config, n, k)
        assert (demand.groups, demand.beats, demand.stripes) == (geometry.groups, geometry.beats, geometry.stripes)
        assert (demand.beat_cycles, 1 << demand.merge_cycles) == (geometry.taps, geometry.split)
        assert demand.pairs == ceil_div(b, 2)
        assert demand.operand_stripes == b * operand_row_stripes(config, k)
        assert demand.operand_space == demand.pairs * operand_row_stripes(config, k)
        assert demand.lines == b * result_row_words(n)
        assert demand.multiply_adds == n * k * b


@pytest.mark.parametrize(
    ("fields", "destination", "load", "from_kept", "writes"),
    [
        ({}, TO_MEMORY, 1, 0, True),
        ({"keep": Keep.NEW}, TO_KEPT, 1, 0, False),
        ({"keep": Keep.APPEND, "source": Source.CHAIN}, TO_KEPT, 0, 0, False),
        ({"acc_out": 1}, TO_ACCUMULATORS, 1, 0, False),
        ({"source": Source.KEPT}, TO_MEMORY, 0, 1, True),
    ],
)
def test_flags_decide_what_is_read_and_written(
    fields: dict[str, int], destination: int, load: int, from_kept: int, writes: bool
) -> None:
    config = preset("small")
    d = Descriptor(device_rows=4, device_columns=100, gpu_rows=3, chain=1, **fields)
    demand = next(iter(demands(config, shapes_of(config, [d])).rows()))
    assert (demand.destination, demand.load, demand.from_kept) == (destination, load, from_kept)
    assert bool(demand.operand_stripes) == bool(load)
    assert bool(demand.lines) == writes


def test_addresses_become_stripes_and_lines() -> None:
    config = preset("small")
    d = Descriptor(device_rows=4, device_columns=100, device_address=10 * config.stripe_bytes)
    shapes = shapes_of(config, [d], [7 * config.stripe_bytes], [5 * 64])
    demand = next(iter(demands(config, shapes).rows()))
    assert (demand.device_stripe, demand.operand_stripe, demand.result_line) == (10, 7, 5)


@given(
    st.sampled_from(sorted(PRESETS)),
    st.sampled_from([DType.INT8, DType.INT4]),
    st.lists(st.tuples(st.integers(1, 3000), st.integers(17, 256), st.integers(1, 32)), min_size=1, max_size=20),
)
def test_geometry_of_integers_is_that_of_their_packing(
    name: str, dtype: DType, shapes: list[tuple[int, int, int]]
) -> None:
    config = preset(name)
    keys = [Descriptor(op=Op.SOFTMAX, dtype=dtype, device_rows=n, device_columns=k, gpu_rows=b) for n, k, b in shapes]
    values = [
        Descriptor(transpose=1, source=Source.KEPT, dtype=dtype, device_rows=k, device_columns=n, gpu_rows=b)
        for n, k, b in shapes
    ]
    found = demands(config, shapes_of(config, keys + values))
    for (n, k, _), demand, cycles in zip(shapes, found.rows(), found.scale_cycles.tolist(), strict=False):
        g = pack_geometry(config, n, k, dtype)
        assert (demand.groups, demand.beats, demand.stripes) == (g.groups, g.beats, g.stripes)
        assert (demand.expansion_log2, demand.group_stripes, demand.frames) == (g.expansion_log2, 0, g.frames)
        assert (demand.frame_beats, cycles) == (64 * g.beats, g.frames)
    for (n, k, b), demand, cycles in zip(
        shapes, list(found.rows())[len(keys) :], found.scale_cycles[len(keys) :].tolist(), strict=True
    ):
        v = pack_geometry_transposed(config, k, n, dtype)
        assert (demand.groups, demand.beats, demand.stripes) == (v.groups, v.beats, v.stripes)
        assert (demand.group_stripes, demand.frame_beats) == (v.group_stripes, v.frame_beats)
        assert cycles == v.groups * ceil_div(v.beats, v.frame_beats) * ceil_div(b, 2)


@given(
    st.sampled_from(sorted(PRESETS)),
    st.lists(
        st.tuples(st.integers(1, 256), st.integers(1, 32768), st.integers(1, 32), st.integers(0, 9)),
        min_size=1,
        max_size=20,
    ),
)
def test_geometry_of_values_is_that_of_their_packing(name: str, shapes: list[tuple[int, int, int, int]]) -> None:
    config, c = preset(name), load_constants()
    descriptors = []
    for n, k, b, room in shapes:
        geometry = pack_geometry_transposed(config, n, k)
        size = geometry.packed_bytes(geometry.beats + room)
        descriptors.append(
            Descriptor(device_rows=n, device_columns=k, gpu_rows=b, transpose=1, source=Source.KEPT, device_bytes=size)
        )
    for (n, k, b, room), demand in zip(shapes, demands(config, shapes_of(config, descriptors)).rows(), strict=True):
        geometry = pack_geometry_transposed(config, n, k)
        assert demand.skip == room
        assert (demand.groups, demand.beats, demand.stripes) == (geometry.groups, geometry.beats, geometry.stripes)
        assert (demand.beat_cycles, demand.merge_cycles, demand.split_log2) == (1, 1, 0)
        assert (demand.softmax_cycles, demand.rescale_cycles, demand.anchor_cycles) == (0, c.p_scaler, 1)
        assert demand.settle_cycles == c.softmax_settle - c.softmax_stored + (b % PE_ROWS == 0)
        assert demand.lines == b * result_row_words(n, transpose=1)
        assert (demand.load, demand.from_kept, demand.multiply_adds) == (0, 1, n * k * b)


def test_softmax_is_a_product_that_is_kept() -> None:
    config = preset("small")
    fields = {"device_rows": 100, "device_columns": 64, "gpu_rows": 3, "chain": 1, "keep": Keep.NEW}
    scores, product = (
        next(iter(demands(config, shapes_of(config, [Descriptor(op=op, **fields)])).rows()))
        for op in (Op.SOFTMAX, Op.GEMM)
    )
    assert scores == product._replace(merge_cycles=1, begins_terms=1, softmax_cycles=load_constants().softmax)
    short = Descriptor(op=Op.SOFTMAX, device_rows=100, device_columns=8, gpu_rows=3, chain=1, keep=Keep.NEW)
    assert next(iter(demands(config, shapes_of(config, [short])).rows())).beat_cycles == 8


def test_an_operation_without_a_model_is_refused() -> None:
    config = preset("small")
    with pytest.raises(KeyError):
        demands(config, shapes_of(config, [Descriptor(op=7, device_rows=1, device_columns=1)]))


def test_no_descriptors_have_no_demands() -> None:
    config = preset("small")
    made = shapes_of(config, [])
    assert len(made) == 0
    assert Demand._fields[0] == "load"
    assert np.asarray(made.op).dtype == np.int64
