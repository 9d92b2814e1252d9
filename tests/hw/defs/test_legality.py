"""Each status is reached by one fault, the first fault wins, and no address sum can wrap."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plora.hw.defs.config import PRESETS
from plora.hw.defs.descriptor import FIELDS, Descriptor, DType, Keep, Op, Source, Type
from plora.hw.defs.legality import ChainState, QueueWindow, RingSetup, check, in_window, ring_setup_allowed
from plora.hw.defs.packing import pack_geometry, pack_geometry_transposed
from plora.hw.defs.queue import softmax_scale
from plora.hw.defs.status import CHECK_ORDER, Status

TINY = PRESETS["tiny"]
MEMORY = 1 << TINY.dpa_bits
WINDOW = QueueWindow(base=0x10000, limit=0x80000, submission_slot_bytes=1 << 12, result_slot_bytes=1 << 12)


def legal(rows: int = 8, columns: int = 64, batch: int = 2, **fields: int) -> Descriptor:
    """A descriptor of that shape that is right in every respect but those given."""
    right = Descriptor(
        device_address=WINDOW.base,
        device_bytes=pack_geometry(TINY, rows, columns).packed_bytes,
        device_rows=rows,
        device_columns=columns,
        gpu_bytes=batch * columns * 2,
        gpu_rows=batch,
        gpu_columns=columns,
    )
    return replace(right, **fields)


SCALE = softmax_scale(0.125)


def scores(tokens: int = 32, dims: int = 64, batch: int = 2, **fields: int) -> Descriptor:
    """A legal first softmax descriptor of that shape, but for ``fields``."""
    return legal(tokens, dims, batch, **{"op": Op.SOFTMAX, "keep": Keep.NEW, "chain": 1, **fields})


def weighed(dims: int = 64, tokens: int = 32, batch: int = 2, stride: int | None = None, **fields: int) -> Descriptor:
    """A transposed descriptor of that shape that fits a chain with that many kept tokens, but for ``fields``."""
    geometry = pack_geometry_transposed(TINY, dims, tokens, fields.get("dtype", DType.FP16) % 4)
    right = {"source": Source.KEPT, "transpose": 1, "device_bytes": geometry.packed_bytes(stride)}
    return legal(dims, tokens, batch, **{**right, **fields})


FAULTS: list[tuple[Status, Descriptor]] = [
    (Status.BAD_TYPE, legal(type=Type.LOAD)),
    (Status.BAD_TYPE, legal(type=Type.NONE)),
    (Status.BAD_OP, legal(op=Op.NONE)),
    (Status.BAD_OP, legal(op=7)),
    (Status.BAD_DTYPE, legal(dtype=DType.INT4)),
    (Status.BAD_FLAGS, legal(source=Source.PREVIOUS)),
    (Status.BAD_FLAGS, legal(keep=3, chain=1)),
    (Status.BAD_FLAGS, legal(keep=Keep.NEW)),
    (Status.BAD_FLAGS, legal(acc_out=1)),
    (Status.BAD_FLAGS, legal(chain=1, keep=Keep.NEW, acc_out=1)),
    (Status.BAD_FLAGS, legal(chain=1, keep=Keep.NEW, source=Source.KEPT)),
    (Status.BAD_RESERVED, legal(reserved=1)),
    (Status.ZERO_DIMENSION, legal(device_rows=0)),
    (Status.ZERO_DIMENSION, legal(device_columns=0)),
    (Status.ZERO_DIMENSION, legal(gpu_rows=0)),
    (Status.ZERO_DIMENSION, legal(gpu_columns=0)),
    (Status.SHAPE_MISMATCH, legal(gpu_columns=63)),
    (Status.SHAPE_MISMATCH, legal(op=Op.GEMV)),
    (Status.SHAPE_MISMATCH, legal(chain=1, acc_out=1, batch=4)),
    (Status.SHAPE_MISMATCH, legal(columns=257, source=Source.KEPT)),
    (Status.SIZE_MISMATCH, legal(gpu_bytes=2 * 64 * 2 - 1)),
    (Status.SIZE_MISMATCH, legal(device_bytes=1)),
    (Status.MISALIGNED, legal(device_address=WINDOW.base + 64)),
    (Status.OUT_OF_WINDOW, legal(device_address=WINDOW.base - 128)),
    (Status.OUT_OF_WINDOW, legal(device_address=WINDOW.limit)),
    (Status.OUT_OF_WINDOW, legal(device_address=(1 << 64) - 128)),
    (Status.INPUT_TOO_LARGE, legal(columns=2048)),
    (Status.OUTPUT_TOO_LARGE, legal(rows=300, keep=Keep.NEW, chain=1)),
    (Status.OUTPUT_TOO_LARGE, legal(rows=3200, columns=8)),
    (Status.WEIGHTS_TOO_LARGE, legal(columns=1056, batch=4, source=Source.CHAIN)),
    (Status.SLOT_OVERFLOW, legal(rows=1024, columns=8, batch=2)),
    (Status.SLOT_OVERFLOW, legal(columns=1024)),
    (Status.CHAIN_BROKEN, legal(rows=2, acc_in=1)),
    (Status.CHAIN_BROKEN, legal(source=Source.KEPT)),
    (Status.CHAIN_BROKEN, legal(source=Source.CHAIN)),
    (Status.CHAIN_BROKEN, legal(keep=Keep.APPEND, chain=1)),
    (Status.BAD_DTYPE, scores(dtype=4)),
    (Status.BAD_DTYPE, weighed(dtype=7)),
    (Status.BAD_FLAGS, scores(dtype=DType.INT8, transpose=1)),
    (Status.SHAPE_MISMATCH, scores(dims=16, dtype=DType.INT8)),
    (Status.SIZE_MISMATCH, scores(dtype=DType.INT8)),
    (Status.SIZE_MISMATCH, weighed(tokens=129, dtype=DType.INT8, stride=6)),
    (Status.WEIGHTS_TOO_LARGE, weighed(tokens=801, batch=3, dtype=DType.INT8)),
    (Status.BAD_FLAGS, scores(keep=Keep.NONE)),
    (Status.BAD_FLAGS, scores(chain=0)),
    (Status.BAD_FLAGS, scores(acc_in=1)),
    (Status.BAD_FLAGS, scores(keep=Keep.NONE, acc_out=1)),
    (Status.BAD_FLAGS, scores(source=Source.KEPT, keep=Keep.APPEND)),
    (Status.BAD_FLAGS, scores(source=Source.PREVIOUS)),
    (Status.BAD_FLAGS, scores(transpose=1)),
    (Status.BAD_FLAGS, scores(transpose=1, source=Source.PREVIOUS)),
    (Status.BAD_FLAGS, scores(transpose=1, source=Source.KEPT, keep=Keep.APPEND)),
    (Status.BAD_FLAGS, weighed(source=Source.SLOT)),
    (Status.BAD_FLAGS, weighed(source=Source.CHAIN)),
    (Status.BAD_FLAGS, weighed(keep=Keep.APPEND, chain=1)),
    (Status.BAD_FLAGS, weighed(acc_out=1)),
    (Status.BAD_RESERVED, weighed(reserved=8)),
    (Status.SHAPE_MISMATCH, scores(dims=257)),
    (Status.SHAPE_MISMATCH, scores(batch=33)),
    (Status.SHAPE_MISMATCH, weighed(dims=257)),
    (Status.SHAPE_MISMATCH, weighed(op=Op.GEMV)),
    (Status.SHAPE_MISMATCH, weighed(dims=5, acc_in=1)),
    (Status.SHAPE_MISMATCH, weighed(dims=4, batch=3, acc_out=1, chain=1)),
    (Status.SIZE_MISMATCH, weighed(tokens=33, stride=2)),
    (Status.SIZE_MISMATCH, weighed(dims=8, device_bytes=3 * 3 * 128)),
    (Status.SIZE_MISMATCH, weighed(device_bytes=0)),
    (Status.OUT_OF_WINDOW, weighed(stride=(WINDOW.limit - WINDOW.base) // 128 // 16 + 1)),
    (Status.INPUT_TOO_LARGE, scores(dims=256, batch=32)),
    (Status.OUTPUT_TOO_LARGE, scores(tokens=513)),
    (Status.OUTPUT_TOO_LARGE, scores(tokens=257, batch=3)),
    (Status.OUTPUT_TOO_LARGE, scores(tokens=129, batch=5)),
    (Status.OUTPUT_TOO_LARGE, weighed(dims=256, batch=30)),
    (Status.WEIGHTS_TOO_LARGE, weighed(tokens=513, batch=3)),
    (Status.SLOT_OVERFLOW, weighed(dims=32, batch=32)),
    (Status.CHAIN_BROKEN, weighed()),
    (Status.CHAIN_BROKEN, weighed(source=Source.PREVIOUS)),
    (Status.CHAIN_BROKEN, scores(keep=Keep.APPEND, source=Source.CHAIN)),
]


@pytest.mark.parametrize("rows", [1, 2, 31, 33, 64])
@pytest.mark.parametrize("columns", [1, 8, 9, 16, 17, 32, 33, 64, 300])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_right_descriptors_are_accepted(rows: int, columns: int, batch: int) -> None:
    assert check(legal(rows, columns, batch), TINY, WINDOW).status is Status.OK


@pytest.mark.parametrize(("status", "d"), FAULTS, ids=[f"{i}-{s.name}" for i, (s, _) in enumerate(FAULTS)])
def test_one_fault_gives_its_status(status: Status, d: Descriptor) -> None:
    assert check(d, TINY, WINDOW, scale=SCALE).status is status, d.describe()


def test_every_status_that_a_decoder_gives_is_in_the_list_of_faults() -> None:
    outside = {Status.OK, Status.CHAIN_ABORTED, Status.MEMORY_ERROR, Status.ABORTED}
    assert {status for status, _ in FAULTS} | {Status.BAD_SCALE} == set(CHECK_ORDER) == set(Status) - outside
    assert len(set(CHECK_ORDER)) == len(CHECK_ORDER)


@pytest.mark.parametrize("scale", [0, 1, 0x3F800000 | 1 << 31, 103 << 23, 135 << 23, (103 << 23) - 1, 0x7FC00000])
def test_scales_from_2_to_the_minus_24_to_below_2_to_the_8_are_allowed(scale: int) -> None:
    bad = scale != 103 << 23
    verdict = check(scores(), TINY, WINDOW, scale=scale)
    assert verdict.status is (Status.BAD_SCALE if bad else Status.OK)
    appended = scores(keep=Keep.APPEND, source=Source.CHAIN)
    unchained = check(appended, TINY, WINDOW, scale=scale)
    assert unchained.status is (Status.BAD_SCALE if bad else Status.CHAIN_BROKEN)
    assert check(legal(), TINY, WINDOW, scale=scale).status is Status.OK


@given(st.builds(Descriptor, **{f.name: st.integers(0, (1 << f.width) - 1) for f in FIELDS}))
def test_any_encoding_gets_a_status(d: Descriptor) -> None:
    assert check(d, TINY, WINDOW).status in Status


def test_the_first_fault_wins() -> None:
    d = legal(type=Type.STORE, op=7, reserved=3, device_rows=0, device_address=1)
    assert check(d, TINY, WINDOW).status is Status.BAD_TYPE
    assert check(replace(d, type=Type.READ_COMPUTE), TINY, WINDOW).status is Status.BAD_OP


def test_chain_carries_kept_columns_operand_and_sums() -> None:
    first = check(legal(32, 64, 2, keep=Keep.NEW, chain=1), TINY, WINDOW)
    assert (first.chain.kept_rows, first.chain.kept_columns) == (2, 32)
    more = check(legal(32, 64, 2, keep=Keep.APPEND, chain=1, source=Source.CHAIN), TINY, WINDOW, first.chain)
    assert more.status is Status.OK and more.chain.kept_columns == 64
    last = check(legal(16, 64, 2, source=Source.KEPT), TINY, WINDOW, more.chain)
    assert (last.status, last.chain) == (Status.OK, ChainState())
    sums = check(legal(2, 64, 2, chain=1, acc_out=1), TINY, WINDOW)
    assert sums.chain.acc_terms == 64
    assert check(legal(2, 64, 2, acc_in=1), TINY, WINDOW, sums.chain).status is Status.OK
    assert check(legal(1, 64, 2, acc_in=1), TINY, WINDOW, sums.chain).status is Status.CHAIN_BROKEN
    assert check(legal(2, 64, 2), TINY, WINDOW, sums.chain).status is Status.CHAIN_BROKEN


def run_chain(*chain: Descriptor) -> tuple[Status, ChainState]:
    """The first status of ``chain`` that is not OK, or that of its end, and the state then."""
    state = ChainState()
    for d in chain:
        verdict = check(d, TINY, WINDOW, state, SCALE)
        state = verdict.chain
        if verdict.status is not Status.OK:
            break
    return verdict.status, state


def append(tokens: int, **shape: int) -> Descriptor:
    return scores(tokens, keep=Keep.APPEND, source=Source.CHAIN, **shape)


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 16])
def test_kept_tokens_fill_the_region_of_each_pair_and_not_more(batch: int) -> None:
    most = TINY.kept_stride((batch + 1) // 2, softmax=True) * 32
    dims = 32 if batch > 4 else 64
    assert run_chain(scores(most, dims, batch), weighed(16, most, batch)) == (Status.OK, ChainState())
    assert run_chain(scores(most + 1, dims, batch))[0] is Status.OUTPUT_TOO_LARGE
    if most > 64:
        parts = scores(64, dims, batch), append(most - 64, dims=dims, batch=batch)
        assert run_chain(*parts, weighed(16, most, batch))[0] is Status.OK
        assert run_chain(*parts, append(1, dims=dims, batch=batch))[0] is Status.CHAIN_BROKEN


def test_a_softmax_chain_keeps_its_kind_and_weighs_all_its_tokens_once() -> None:
    first = scores(64)
    assert run_chain(first, append(7), weighed(tokens=71))[0] is Status.OK
    status, state = run_chain(first, append(7), weighed(tokens=71, chain=1))
    assert (status, state.kept_softmax, state.kept_columns) == (Status.OK, True, 71)
    for tokens in (70, 72, 7):
        assert run_chain(first, append(7), weighed(tokens=tokens))[0] is Status.CHAIN_BROKEN
    assert run_chain(first, append(7), append(1))[0] is Status.CHAIN_BROKEN  # not whole words
    assert run_chain(first, weighed(tokens=64, batch=1))[0] is Status.CHAIN_BROKEN
    assert run_chain(first, scores(32, batch=1, keep=Keep.APPEND))[0] is Status.CHAIN_BROKEN


def test_plain_and_softmax_intermediates_do_not_mix() -> None:
    plain = legal(64, keep=Keep.NEW, chain=1)
    assert run_chain(plain, weighed(tokens=64))[0] is Status.CHAIN_BROKEN
    assert run_chain(plain, append(32))[0] is Status.CHAIN_BROKEN
    assert run_chain(scores(64), legal(8, 64, source=Source.KEPT))[0] is Status.CHAIN_BROKEN
    assert run_chain(scores(64), legal(32, keep=Keep.APPEND, chain=1))[0] is Status.CHAIN_BROKEN
    assert run_chain(scores(64), legal(64, keep=Keep.NEW, chain=1), legal(8, 64, source=Source.KEPT))[0] is Status.OK


def test_a_head_may_be_weighed_after_the_scores_of_the_next() -> None:
    def previous(tokens: int, batch: int = 2, dims: int = 16, **fields: int) -> Descriptor:
        return weighed(dims, tokens, batch, source=Source.PREVIOUS, **{"chain": 1, **fields})

    two = scores(64), append(7), scores(40, batch=1)
    assert run_chain(*two, previous(71), weighed(tokens=40, batch=1))[0] is Status.OK
    assert run_chain(*two, weighed(tokens=40, batch=1, chain=1), previous(71))[0] is Status.OK
    assert run_chain(*two, previous(71), scores(32), previous(40, 1), weighed(tokens=32))[0] is Status.OK
    for rows, tokens in ((2, 40), (1, 71), (1, 40), (2, 72)):
        assert run_chain(*two, previous(tokens, rows))[0] is Status.CHAIN_BROKEN
    assert run_chain(scores(64), previous(64))[0] is Status.CHAIN_BROKEN  # there is but one
    # More scores go to the newest, and leave the previous ones as they are.
    assert run_chain(*two[:2], scores(64), append(6), previous(71), weighed(tokens=70))[0] is Status.OK
    # A plain intermediate may lie over both.
    plain = legal(32, keep=Keep.NEW, chain=1)
    assert run_chain(*two, plain, previous(71))[0] is Status.CHAIN_BROKEN
    assert run_chain(plain, scores(64), previous(32))[0] is Status.CHAIN_BROKEN
    assert run_chain(plain, scores(64), scores(32), previous(64), weighed(tokens=32))[0] is Status.OK


def test_sums_are_of_one_heads_terms() -> None:
    part = weighed(4, 64, chain=1, acc_out=1, source=Source.PREVIOUS)
    both = scores(96), scores(96)
    assert run_chain(*both, part, weighed(4, 32, acc_in=1, source=Source.PREVIOUS))[0] is Status.OK
    assert run_chain(*both, part, weighed(4, 32, acc_in=1))[0] is Status.CHAIN_BROKEN
    newest = weighed(4, 64, chain=1, acc_out=1)
    assert run_chain(*both, newest, weighed(4, 32, acc_in=1, source=Source.PREVIOUS))[0] is Status.CHAIN_BROKEN


def test_accumulators_take_a_long_context_tile_by_tile() -> None:
    kept = scores(64), append(36)
    part = weighed(4, 64, chain=1, acc_out=1)
    assert run_chain(*kept, part, weighed(4, 36, acc_in=1))[0] is Status.OK
    assert run_chain(*kept, part, weighed(4, 35, acc_in=1))[0] is Status.CHAIN_BROKEN
    assert run_chain(*kept, part, weighed(4, 37, acc_in=1))[0] is Status.CHAIN_BROKEN
    assert run_chain(*kept, part, weighed(3, 36, acc_in=1))[0] is Status.CHAIN_BROKEN
    assert run_chain(*kept, weighed(4, 48, chain=1, acc_out=1), weighed(4, 52, acc_in=1))[0] is Status.CHAIN_BROKEN
    assert run_chain(*kept, weighed(4, 101, chain=1, acc_out=1))[0] is Status.CHAIN_BROKEN
    narrow = weighed(2, 64, chain=1, acc_out=1)
    assert run_chain(*kept, narrow, weighed(2, 36, acc_in=1))[0] is Status.OK
    assert run_chain(*kept, narrow, legal(2, 64, acc_in=1))[0] is Status.CHAIN_BROKEN  # sums lie elsewhere
    plain = legal(2, 64, chain=1, acc_out=1)
    assert run_chain(*kept, plain, weighed(2, 36, acc_in=1))[0] is Status.CHAIN_BROKEN


@pytest.mark.parametrize("dtype", [DType.INT8, DType.INT4])
def test_integers_are_keys_and_values_alone(dtype: DType) -> None:
    size = pack_geometry(TINY, 500, 17, dtype).packed_bytes
    first = scores(500, 17, dtype=dtype, device_bytes=size)
    assert run_chain(first, weighed(16, 500, dtype=dtype)) == (Status.OK, ChainState())
    assert run_chain(first, weighed(16, 500)) == (Status.OK, ChainState())
    assert run_chain(scores(500, 17, dtype=dtype, device_bytes=size + TINY.stripe_bytes))[0] is Status.SIZE_MISMATCH
    assert run_chain(legal(dtype=dtype))[0] is Status.BAD_DTYPE
    assert run_chain(legal(dtype=dtype, keep=Keep.NEW, chain=1))[0] is Status.BAD_DTYPE


@pytest.mark.parametrize("stride", [2, 3, 7])
def test_a_value_tile_may_have_room_for_more_tokens(stride: int) -> None:
    assert run_chain(scores(32), weighed(tokens=32, stride=stride))[0] is Status.OK


@given(st.integers(0, (1 << 64) - 1), st.integers(0, 1 << 20), st.integers(0, MEMORY), st.integers(0, 1 << 65))
def test_in_window_is_set_inclusion(address: int, size: int, base: int, limit: int) -> None:
    expected = limit <= MEMORY and base <= address < limit and address + size <= limit
    assert in_window(address, size, base, limit, MEMORY) is expected


SETUP = RingSetup(
    base=0x10000,
    limit=0x20000,
    depth=4,
    submission_base=0x10000,
    submission_slot_log2=13,
    result_base=0x18000,
    result_slot_log2=13,
)


def test_rings_that_fill_the_window_exactly_are_allowed() -> None:
    assert ring_setup_allowed(TINY, SETUP)


@pytest.mark.parametrize(
    "change",
    [
        {"depth": 1},
        {"depth": 0},
        {"depth": 5},
        {"depth": 4097},
        {"submission_slot_log2": 10},
        {"submission_slot_log2": 15},
        {"submission_slot_log2": 25},
        {"result_slot_log2": 10},
        {"result_slot_log2": 31},
        {"submission_base": 0x10040},
        {"submission_base": 0xFF80},
        {"submission_base": 0x18080},
        {"result_base": 0x18020},
        {"result_base": 0x18040},
        {"result_base": 0x20000},
        {"result_base": (1 << 64) - 64},
        {"base": 0x10001},
        {"base": 0x20000},
        {"limit": 0x1FFFF},
        {"limit": 0},
        {"limit": MEMORY + 1},
        {"limit": (1 << 64) - 1},
    ],
    ids=str,
)
def test_one_fault_refuses_the_set_up(change: dict[str, int]) -> None:
    assert not ring_setup_allowed(TINY, replace(SETUP, **change))
