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
from plora.sim.golden.bf16 import from_float, to_float
from plora.sim.golden.softmax import golden_attention_bf16
from plora.sw.attention.attend import Attended
from plora.sw.attention.bound import error_bound_bf16
from plora.sw.attention.merge import attend_exactly, merge
from plora.sw.attention.store import KvStore
from plora.sw.scaling import attention_scaling, largest_magnitude
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


def values(seed: int, *shape: int, log2: int = 0, spread: int = 0) -> Bits:
    """Normal values, each up to ``2**spread`` times smaller."""
    random = np.random.default_rng(seed)
    return from_float(random.standard_normal(shape) * 2.0 ** (log2 - random.integers(0, spread + 1, shape)))


def check(got: Attended, q: Bits, k: Bits, v: Bits, scale: int, store: KvStore, count: int) -> None:
    scaling, group = store.scaling(q, scale), len(q) // store.kv_heads
    for part in got.parts:
        rows, tokens, config = part.chain.rows, part.chain.tokens, store.config(part.device)
        mine = q[part.head * group : (part.head + 1) * group][rows.start : rows.stop]
        local = slice(tokens.start, tokens.stop)
        keys, weighed = (each[part.device :: count, part.head][local] for each in (k, v))
        factor = softmax_scale_value(scaling.scale)
        golden = golden_attention_bf16(mine, keys, weighed, factor, scaling.scores, scaling.values, config)
        np.testing.assert_array_equal(part.o, golden.output.values)
        np.testing.assert_array_equal(part.partial.l, golden.state.total * 2.0 ** -(24.0 + golden.state.shift))
    for head in range(store.kv_heads):
        asked, stored, weighed = q[head * group : (head + 1) * group], k[:, head], v[:, head]
        exact = merge([attend_exactly(to_float(asked), to_float(stored), to_float(weighed), scale)])
        error = np.abs(got.output[head * group : (head + 1) * group] - exact)
        assert (error <= error_bound_bf16(asked, stored, weighed, scaling, store.config(0).accumulator)).all()


@settings(max_examples=20)
@given(
    st.sampled_from(["tiny", "small"]),
    st.integers(1, 3),
    st.sampled_from([1, 8, 33, 64]),
    st.integers(1, 4),
    st.integers(1, 150),
    st.sampled_from([(0, 0), (20, -20), (-9, 8), (-30, 31)]),
    st.sampled_from([0, 30, -20]),
    st.sampled_from([0, 12, 40]),
    st.integers(0, 1000),
)
def test_any_shape_at_any_size(
    name: str,
    count: int,
    dims: int,
    group: int,
    tokens: int,
    sizes: tuple[int, int],
    value_log2: int,
    spread: int,
    seed: int,
) -> None:
    store = KvStore(devices(count, preset(name)), head_dim=dims, kv_heads=2, tile_tokens=64, dtype=DType.BF16)
    q, scale = values(seed, 2 * group, dims, log2=sizes[0], spread=spread), ordinary_softmax_scale(dims)
    k = values(seed + 1, tokens, 2, dims, log2=sizes[1], spread=spread)
    v = values(seed + 2, tokens, 2, dims, log2=value_log2, spread=spread)
    store.append(k[: tokens // 2], v[: tokens // 2])
    store.append(k[tokens // 2 :], v[tokens // 2 :])
    got = store.attend(q, scale)
    assert got.numeric == 0
    check(got, q, k, v, scale, store, count)


def test_the_bound_is_a_few_roundings_of_the_values() -> None:
    q, k, v, scale = values(5, 4, 128), values(6, 64, 128), values(7, 64, 128), ordinary_softmax_scale(128)
    scaling = attention_scaling(q, largest_magnitude(k), largest_magnitude(v), scale)
    accumulator = preset("full").accumulator
    bound = error_bound_bf16(q, k, v, scaling, accumulator)
    assert bound.max() < 2.0**-8 * np.abs(to_float(v)).max()
    one = error_bound_bf16(q, k[:1], v[:1], scaling, accumulator)
    assert (one < 2.0**-7 * np.abs(to_float(v[:1])) + 2.0**-21).all(), "one token is its own value, rounded"


@given(st.integers(0, 1000))
def test_operands_far_below_the_largest_take_no_more_than_their_share_of_the_bound(seed: int) -> None:
    """What is rounded on the way to FP16 is in the bound: without it, such operands leave it."""
    store = KvStore(devices(1, preset("tiny")), head_dim=8, dtype=DType.BF16)
    q, k = values(seed, 1, 8), values(seed + 1, 3, 1, 8)
    v = values(seed + 2, 3, 1, 8, log2=-34)
    v[0, 0, 0] = from_float(np.array([2.0**5]))[0]
    scale = ordinary_softmax_scale(8)
    store.append(k, v)
    check(store.attend(q, scale), q, k, v, scale, store, 1)


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
