"""Attention of query rows over a device's tokens as chains of legal descriptors.

A chain: softmax descriptors over the keys, tile after tile, whose terms stay on the device; then transposed
descriptors over the values. One chain serves as many query rows and tokens as the device can keep terms
of. Where values span several tiles, the accumulators carry their sums from one to the next, which they do
for two rows at a time. Where not even two rows' terms fit, tokens are cut into *spans*, each with a partial
result of its own. Chains that a device runs one after the other are joined (`joined`).

A plan never touches a value, so that plans of any size can be made, checked and priced without memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from plora.hw.defs.config import (
    PE_ROWS,
    SOFTMAX_MAX_ROWS,
    VALUE_BYTES,
    WORD_BYTES,
    WORD_VALUES,
)
from plora.hw.defs.descriptor import MAX_OPERAND_BYTES, Descriptor, Keep, Op, Source
from plora.hw.defs.errors import UserError
from plora.hw.defs.legality import kept_column_limit
from plora.hw.defs.packing import ceil_div, operand_row_stripes, pack_geometry, result_row_words
from plora.hw.defs.queue import RESULT_OFFSET, operand_offset
from plora.hw.defs.registers import RESET_CHAIN_LIMIT
from plora.sw.attention.layout import KvLayout
from plora.sw.tiling import SlotSizes


@dataclass(frozen=True)
class AttentionStep:
    """One descriptor of a chain."""

    descriptor: Descriptor
    takes_queries: bool = False
    """The chain's query rows go into its slot."""
    dims: range | None = None
    """Columns of the output that its result holds; None if it has none."""


@dataclass(frozen=True)
class AttentionChain:
    """A chain, and what it is the attention of."""

    rows: range
    """Query rows."""
    tokens: range
    """Tokens of the device."""
    steps: tuple[AttentionStep, ...]


def joined(chains: Sequence[AttentionChain], longest: int) -> Iterator[list[tuple[int, AttentionStep]]]:
    """Join chains of one device to chains of at most ``longest`` descriptors, each step with its chain's number.

    The values of each come after the scores of the next, in whose time the device completes the terms that they are
    weighed with. Steps of a chain keep their order. One that is longer by itself stays as it is.
    """
    together: list[int] = []
    steps = 0
    for number, chain in enumerate(chains):
        if together and steps + len(chain.steps) > longest:
            yield _linked(_in_turns(chains, together))
            together, steps = [], 0
        together.append(number)
        steps += len(chain.steps)
    if together:
        yield _linked(_in_turns(chains, together))


def _in_turns(chains: Sequence[AttentionChain], numbers: Sequence[int]) -> Iterator[tuple[int, AttentionStep]]:
    for number, following in zip((None, *numbers), (*numbers, None), strict=True):
        if following is not None:
            yield from ((following, step) for step in chains[following].steps if not step.descriptor.transpose)
        if number is not None:
            source = Source.KEPT if following is None else Source.PREVIOUS
            for step in chains[number].steps:
                if step.descriptor.transpose:
                    yield number, replace(step, descriptor=replace(step.descriptor, source=source))


def _linked(steps: Iterable[tuple[int, AttentionStep]]) -> list[tuple[int, AttentionStep]]:
    """All steps but the last say that their chain goes on."""
    linked = [(number, replace(step, descriptor=replace(step.descriptor, chain=1))) for number, step in steps]
    number, last = linked[-1]
    return [*linked[:-1], (number, replace(last, descriptor=replace(last.descriptor, chain=0)))]


@dataclass(frozen=True)
class _Piece:
    """Tokens of one tile, counted from its start."""

    address: int
    start: int
    stop: int


def plan_attention(
    layout: KvLayout, tiles: Sequence[int], tokens: int, rows: int, slots: SlotSizes
) -> Iterator[AttentionChain]:
    """Plan attention of ``rows`` query rows over the first ``tokens`` tokens, which lie in tiles at ``tiles`` (DPA).

    Raises:
        UserError: no rows, tokens beyond the tiles, or slots or buffers that do not hold a single row.
    """
    if rows < 1 or not 0 <= tokens <= len(tiles) * layout.tile_tokens:
        raise UserError(
            f"attention of {rows} query rows over {tokens} tokens in {len(tiles)} tiles of {layout.tile_tokens}: choose"
            " at least one row, and no more tokens than were stored"
        )
    batch, most = _batch_and_span(layout, tokens, min(rows, SOFTMAX_MAX_ROWS), slots)
    spans = ceil_div(tokens, most) if tokens else 0
    granule = layout.granule
    step = ceil_div(ceil_div(tokens, spans), granule) * granule if spans else 0
    for first in range(0, rows, batch):
        for start in range(0, tokens, step or 1):
            span = range(start, min(start + step, tokens))
            yield _chain(layout, _pieces(layout, tiles, span), span, range(first, min(first + batch, rows)), slots)


