"""The functional core's BF16 descriptors against the golden functions."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plora.hw.defs.config import PRESETS, NdpConfig, preset
from plora.hw.defs.descriptor import DType, Keep, Op, Source
from plora.hw.defs.legality import QueueWindow
from plora.hw.defs.packing import pack_geometry_transposed, result_row_words
from plora.hw.defs.queue import (
    MAX_OPERAND_EXPONENT,
    NUMERIC_NAN,
    NUMERIC_OVERFLOW,
    RESULT_OFFSET,
    Exponents,
    operand_offset,
    softmax_scale,
)
from plora.hw.defs.status import Status
from plora.sim.functional.core import FunctionalCore, Outcome
from plora.sim.functional.layout import (
    anchored_result_from_bytes,
    gpu_operand_bytes,
    pack_operand,
    pack_transposed,
    result_from_bytes,
)
from plora.sim.functional.memory import SparseMemory
from plora.sim.golden.bf16 import from_float, golden_gemm_bf16, grid_to_bf16, to_float, to_fp16
from plora.sim.golden.numerics import gemm_grid
from plora.sim.golden.softmax import golden_attention
from tests.descriptors import product

SUBMISSION, RESULT, WEIGHTS, MEMORY = 0x0, 0x2_0000, 0x4_0000, 0x10_0000
WINDOW = QueueWindow(0, MEMORY, 1 << 17, 1 << 17)
CONFIGS = st.sampled_from(list(PRESETS.values()))
Bits = npt.NDArray[np.uint16]


class Bench:
    """A core with a memory, and descriptors written by hand."""

    def __init__(self, config: NdpConfig) -> None:
        self.config = config
        self.memory = SparseMemory(MEMORY, fill=0xFF)  # every value that nobody wrote is NaN
        self.core = FunctionalCore(config, self.memory)
        self.next_weights = WEIGHTS

    def run(
        self, w: Bits, x: Bits | tuple[int, int], exponents: Exponents, scale: int = 0, **flags: int
    ) -> tuple[Outcome, Bits | None]:
        """Run one descriptor; x is its operand, or the shape of what the chain has. Return the result as bits."""
        config, transpose = self.config, flags.get("transpose", 0)
        data = pack_transposed(w, config) if transpose else pack_operand(w, config)
        n, k = w.shape[::-1] if transpose else w.shape
        self.memory.write(self.next_weights, data)
        if isinstance(x, tuple):
            b = x[0]
        else:
            b = len(x)
            self.memory.write(SUBMISSION + operand_offset(config), gpu_operand_bytes(x, config))
        d = product(self.next_weights, len(data), n, k, b, **{"dtype": DType.BF16, **flags})
        self.next_weights += len(data)
        first = d.source == Source.SLOT and not d.acc_in and d.keep != Keep.APPEND
        outcome = self.core.execute(
            d, WINDOW, SUBMISSION, RESULT, first=first, softmax_scale=scale, exponents=exponents
        )
        if not outcome.result_bytes:
            return outcome, None
        size = b * result_row_words(n, transpose=transpose) * 64
        assert outcome.result_bytes == size
        data = self.memory.read(RESULT + RESULT_OFFSET, size)
        matrix = anchored_result_from_bytes(data, b, n)[0] if transpose else result_from_bytes(data, b, n)
        return outcome, matrix.view(np.uint16)


def values(seed: int, *shape: int, size: float = 1.0) -> Bits:
    return from_float(size * np.random.default_rng(seed).standard_normal(shape))


@given(
    CONFIGS,
    st.integers(1, 5),
    st.integers(1, 40),
    st.integers(1, 300),
    st.integers(-6, 6),
    st.integers(-6, 6),
    st.integers(0, 1 << 16),
)
def test_a_product_is_the_golden_one(config: NdpConfig, b: int, n: int, k: int, sx: int, sw: int, seed: int) -> None:
    x, w = values(seed, b, k), values(seed + 1, n, k)
    outcome, y = Bench(config).run(w, x, Exponents(sx, sw))
    golden = golden_gemm_bf16(x, w, sx, sw, config.accumulator)
    assert outcome.status is Status.OK
    np.testing.assert_array_equal(y, golden.values)
    assert outcome.numeric == NUMERIC_NAN * bool(golden.nan.any()) | NUMERIC_OVERFLOW * bool(golden.overflow.any())


@given(CONFIGS, st.integers(1, 2), st.integers(1, 40), st.integers(1, 60), st.integers(1, 300), st.integers(0, 99))
def test_a_kept_intermediate_is_bf16(config: NdpConfig, b: int, r: int, n: int, k: int, seed: int) -> None:
    x, first, second = values(seed, b, k, size=300.0), values(seed + 1, r, k, size=0.01), values(seed + 2, n, r)
    bench = Bench(config)
    bench.run(first, x, Exponents(-4, 5, -3), keep=Keep.NEW, chain=1)
    outcome, y = bench.run(second, (b, r), Exponents(-3, 2), source=Source.KEPT)
    m = golden_gemm_bf16(x, first, -4, 5, config.accumulator).values
    golden = golden_gemm_bf16(m, second, -3, 2, config.accumulator)
    assert outcome.status is Status.OK
    np.testing.assert_array_equal(y, golden.values)
    # The same as two products with m passing over the link.
    separate = Bench(config)
    _, m_read = separate.run(first, x, Exponents(-4, 5))
    assert m_read is not None
    np.testing.assert_array_equal(separate.run(second, m_read, Exponents(-3, 2))[1], y)


def test_appended_columns_and_a_shared_operand() -> None:
    bench, x = Bench(preset("small")), values(1, 2, 64)
    parts = [values(2, 32, 64), values(3, 7, 64)]
    bench.run(parts[0], x, Exponents(1, 0, 2), keep=Keep.NEW, chain=1)
    bench.run(parts[1], (2, 64), Exponents(1, -1, 2), keep=Keep.APPEND, chain=1, source=Source.CHAIN)
    last = values(4, 20, 39)
    _, y = bench.run(last, (2, 39), Exponents(2, 0), source=Source.KEPT)
    m = golden_gemm_bf16(x, np.concatenate(parts), 1, 0, bench.config.accumulator).values
    np.testing.assert_array_equal(y, golden_gemm_bf16(m, last, 2, 0, bench.config.accumulator).values)


def test_sums_that_stay_in_the_accumulators() -> None:
    bench, x, w = Bench(preset("small")), values(1, 2, 96), values(2, 4, 96)
    bench.run(np.ascontiguousarray(w[:, :64]), np.ascontiguousarray(x[:, :64]), Exponents(2, 1), acc_out=1, chain=1)
    outcome, y = bench.run(np.ascontiguousarray(w[:, 64:]), np.ascontiguousarray(x[:, 64:]), Exponents(2, 1), acc_in=1)
    assert outcome.status is Status.OK
    np.testing.assert_array_equal(y, golden_gemm_bf16(x, w, 2, 1, bench.config.accumulator).values)


@pytest.mark.parametrize("name", list(PRESETS))
@pytest.mark.parametrize("sv", [-5, 0, 7])
def test_attention(name: str, sv: int) -> None:
    config = preset(name)
    bench, tokens, dims, b = Bench(config), 70, 20, 3
    q, k, v = values(1, b, dims), values(2, tokens, dims), values(3, tokens, dims, size=2.0**-sv)
    sq, sk = 2, -1
    # Scores come with the powers of two of q and k: the scale takes them off.
    scale = softmax_scale(0.3 * 2.0 ** -(sq + sk))
    bench.run(k, q, Exponents(sq, sk), scale, op=Op.SOFTMAX, keep=Keep.NEW, chain=1)
    outcome, o = bench.run(v, (b, tokens), Exponents(0, sv), transpose=1, source=Source.KEPT, op=Op.GEMM)
    factor = float(np.uint32(scale).view(np.float32))
    golden = golden_attention(to_fp16(q, sq), to_fp16(k, sk), to_fp16(v, sv), factor, config)
    assert outcome.status is Status.OK and outcome.numeric == 0 and o is not None
    sums = gemm_grid(golden.scaled, np.ascontiguousarray(to_fp16(v, sv).T), config.accumulator)
    expected = grid_to_bf16(sums, config.accumulator, sv, golden.state.shift[:, None]).values
    np.testing.assert_array_equal(o, expected)
    # And within BF16's precision of attention in float64.
    t = to_float(q).astype(np.float64) @ to_float(k).T * 0.3
    p = np.exp2(t - t.max(axis=1, keepdims=True))
    exact = p @ to_float(v) / p.sum(axis=1, keepdims=True)
    total = golden.state.total * np.exp2(-(24.0 + golden.state.shift))
    np.testing.assert_allclose(to_float(o) / total[:, None], exact, rtol=2**-6, atol=np.abs(exact).max() * 2**-7)
    assert pack_geometry_transposed(config, dims, tokens).beats == 5


def test_values_out_of_range_are_seen() -> None:
    x, w = values(1, 1, 8, size=2.0**20), values(2, 3, 8)
    outcome, y = Bench(preset("tiny")).run(w, x, Exponents(0, 0))
    assert outcome.numeric & NUMERIC_OVERFLOW
    assert y is not None and np.all(y & 0x7F80 == 0x7F80)
    outcome, y = Bench(preset("tiny")).run(w, x, Exponents(-10, 0))
    assert outcome.numeric == 0
    # A score that is minus infinity would count as masked: it is seen as well.
    k = -np.abs(to_float(values(3, 4, 8)))
    q = from_float(np.full((1, 8), 2.0**20))
    outcome, _ = Bench(preset("tiny")).run(
        from_float(k), q, Exponents(0, 0), softmax_scale(1.0), op=Op.SOFTMAX, keep=Keep.NEW, chain=1
    )
    assert outcome.numeric == NUMERIC_OVERFLOW


@pytest.mark.parametrize("place", range(3))
def test_exponents_beyond_the_limit_are_refused(place: int) -> None:
    for exponent, status in ((MAX_OPERAND_EXPONENT + 1, Status.BAD_SCALE), (MAX_OPERAND_EXPONENT, Status.OK)):
        exponents = Exponents(*(exponent if i == place else 0 for i in range(3)))
        outcome, _ = Bench(preset("tiny")).run(values(2, 3, 8), values(1, 1, 8), exponents)
        assert outcome.status is status
    # They are nothing to an FP16 descriptor.
    outcome, _ = Bench(preset("tiny")).run(values(2, 3, 8), values(1, 1, 8), exponents, dtype=DType.FP16)
    assert outcome.status is Status.OK


@pytest.mark.parametrize("dtype", [4, 7])
def test_other_types_are_refused(dtype: int) -> None:
    outcome, _ = Bench(preset("tiny")).run(values(2, 3, 8), values(1, 1, 8), Exponents(), dtype=dtype)
    assert outcome.status is Status.BAD_DTYPE
