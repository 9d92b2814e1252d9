"""Attention over a BF16 cache: golden bits of every device, and near float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plora.hw.defs.config import NdpConfig, preset
from plora.hw.defs.descriptor import DType
from plora.hw.defs.errors import UserError
from plora.hw.defs.queue import ordinary_softmax_scale, softmax_scale, softmax_scale_allowed, softmax_scale_value
from plora.sim.functional import FunctionalDevice
from plora.sim.golden.bf16 import from_float, grid_to_bf16, to_float, to_fp16
from plora.sim.golden.numerics import gemm_grid
from plora.sim.golden.softmax import golden_attention
from plora.sw.attention.attend import Attended
from plora.sw.attention.merge import attend_exactly, merge
from plora.sw.attention.store import KvStore
from plora.sw.scaling import attention_scaling
from plora.sw.session import Session, open_session
from plora.sw.tiling import SlotSizes

MEMORY_BYTES = 8 << 20
Bits = npt.NDArray[np.uint16]


def devices(count: int, config: NdpConfig) -> list[Session]:
    return [
        open_session(
            FunctionalDevice(config, MEMORY_BYTES, fill=0xFF), memory_bytes=MEMORY_BYTES, slots=SlotSizes(13, 13)
        )
        for _ in range(count)
    ]


def values(seed: int, *shape: int, log2: int = 0) -> Bits:
    return from_float(np.random.default_rng(seed).standard_normal(shape) * 2.0**log2)


def check(got: Attended, q: Bits, k: Bits, v: Bits, scale: int, store: KvStore, count: int) -> None:
    scaling, group = store.scaling(q, scale), len(q) // store.kv_heads
    for part in got.parts:
        rows, tokens, config = part.chain.rows, part.chain.tokens, store.config(part.device)
        mine = q[part.head * group : (part.head + 1) * group][rows.start : rows.stop]
        local = slice(tokens.start, tokens.stop)
        keys, weighed = (each[part.device :: count, part.head][local] for each in (k, v))
        sv = scaling.values.device
        fp16 = to_fp16(mine, scaling.scores.operand), to_fp16(keys, scaling.scores.device), to_fp16(weighed, sv)
        golden = golden_attention(*fp16, softmax_scale_value(scaling.scale), config)
        sums = gemm_grid(golden.scaled, np.ascontiguousarray(fp16[2].T), config.accumulator)
        o = grid_to_bf16(sums, config.accumulator, sv, golden.state.shift[:, None]).values
        np.testing.assert_array_equal(part.o, o)
        np.testing.assert_array_equal(part.partial.l, golden.state.total * 2.0 ** -(24.0 + golden.state.shift))
    for head in range(store.kv_heads):
        asked, stored = to_float(q[head * group : (head + 1) * group]), to_float(k[:, head])
        size = to_float(v[:, head])
        exact = merge([attend_exactly(asked, stored, size, scale)])
        magnitudes = merge([attend_exactly(asked, stored, np.abs(size), scale)])
        # One rounding of O to BF16, 2**-9 of it; the terms err by less than 2**-10.
        error = np.abs(got.output[head * group : (head + 1) * group] - exact)
        assert (error <= 2.0**-8 * magnitudes + 2.0**-20 * np.abs(size).max()).all()


@settings(max_examples=20)
@given(
    st.sampled_from(["tiny", "small"]),
    st.integers(1, 3),
    st.sampled_from([1, 8, 33, 64]),
    st.integers(1, 4),
    st.integers(1, 150),
    st.sampled_from([(0, 0), (20, -20), (-9, 8), (-30, 31)]),
    st.sampled_from([0, 30, -20]),
    st.integers(0, 1000),
)
def test_any_shape_at_any_size(
    name: str, count: int, dims: int, group: int, tokens: int, sizes: tuple[int, int], value_log2: int, seed: int
) -> None:
    store = KvStore(devices(count, preset(name)), head_dim=dims, kv_heads=2, tile_tokens=64, dtype=DType.BF16)
    q, k = values(seed, 2 * group, dims, log2=sizes[0]), values(seed + 1, tokens, 2, dims, log2=sizes[1])
    v, scale = values(seed + 2, tokens, 2, dims, log2=value_log2), ordinary_softmax_scale(dims)
    store.append(k[: tokens // 2], v[: tokens // 2])
    store.append(k[tokens // 2 :], v[tokens // 2 :])
    got = store.attend(q, scale)
    assert got.numeric == 0
    check(got, q, k, v, scale, store, count)


def test_a_fork_knows_the_sizes_of_what_it_shares() -> None:
    store = KvStore(devices(1, preset("tiny")), head_dim=16, tile_tokens=32, dtype=DType.BF16)
    q, k, v, scale = (
        values(1, 2, 16),
        values(2, 40, 1, 16, log2=10),
        values(3, 40, 1, 16, log2=-9),
        ordinary_softmax_scale(16),
    )
    store.append(k, v)
    other = store.fork("other")
    small = values(4, 5, 1, 16)
    other.append(small, small)
    everything = np.concatenate([k, small]), np.concatenate([v, small])
    check(other.attend(q, scale), q, *everything, scale, other, 1)


def test_scores_stay_finite_and_the_scale_legal() -> None:
    largest = from_float(np.full((3, 128), 255.0))
    for key in (2.0**-60, 1.0, 2.0**60):
        for factor in (2.0**-24, 0.1275, 255.0):
            scaling = attention_scaling(largest, key, 1.0, softmax_scale(factor))
            assert softmax_scale_allowed(scaling.scale)
            assert scaling.scores.allowed() and scaling.values.allowed()
            both = scaling.scores.operand + scaling.scores.device
            assert softmax_scale_value(scaling.scale) == softmax_scale_value(softmax_scale(factor)) * 2.0**-both
    scaling = attention_scaling(largest, 255.0, 255.0, ordinary_softmax_scale(128))
    assert 128 * 255.0**2 * 2.0 ** (scaling.scores.operand + scaling.scores.device) < 2.0**16


@pytest.mark.parametrize("bad", [np.zeros((4, 1, 16), np.float16), np.zeros((4, 1, 8), np.uint16)])
def test_other_types_and_shapes_are_refused(bad: npt.NDArray[np.generic]) -> None:
    store = KvStore(devices(1, preset("tiny")), head_dim=16, dtype=DType.BF16)
    with pytest.raises(UserError, match="give BF16 of shape"):
        store.append(bad, bad)
    with pytest.raises(UserError, match="give BF16 of shape"):
        store.begin(bad[0], ordinary_softmax_scale(16))
