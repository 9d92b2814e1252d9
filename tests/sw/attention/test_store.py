"""Attention over several functional devices: golden bits of each, and float64 within the proven bound."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plora.hw.defs.config import NdpConfig, preset
from plora.hw.defs.errors import UserError
from plora.hw.defs.queue import ordinary_softmax_scale, softmax_scale, softmax_scale_value
from plora.sim.functional import FunctionalDevice
from plora.sim.functional.layout import Matrix
from plora.sim.golden import softmax as golden
from plora.sw.attention.attend import Attended
from plora.sw.attention.bound import error_bound
from plora.sw.attention.merge import Partial, attend_exactly, merge
from plora.sw.attention.store import KvStore
from plora.sw.queue_pair import DescriptorError
from plora.sw.session import Session, open_session
from plora.sw.tiling import SlotSizes

MEMORY_BYTES = 8 << 20


def devices(count: int, config: NdpConfig, *, seed: int | None = None, depth: int = 32) -> list[Session]:
    return [
        open_session(
            FunctionalDevice(config, MEMORY_BYTES, fill=0xFF, reorder_seed=seed),
            memory_bytes=MEMORY_BYTES,
            depth=depth,
            slots=SlotSizes(13, 13),
        )
        for _ in range(count)
    ]


def random(seed: int, *shape: int, size: float = 1.0) -> Matrix:
    return (size * np.random.default_rng(seed).standard_normal(shape)).astype(np.float16)


def check_bits(got: Attended, q: Matrix, k: Matrix, v: Matrix, scale: int, store: KvStore, count: int) -> None:
    """Every chain's result is the golden model's; chains of a device share its tokens."""
    group = len(q) // store.kv_heads
    for part in got.parts:
        rows, tokens = part.chain.rows, part.chain.tokens
        mine = q[part.head * group : (part.head + 1) * group][rows.start : rows.stop]
        local = slice(tokens.start, tokens.stop)
        keys, values = (each[part.device :: count, part.head][local] for each in (k, v))
        config = store.config(part.device)
        expected = golden.golden_attention(mine, keys, values, softmax_scale_value(scale), config).partial
        where = f"device {part.device}, head {part.head}, rows {rows}, tokens {tokens}"
        assert np.array_equal(part.o.view(np.uint16), expected.o.view(np.uint16)), where
        none = expected.anchor == golden.NO_ANCHOR
        assert np.array_equal(part.partial.m, np.where(none, -np.inf, expected.anchor + expected.shift)), where
        assert np.array_equal(part.partial.l, expected.total * 2.0 ** -(24.0 + expected.shift)), where


def check_errors(got: Attended, q: Matrix, k: Matrix, v: Matrix, scale: int, store: KvStore) -> float:
    """Every output lies within the bound; return the largest share of it that was used."""
    group, worst = len(q) // store.kv_heads, 0.0
    for head in range(store.kv_heads):
        mine = q[head * group : (head + 1) * group]
        exact = merge([attend_exactly(mine, k[:, head], v[:, head], scale)])
        bound = error_bound(mine, k[:, head], v[:, head], scale, store.config(0).accumulator)
        error = np.abs(got.output[head * group : (head + 1) * group] - exact)
        assert (error <= bound).all(), f"head {head}: {(error / bound).max()} of the bound"
        worst = max(worst, float((error / bound).max()))
    return worst


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", ["tiny", "small", "full"])
def test_grouped_queries_over_tiles_and_devices(name: str, count: int) -> None:
    config = preset(name)
    store = KvStore(devices(count, config), head_dim=64, kv_heads=2, tile_tokens=64)
    k, v = random(1, 300, 2, 64), random(2, 300, 2, 64)
    q, scale = random(3, 8, 64), ordinary_softmax_scale(64)
    store.append(k, v)
    got = store.attend(q, scale)
    check_bits(got, q, k, v, scale, store, count)
    check_errors(got, q, k, v, scale, store)
    assert store.tokens() == 300
    assert len(got.cycles) == count and all(got.cycles)


def test_the_bound_is_a_few_roundings_of_the_values() -> None:
    q, k, v = random(20, 4, 128), random(21, 64, 128), random(22, 64, 128)
    bound = error_bound(q, k, v, ordinary_softmax_scale(128), preset("full").accumulator)
    assert bound.max() < 2.0**-11 * np.abs(v).max()
    one = error_bound(q, k[:1], v[:1], ordinary_softmax_scale(128), preset("full").accumulator)
    assert (one < 2.0**-10 * np.abs(v[:1]) + 2.0**-21).all(), "one token is its own value, rounded"


def test_the_cache_grows_token_by_token_and_each_step_sees_all_of_it() -> None:
    config, count = preset("small"), 2
    store = KvStore(devices(count, config, seed=1), head_dim=80, tile_tokens=32)
    k, v, scale = random(4, 150, 1, 80), random(5, 150, 1, 80), ordinary_softmax_scale(80)
    store.append(k[:90], v[:90])
    for step in range(90, 150, 7):
        store.append(k[store.tokens() : step], v[store.tokens() : step])
        q = random(step, 3, 80, size=4)
        got = store.attend(q, scale)
        check_bits(got, q, k[:step], v[:step], scale, store, count)
        check_errors(got, q, k[:step], v[:step], scale, store)


@given(
    st.sampled_from(["tiny", "small"]),
    st.integers(1, 3),
    st.sampled_from([1, 8, 16, 33, 64]),
    st.integers(1, 6),
    st.integers(1, 2),
    st.integers(1, 200),
    st.sampled_from([0.01, 1.0, 30.0]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=30)
def test_any_shape_has_golden_bits_and_the_bound(
    name: str, count: int, dims: int, group: int, heads: int, tokens: int, size: float, seed: int
) -> None:
    config = preset(name)
    store = KvStore(devices(count, config, depth=4), head_dim=dims, kv_heads=heads, tile_tokens=64)
    k, v = random(seed, tokens, heads, dims), random(seed + 1, tokens, heads, dims, size=3)
    q, scale = random(seed + 2, group * heads, dims, size=size), ordinary_softmax_scale(dims)
    store.append(k, v)
    got = store.attend(q, scale)
    check_bits(got, q, k, v, scale, store, count)
    check_errors(got, q, k, v, scale, store)


def test_more_tokens_than_one_chain_keeps_are_several_partial_results() -> None:
    config = preset("tiny")
    store = KvStore(devices(1, config), head_dim=16)
    k, v = random(6, 2100, 1, 16), random(7, 2100, 1, 16)
    q, scale = random(8, 3, 16), ordinary_softmax_scale(16)
    store.append(k, v)
    got = store.attend(q, scale)
    assert len({part.chain.tokens for part in got.parts}) == 5
    check_bits(got, q, k, v, scale, store, 1)
    check_errors(got, q, k, v, scale, store)


def test_tokens_on_the_gpu_join_those_of_the_devices() -> None:
    config = preset("small")
    store = KvStore(devices(2, config), head_dim=64, kv_heads=2)
    k, v = random(9, 200, 2, 64), random(10, 200, 2, 64)
    q, scale = random(11, 4, 64), ordinary_softmax_scale(64)
    store.append(k[50:], v[50:])
    others = [[attend_exactly(q[2 * h : 2 * h + 2], k[:50, h], v[:50, h], scale)] for h in range(2)]
    check_errors(store.attend(q, scale, others=others), q, k, v, scale, store)
    empty = KvStore(devices(2, config), head_dim=64, kv_heads=2)
    alone = empty.attend(q, scale, others=others)
    exact = np.concatenate([merge(parts) for parts in others])
    assert np.array_equal(alone.output, exact) and alone.descriptors == 0


def test_the_order_of_partial_results_does_not_change_a_bit() -> None:
    rng = np.random.default_rng(12)
    parts = [
        Partial(rng.standard_normal((3, 5)), rng.integers(-40, 40, 3).astype(float), rng.random(3)) for _ in range(4)
    ]
    parts[1].m[0] = -np.inf
    parts[1].o[0] = parts[1].l[0] = 0
    results = [merge(list(order)) for order in itertools.permutations(parts)]
    assert all(np.array_equal(results[0], other) for other in results[1:])


def test_merging_is_that_of_the_golden_model() -> None:
    config, scale = preset("tiny"), 0.3
    q, k, v = random(13, 4, 32), random(14, 90, 32), random(15, 90, 32)
    ours, theirs = [], []
    for device in range(3):
        part = golden.golden_attention(q, k[device::3], v[device::3], scale, config).partial
        theirs.append(part)
        ours.append(
            Partial(
                part.o.astype(float), (part.anchor + part.shift).astype(float), part.total * 2.0 ** -(24.0 + part.shift)
            )
        )
    np.testing.assert_allclose(merge(ours), golden.merge_partials(theirs), rtol=1e-13)


def test_masked_and_special_rows() -> None:
    config, scale = preset("tiny"), softmax_scale(1.0)
    store = KvStore(devices(2, config), head_dim=1)
    k = np.array([1, 2, 65504, 3], np.float16).reshape(4, 1, 1)
    v = np.array([1, -2, 3, 4], np.float16).reshape(4, 1, 1)
    store.append(k, v)
    q = np.array([[-np.inf], [np.nan], [0], [np.inf], [65504]], np.float16)
    got = store.attend(q, scale)
    assert got.output[0] == 0, "every score is minus infinity: no weight, and no NaN"
    assert np.isnan(got.output[[1, 3, 4]]).all()
    assert got.output[2] == 1.5
    assert got.numeric == 3


def test_memory_is_taken_by_tiles_and_given_back() -> None:
    config = preset("tiny")
    sessions = devices(2, config)
    free = [session.allocator.free_bytes for session in sessions]
    store = KvStore(sessions, head_dim=32, kv_heads=2, layers=3, tile_tokens=32)
    store.append(random(16, 65, 2, 32), random(17, 65, 2, 32), layer=1)
    # 33 tokens on the first device, 32 on the second.
    tile = 2 * 32 * 32 * 2
    assert [before - s.allocator.free_bytes for before, s in zip(free, sessions, strict=True)] == [4 * tile, 2 * tile]
    assert store.size_bytes == 6 * tile and (store.tokens(0), store.tokens(1)) == (0, 65)
    store.free()
    assert [session.allocator.free_bytes for session in sessions] == free
    assert store.tokens(1) == store.size_bytes == 0


def test_a_prefix_is_stored_once_and_each_sequence_goes_its_own_way() -> None:
    config, scale = preset("tiny"), ordinary_softmax_scale(32)
    sessions = devices(2, config)
    free = [session.allocator.free_bytes for session in sessions]
    first = KvStore(sessions, head_dim=32, kv_heads=2, tile_tokens=32, name="first")
    prefix, own = random(30, 150, 2, 2, 32), random(31, 3, 40, 2, 2, 32)
    first.append(prefix[:, 0], prefix[:, 1])
    held = sum(free) - sum(session.allocator.free_bytes for session in sessions)
    others = [first.fork("second"), first.fork("third")]
    assert sum(free) - sum(session.allocator.free_bytes for session in sessions) == held, "a fork takes no memory"
    q = random(32, 4, 32)
    stores = [first, *others]
    for count in (0, 1, 7, 40):
        for store, tokens in zip(stores, own, strict=True):
            more = tokens[store.tokens() - 150 : count]
            store.append(more[:, 0], more[:, 1])
        for store, tokens in zip(stores, own, strict=True):
            k, v = (np.concatenate([prefix[:, i], tokens[:count, i]]) for i in range(2))
            got = store.attend(q, scale)
            check_bits(got, q, k, v, scale, store, 2)
            check_errors(got, q, k, v, scale, store)
    # Per head and device 75 tokens: two whole tiles that all share; the third each has for itself, and 95 fit it.
    tile = 2 * 32 * 32 * 2
    assert sum(free) - sum(session.allocator.free_bytes for session in sessions) == (2 + 3) * 4 * tile
    first.free()
    k, v = (np.concatenate([prefix[:, i], own[1, :, i]]) for i in range(2))
    check_bits(others[0].attend(q, scale), q, k, v, scale, others[0], 2)
    for store in others:
        store.free()
    assert [session.allocator.free_bytes for session in sessions] == free


def test_tokens_that_were_taken_back_leave_the_rest_as_it_was() -> None:
    config, scale = preset("small"), ordinary_softmax_scale(64)
    sessions = devices(2, config)
    store = KvStore(sessions, head_dim=64, tile_tokens=32)
    k, v, q = random(33, 140, 1, 64), random(34, 140, 1, 64), random(35, 2, 64)
    store.append(k, v)
    full = store.size_bytes
    fork = store.fork("as it was")
    for keep in (139, 129, 64, 63, 5):
        store.truncate(keep)
        assert store.tokens() == keep
        check_bits(store.attend(q, scale), q, k[:keep], v[:keep], scale, store, 2)
    assert store.size_bytes < full == fork.size_bytes
    new_k, new_v = random(36, 50, 1, 64), random(37, 50, 1, 64)
    store.append(new_k, new_v)  # into tiles that the other still has: copied first
    both_k, both_v = np.concatenate([k[:5], new_k]), np.concatenate([v[:5], new_v])
    check_bits(store.attend(q, scale), q, both_k, both_v, scale, store, 2)
    check_bits(fork.attend(q, scale), q, k, v, scale, fork, 2)
    store.truncate(1000)
    assert store.tokens() == 55
    with pytest.raises(UserError, match="-1 tokens cannot be kept"):
        store.truncate(-1)


def test_a_copy_that_does_not_fit_leaves_both_sequences_as_they_were() -> None:
    config, scale = preset("tiny"), ordinary_softmax_scale(64)
    sessions = devices(1, config)
    k, q = random(38, 600, 1, 64), random(39, 1, 64)
    store = KvStore(sessions, head_dim=64, tile_tokens=1024)
    store.append(k, k)
    fork = store.fork("other")
    session = sessions[0]
    session.allocator.allocate(session.allocator.free_bytes - 4096, "everything else")
    with pytest.raises(UserError, match="KV cache of other"):
        fork.append(k[:1], k[:1])
    assert (store.tokens(), fork.tokens()) == (600, 600)
    check_bits(fork.attend(q, scale), q, k, k, scale, fork, 1)
    store.free()
    fork.append(k[:1], k[:1])  # no longer shared, so nothing has to be copied
    both = np.concatenate([k, k[:1]])
    check_bits(fork.attend(q, scale), q, both, both, scale, fork, 1)


def test_several_sequences_are_under_way_at_once() -> None:
    config, scale = preset("small"), ordinary_softmax_scale(64)
    sessions = devices(2, config, depth=6)
    k, v, q = random(40, 3, 90, 2, 64), random(41, 3, 90, 2, 64), random(42, 3, 4, 64)
    stores = [KvStore(sessions, head_dim=64, kv_heads=2, tile_tokens=32, name=f"request {i}") for i in range(3)]
    for i, store in enumerate(stores):
        store.append(k[i, : 30 * (i + 1)], v[i, : 30 * (i + 1)])
    running = [store.begin(q[i], scale) for i, store in enumerate(stores)]
    for i in (2, 0, 1):
        tokens = 30 * (i + 1)
        got = running[i].finish()
        check_bits(got, q[i], k[i, :tokens], v[i, :tokens], scale, stores[i], 2)


def test_a_device_that_fails_says_so_and_serves_the_next_token() -> None:
    config, scale = preset("tiny"), ordinary_softmax_scale(64)
    sessions = devices(2, config)
    k, v, q = random(43, 90, 1, 64), random(44, 90, 1, 64), random(45, 2, 64)
    store = KvStore(sessions, head_dim=64, tile_tokens=32)
    store.append(k, v)
    port = sessions[1].driver.port
    assert isinstance(port, FunctionalDevice)
    tile = next(region for region in sessions[1].allocator.held if region.name.startswith("KV cache"))
    port.memory.add_error_range(tile.address, 64)
    with pytest.raises(DescriptorError, match="MEMORY_ERROR"):
        store.attend(q, scale)
    port.memory.clear_errors()
    check_bits(store.attend(q, scale), q, k, v, scale, store, 2)


def test_a_full_memory_refuses_the_tokens_and_holds_none_of_them() -> None:
    config = preset("tiny")
    sessions = devices(2, config)
    store = KvStore(sessions, head_dim=64, tile_tokens=1024, name="request 7")
    k = random(18, 4000, 1, 64)
    store.append(k[:100], k[:100])
    held = store.size_bytes
    with pytest.raises(UserError, match="KV cache of request 7, layer 0, head 0"):
        for _ in range(40):
            before, tokens = store.size_bytes, store.tokens()
            store.append(k, k)
    assert (store.size_bytes, store.tokens()) == (before, tokens) and before > held
    q, scale = random(19, 2, 64), ordinary_softmax_scale(64)
    store.attend(q, scale)


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        (np.zeros((3, 2, 64), np.float32), np.zeros((3, 2, 64), np.float16)),
        (np.zeros((3, 2, 64), np.float16), np.zeros((3, 2, 64), np.float64)),
        (np.zeros((3, 2, 64), np.float16), np.zeros((4, 2, 64), np.float16)),
        (np.zeros((3, 1, 64), np.float16), np.zeros((3, 1, 64), np.float16)),
        (np.zeros((3, 2, 63), np.float16), np.zeros((3, 2, 63), np.float16)),
        (np.zeros((3, 64), np.float16), np.zeros((3, 64), np.float16)),
    ],
)
def test_other_shapes_and_types_are_refused(keys: Matrix, values: Matrix) -> None:
    store = KvStore(devices(1, preset("tiny")), head_dim=64, kv_heads=2)
    with pytest.raises(UserError, match=r"KV cache of sequence: (keys|values) are a"):
        store.append(keys, values)
    assert store.tokens() == 0


@pytest.mark.parametrize("q", [np.zeros((3, 64), np.float16), np.zeros((0, 64), np.float16), np.zeros((2, 64))])
def test_other_queries_are_refused(q: Matrix) -> None:
    store = KvStore(devices(1, preset("tiny")), head_dim=64, kv_heads=2)
    with pytest.raises(UserError, match="queries are a"):
        store.attend(q, ordinary_softmax_scale(64))


def test_a_cache_needs_a_device_and_a_head() -> None:
    with pytest.raises(UserError, match="on 0 devices"):
        KvStore([], head_dim=64)
    with pytest.raises(UserError, match="head_dim is 300"):
        KvStore(devices(1, preset("tiny")), head_dim=300)
    with pytest.raises(UserError, match="head_dim is 0"):
        KvStore(devices(1, preset("tiny")), head_dim=0)
