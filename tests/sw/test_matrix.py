"""Products through driver, rings and device have the bits of the golden model, however they are cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from plora.hw.defs.config import NdpConfig, preset
from plora.hw.defs.errors import UserError
from plora.sim.functional import FunctionalDevice
from plora.sim.golden.numerics import golden_gemm
from plora.sw.matrix import multiply, multiply_twice, store_matrix
from plora.sw.session import Session, open_session
from plora.sw.tiling import SlotSizes

TINY = preset("tiny")
# Room for large matrices beside the buffers of the tiny device.
ROOMY = NdpConfig("roomy", 2, 8192, 4096, 16384, 2, 4, 30)
LEAST = NdpConfig("least", 4, 2048, 2048, 2048, 1, 2, 30)


def matrix(seed: int, rows: int, columns: int, special_rate: float = 0.0) -> np.ndarray:
    random = np.random.default_rng(seed)
    values = (random.standard_normal((rows, columns)) * 2.0 ** random.integers(-12, 4, (rows, columns))).astype(
        np.float16
    )
    bits = values.view(np.uint16)
    chosen = random.random((rows, columns)) < special_rate
    bits[chosen] = random.choice([0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0x7C00, 0xFC00, 0x7E01], chosen.sum())
    return bits.view(np.float16)


def session(config: NdpConfig, **options: object) -> Session:
    reorder = options.pop("reorder_seed", None)
    assert reorder is None or isinstance(reorder, int)
    device = FunctionalDevice(config, reorder_seed=reorder, fill=0xA5)
    return open_session(device, memory_bytes=device.memory.size_bytes, **options)  # type: ignore[arg-type]


def assert_same_bits(y: np.ndarray, golden: np.ndarray) -> None:
    assert y.shape == golden.shape
    different = np.argwhere(y.view(np.uint16) != golden.view(np.uint16))
    assert not different.size, f"{len(different)} of {y.size} results differ, the first at {different[0]}"


@settings(max_examples=40)
@given(
    st.sampled_from([TINY, LEAST, ROOMY]),
    st.integers(1, 70),
    st.one_of(st.integers(1, 80), st.integers(250, 1400)),
    st.integers(1, 9),
    st.integers(0, 1000),
    st.sampled_from([0.0, 0.002]),
)
@example(TINY, 1, 1025, 3, 0, 0.0)
@example(LEAST, 5, 3000, 2, 1, 0.001)
def test_y_is_x_w_transposed(config: NdpConfig, n: int, k: int, b: int, seed: int, special_rate: float) -> None:
    s = session(config, reorder_seed=seed, depth=5)
    w, x = matrix(seed, n, k, special_rate), matrix(seed + 1, b, k, special_rate)
    product = multiply(s.queue, store_matrix(s.driver, s.allocator, w, "w"), x)
    assert_same_bits(product.y, golden_gemm(x, w, config.accumulator).values)


@settings(max_examples=30)
@given(
    st.sampled_from([TINY, LEAST, ROOMY]),
    st.integers(1, 256),
    st.one_of(st.integers(1, 80), st.integers(250, 1400)),
    st.integers(1, 100),
    st.integers(1, 9),
    st.integers(0, 1000),
)
@example(TINY, 256, 1024, 40, 9, 3)
@example(TINY, 40, 1100, 40, 2, 3)  # K is cut: the intermediate passes over the link
def test_y_is_x_a_b(config: NdpConfig, rank: int, k: int, n: int, b: int, seed: int) -> None:
    s = session(config, reorder_seed=seed, depth=5)
    a_matrix, b_matrix, x = matrix(seed, rank, k), matrix(seed + 1, n, rank), matrix(seed + 2, b, k)
    a = store_matrix(s.driver, s.allocator, a_matrix, "a")
    placed_b = store_matrix(s.driver, s.allocator, b_matrix, "b")
    product = multiply_twice(s.queue, a, placed_b, x)
    m = golden_gemm(x, a_matrix, config.accumulator).values
    assert_same_bits(product.y, golden_gemm(m, b_matrix, config.accumulator).values)


@pytest.mark.parametrize("depth", [2, 3, 64])
def test_chains_longer_than_the_ring_stream_through_it(depth: int) -> None:
    s = session(ROOMY, depth=depth)
    w, x = matrix(1, 4000, 64), matrix(2, 8, 64)
    product = multiply(s.queue, store_matrix(s.driver, s.allocator, w, "w"), x)
    assert product.descriptors > 8
    assert_same_bits(product.y, golden_gemm(x, w, ROOMY.accumulator).values)


def test_results_do_not_depend_on_how_they_are_cut() -> None:
    w, x = matrix(1, 300, 900, 0.0005), matrix(2, 7, 900, 0.0005)
    results = []
    for config, slots in (
        (TINY, None),
        (TINY, SlotSizes(12, 11)),
        (LEAST, None),
        (preset("small"), None),
        (preset("full"), None),
    ):
        s = session(config, slots=slots)
        results.append(multiply(s.queue, store_matrix(s.driver, s.allocator, w, "w"), x))
    assert len({product.descriptors for product in results}) > 2, "the cuts are all alike: this shows nothing"
    for product in results[1:]:
        assert_same_bits(product.y, results[0].y)


def test_a_matrix_one_byte_too_large_for_a_descriptor_is_cut() -> None:
    config = preset("full")
    s = session(config)
    a, b, x = matrix(1, 128, 4096), matrix(2, 64, 128), matrix(3, 2, 4096)
    placed = store_matrix(s.driver, s.allocator, a, "a")
    assert placed.layout.row_tiles == 2
    product = multiply_twice(s.queue, placed, store_matrix(s.driver, s.allocator, b, "b"), x)
    assert product.descriptors == 3
    m = golden_gemm(x, a, config.accumulator).values
    assert_same_bits(product.y, golden_gemm(m, b, config.accumulator).values)


def test_numeric_flags_come_back() -> None:
    s = session(TINY)
    w = store_matrix(s.driver, s.allocator, np.full((1, 2), 60000, np.float16), "w")
    assert multiply(s.queue, w, np.ones((1, 2), np.float16)).numeric == 2
    assert multiply(s.queue, w, np.array([[np.nan, 0]], np.float16)).numeric == 1
    assert multiply(s.queue, w, np.zeros((1, 2), np.float16)).numeric == 0


@pytest.mark.parametrize("bad", [np.zeros(4, np.float16), np.zeros((2, 2), np.float32), np.zeros((2, 2), np.uint16)])
def test_what_is_no_fp16_matrix_is_not_stored(bad: np.ndarray) -> None:
    s = session(TINY)
    with pytest.raises(UserError, match="give a matrix of FP16 values"):
        store_matrix(s.driver, s.allocator, bad, "w")


@pytest.mark.parametrize(
    "bad", [np.zeros((1, 5), np.float16), np.zeros((0, 4), np.float16), np.zeros(4, np.float16), np.zeros((1, 4))]
)
def test_an_x_that_does_not_fit_is_refused(bad: np.ndarray) -> None:
    s = session(TINY)
    w = store_matrix(s.driver, s.allocator, matrix(1, 3, 4), "w")
    with pytest.raises(UserError, match="give FP16 rows of 4 values"):
        multiply(s.queue, w, bad)
    with pytest.raises(UserError, match="give FP16 rows of 4 values"):
        multiply_twice(s.queue, w, w, bad)


def test_a_matrix_that_does_not_fit_the_memory_is_refused_by_name() -> None:
    s = session(TINY)
    with pytest.raises(UserError, match="device memory is full: layer 7 A needs"):
        store_matrix(s.driver, s.allocator, np.zeros((9000, 1024), np.float16), "layer 7 A")
