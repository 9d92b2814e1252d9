"""Attention over caches of INT8 and INT4: golden bits of every device over what it holds, near float64 without."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plora.hw.defs.config import preset
from plora.hw.defs.descriptor import DType
from plora.hw.defs.errors import UserError
from plora.hw.defs.packing import frame_tokens
from plora.hw.defs.queue import ordinary_softmax_scale
from plora.sim.golden.integers import dequantize, quantize
from plora.sw.attention.store import KvStore
from tests.sw.attention.test_store import check_bits, check_errors, devices, random

DTYPES = [DType.INT8, DType.INT4]


def held(rows: np.ndarray, dtype: DType) -> np.ndarray:
    """What the devices hold of keys or values (tokens, heads, dims)."""
    return dequantize(quantize(rows.reshape(-1, rows.shape[2]), dtype)).reshape(rows.shape)


@settings(max_examples=25)
@given(
    st.sampled_from(["tiny", "small", "full"]),
    st.sampled_from(DTYPES),
    st.integers(1, 3),
    st.sampled_from([17, 33, 64, 128]),
    st.integers(1, 6),
    st.integers(1, 2),
    st.integers(1, 700),
    st.sampled_from([0.01, 1.0, 30.0]),
    st.integers(0, 2**32 - 1),
)
def test_any_shape_has_golden_bits_and_the_bound(
    name: str, dtype: DType, count: int, dims: int, group: int, heads: int, tokens: int, size: float, seed: int
) -> None:
    config = preset(name)
    tile = frame_tokens(config)
    store = KvStore(devices(count, config, depth=4), head_dim=dims, kv_heads=heads, tile_tokens=tile, dtype=dtype)
    k, v = random(seed, tokens, heads, dims), random(seed + 1, tokens, heads, dims, size=3)
    q, scale = random(seed + 2, group * heads, dims, size=size), ordinary_softmax_scale(dims)
    store.append(k, v)
    got = store.attend(q, scale)
    check_bits(got, q, held(k, dtype), held(v, dtype), scale, store, count)
    check_errors(got, q, held(k, dtype), held(v, dtype), scale, store)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cache_grows_token_by_token_and_is_shared_and_copied(dtype: DType) -> None:
    config, count = preset("tiny"), 2
    store = KvStore(devices(count, config, seed=1), head_dim=80, tile_tokens=128, dtype=dtype)
    k, v, scale = random(4, 400, 1, 80), random(5, 400, 1, 80), ordinary_softmax_scale(80)
    store.append(k[:230], v[:230])
    for step in range(231, 290, 7):
        store.append(k[store.tokens() : step], v[store.tokens() : step])
        q = random(step, 3, 80, size=4)
        check_bits(store.attend(q, scale), q, held(k[:step], dtype), held(v[:step], dtype), scale, store, count)
    before = store.tokens()
    other = store.fork("other")
    other.append(k[before:], -v[before:])
    store.append(k[before:], v[before:])
    mine = held(v, dtype)
    theirs = np.concatenate([mine[:before], held(-v[before:], dtype)])
    for each, values in ((store, mine), (other, theirs)):
        check_bits(each.attend(q, scale), q, held(k, dtype), values, scale, each, count)


def test_integers_take_a_half_and_a_quarter_of_the_memory() -> None:
    sizes = {}
    for dtype in (DType.FP16, *DTYPES):
        store = KvStore(devices(1, preset("full")), head_dim=128, tile_tokens=4096, dtype=dtype)
        store.append(random(1, 4096, 1, 128), random(2, 4096, 1, 128))
        sizes[dtype] = store.size_bytes
    # A byte of scale for a key of 128 values, and for each of the four groups of a value.
    assert sizes[DType.FP16] == 4096 * 2 * 256
    assert sizes[DType.INT8] == 4096 * (2 * 128 + 5)
    assert sizes[DType.INT4] == 4096 * (2 * 64 + 5)


def test_a_new_token_writes_its_bytes_and_no_more() -> None:
    store = KvStore(devices(1, preset("full")), head_dim=128, dtype=DType.INT8)
    store.append(random(1, 100, 1, 128), random(2, 100, 1, 128))
    layout, stored = store._layouts[0], random(3, 1, 128)
    writes = list(layout.writes(100, stored, stored))
    assert sum(len(data) for _, data in writes) == 2 * 128 + 5
    assert len({offset for offset, _ in writes}) == len(writes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_narrow_heads_odd_tiles_and_other_arrays_are_refused(dtype: DType) -> None:
    tiny = devices(1, preset("tiny"))
    with pytest.raises(UserError, match=f"head_dim is 16: a cache of {dtype.name} takes 17 ... 256"):
        KvStore(tiny, head_dim=16, dtype=dtype)
    with pytest.raises(UserError, match="KV tiles of 64 tokens: choose a multiple of 128"):
        KvStore(tiny, head_dim=32, tile_tokens=64, dtype=dtype)
    store = KvStore(tiny, head_dim=32, dtype=dtype)
    for bad in (np.zeros((4, 1, 32), np.int8), np.zeros((4, 1, 8), np.float16)):
        with pytest.raises(UserError, match="give FP16 of shape"):
            store.append(bad, bad)
    with pytest.raises(UserError, match="queries are a int8 array"):
        store.attend(np.zeros((1, 32), np.int8), ordinary_softmax_scale(32))


@pytest.mark.parametrize(("dtype", "error"), [(DType.INT8, 2e-3), (DType.INT4, 4e-2)])
def test_rounding_costs_what_the_documents_say(dtype: DType, error: float) -> None:
    k, v, q = random(1, 2000, 1, 128), random(2, 2000, 1, 128), random(3, 8, 128)
    store = KvStore(devices(1, preset("small")), head_dim=128, dtype=dtype)
    plain = KvStore(devices(1, preset("small")), head_dim=128)
    outputs = []
    for each in (store, plain):
        each.append(k, v)
        outputs.append(each.attend(q, ordinary_softmax_scale(128)).output)
    distance = np.abs(outputs[0] - outputs[1]).max()
    assert error / 20 < distance < error