def _pieces(layout: KvLayout, tiles: Sequence[int], span: range) -> list[_Piece]:
    size = layout.tile_tokens
    return [
        _Piece(tiles[tile], max(span.start - tile * size, 0), min(span.stop - tile * size, size))
        for tile in range(span.start // size, ceil_div(span.stop, size))
    ]


def _batch_and_span(layout: KvLayout, tokens: int, rows: int, slots: SlotSizes) -> tuple[int, int]:
    """Most query rows of a chain, preferably over all tokens, and most tokens of it."""
    config, granule = layout.config, layout.granule
    row_stripes = operand_row_stripes(config, layout.head_dim)
    in_slot = (slots.submission_bytes - operand_offset(config)) // (row_stripes * config.stripe_bytes)
    in_result = (slots.result_bytes - RESULT_OFFSET) // (_result_words(layout, 1) * WORD_BYTES)
    in_buffer = PE_ROWS * (config.input_half_stripes // row_stripes)
    for batch in (*range(rows, 2, -1), 2, 1):
        pairs = ceil_div(batch, PE_ROWS)
        if batch > rows or batch > min(in_slot, in_result, in_buffer):
            continue
        if pairs * _result_words(layout, 1) > config.result_half_words:
            continue
        span = min(kept_column_limit(config, pairs, softmax=True), config.accumulator.max_terms)
        if pairs > 1:
            # Accumulators serve one pair, and the DRAM buffer holds what further pairs take.
            if pack_geometry(config, 1, layout.head_dim).beats > config.dram_buffer_stripes:
                continue
            span = min(span, layout.tile_tokens, layout.most_values(config.dram_buffer_stripes))
            if span >= tokens:
                return batch, span
            continue
        span = min(span, _tiles_of_a_chain(layout) * layout.tile_tokens)
        if span >= granule:
            return batch, span // granule * granule
    raise UserError(
        f"one query row of {layout.head_dim} values does not fit slots of {slots.submission_bytes} and"
        f" {slots.result_bytes} bytes or the buffers of {config.name!r}; use larger ones"
    )


def _tiles_of_a_chain(layout: KvLayout) -> int:
    """Most whole tiles of a chain that the device does not close for its length; one more may be in it in parts."""
    of_keys = ceil_div(layout.tile_tokens, layout.most_keys)
    return max(1, RESET_CHAIN_LIMIT // (of_keys + layout.value_groups) - 1)


def _result_words(layout: KvLayout, groups: int) -> int:
    """Words of a result row of ``groups`` groups of dims."""
    return result_row_words(min(groups * layout.group_dims, layout.head_dim), transpose=True)


def _chain(layout: KvLayout, pieces: Sequence[_Piece], span: range, rows: range, slots: SlotSizes) -> AttentionChain:
    steps = [*_key_steps(layout, pieces, len(rows)), *_value_steps(layout, pieces, len(rows), slots)]
    linked = (replace(step, descriptor=replace(step.descriptor, chain=1)) for step in steps[:-1])
    return AttentionChain(rows, span, (*linked, steps[-1]))


def _key_steps(layout: KvLayout, pieces: Sequence[_Piece], batch: int) -> Iterator[AttentionStep]:
    most = layout.most_keys
    cuts = [
        (piece.address, start, min(start + most, piece.stop))
        for piece in pieces
        for start in range(piece.start, piece.stop, most)
    ]
    for index, (address, start, stop) in enumerate(cuts):
        d = Descriptor(
            op=Op.SOFTMAX,
            dtype=layout.dtype,
            source=Source.SLOT if index == 0 else Source.CHAIN,
            keep=Keep.NEW if index == 0 else Keep.APPEND,
            device_address=address + layout.key_offset(start),
            device_bytes=layout.keys_of(stop - start).packed_bytes,
            device_rows=stop - start,
            device_columns=layout.head_dim,
            gpu_bytes=batch * layout.head_dim * VALUE_BYTES,
            gpu_rows=batch,
            gpu_columns=layout.head_dim,
        )
        yield AttentionStep(d, takes_queries=index == 0)


def _value_steps(layout: KvLayout, pieces: Sequence[_Piece], batch: int, slots: SlotSizes) -> Iterator[AttentionStep]:
    whole = len(pieces) == 1 and pieces[0].start == 0
    at_once = _groups_at_once(layout, batch, slots) if whole else 1
    for group in range(0, layout.value_groups, at_once):
        groups = min(at_once, layout.value_groups - group)
        dims = range(group * layout.group_dims, min((group + groups) * layout.group_dims, layout.head_dim))
        for index, piece in enumerate(pieces):
            first, last = index == 0, index == len(pieces) - 1
            tokens = piece.stop - piece.start
            # Groups together need the tile's stride; one alone takes no more than its tokens.
            stripes = groups * layout.value_stride if groups > 1 else layout.values_of(tokens).group_stripes
            d = Descriptor(
                op=Op.GEMV if batch == 1 else Op.GEMM,
                dtype=layout.dtype,
                source=Source.KEPT,
                transpose=1,
                acc_in=int(not first),
                acc_out=int(not last),
                device_address=piece.address + layout.value_offset(group, piece.start),
                device_bytes=stripes * layout.config.stripe_bytes,
                device_rows=len(dims),
                device_columns=tokens,
                gpu_bytes=batch * tokens * VALUE_BYTES,
                gpu_rows=batch,
                gpu_columns=tokens,
            )
            yield AttentionStep(d, dims=dims if last else None)


def _groups_at_once(layout: KvLayout, batch: int, slots: SlotSizes) -> int:
    """Groups of dims that one descriptor can state and whose results fit."""
    config = layout.config
    words = min(
        config.result_half_words // ceil_div(batch, PE_ROWS),
        (slots.result_bytes - RESULT_OFFSET) // (WORD_BYTES * batch),
    )
    by_bytes = MAX_OPERAND_BYTES // (layout.value_stride * config.stripe_bytes)
    by_result = (words - 1) * WORD_VALUES // layout.group_dims
    if _result_words(layout, layout.value_groups) <= words:
        by_result = layout.value_groups
    return max(1, min(by_bytes, by_result, layout.value_groups))
