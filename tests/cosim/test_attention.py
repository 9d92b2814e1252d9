"""Attention by one host on two devices: the same driver calls leave the same bytes in model and RTL."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from plora.hw.defs.config import PE_ROWS, preset
from plora.hw.defs.descriptor import DType, Keep, Op, Source
from plora.hw.defs.legality import kept_column_limit
from plora.hw.defs.packing import (
    INTEGER_MIN_COLUMNS,
    ceil_div,
    expansion_log2,
    pack_geometry_transposed,
)
from plora.hw.defs.queue import ordinary_softmax_scale, softmax_scale
from plora.hw.defs.status import Status
from plora.sim.functional.layout import pack_operand, pack_transposed, pack_transposed_integers
from plora.sw.attention import KvStore
from plora.sw.cli import main
from plora.sw.queue_pair import Request, Ticket
from plora.sw.session import Session
from plora.sw.tiling import SlotSizes
from tests import descriptors
from tests.cosim.test_same_bytes import CALM, DEPTH, ROUGH, Stream, both, inject, integers, values

TINY = preset("tiny")


class AttentionStream(Stream):
    """Heads of any shape, between the products of `Stream`, in chains of their own; some with a fault."""

    def chain(self) -> list[Request]:
        """The chain of a head or of two that take turns, or one of `Stream`."""
        rng = self.rng
        if rng.random() < 0.4:
            return super().chain()
        scores, values = self.head()
        if rng.random() < 0.5:
            return scores + values
        next_scores, next_values = self.head()
        chain = [*scores, *next_scores, *(self.changed(one, source=Source.PREVIOUS) for one in values), *next_values]
        if len(chain) > DEPTH:
            return scores + values
        return [*(self.changed(one, chain=1) for one in chain[:-1]), chain[-1]]

    @staticmethod
    def changed(request: Request, **fields: int) -> Request:
        """The request with other flags; a value that a fault has put there stays."""
        d = request.descriptor
        usual = {"source": Source.KEPT, "chain": 0}
        return replace(request, descriptor=replace(d, **{n: v for n, v in fields.items() if getattr(d, n) == usual[n]}))

    def head(self) -> tuple[list[Request], list[Request]]:
        """Scores of a head in tiles, and its values."""
        rng = self.rng
        b, dims = rng.choice([1, 2, 2, 3, 5]), rng.choice([1, 8, 9, 16, 17, 32, 40, 64, 100])
        tiles = [32 * rng.randint(1, 3) for _ in range(rng.choice([0, 1, 1, 2]))] + [rng.randint(1, 70)]
        while sum(tiles) > kept_column_limit(TINY, ceil_div(b, PE_ROWS), softmax=True):
            tiles.pop(0)
        scale = softmax_scale(rng.choice([1.0, 0.2, 0.01, 2.0**-20]))
        # Of either type alone or of both; FP16 patterns are BF16 by turns.
        of_keys: dict[str, int] = {}
        if dims >= INTEGER_MIN_COLUMNS and rng.random() < 0.5:
            of_keys = {"dtype": rng.choice([DType.INT8, DType.INT4])}
        self.value_dtype = rng.choice([DType.FP16, DType.INT8, DType.INT4])
        requests = []
        for index, tokens in enumerate(tiles):
            flags = {"source": Source.CHAIN, "keep": Keep.APPEND} if index else {"keep": Keep.NEW}
            requests.append(self.product(tokens, dims, b, chain=1, op=Op.SOFTMAX, **flags, **of_keys))
        requests = [replace(request, softmax_scale=scale) for request in requests]
        weighed = self.weigh(tiles, b, rng.choice([1, 4, 5, 16, 33, 64]))
        if rng.random() < self.fault_rate / 2:
            at = rng.randrange(len(tiles))
            requests[at] = replace(requests[at], softmax_scale=rng.choice([0, 1 << 31, 135 << 23, 0x7FC00000]))
        return requests, weighed

    def weigh(self, tiles: Sequence[int], b: int, dims: int) -> list[Request]:
        """The values of a head: tile by tile through the accumulators, or all at once in slices of dims."""
        rng = self.rng
        if b <= 2 and len(tiles) > 1 and rng.random() < 0.7:
            n = min(dims, 2 * TINY.channels)
            last = len(tiles) - 1
            return [
                self.values_of(tokens, n, b, chain=int(i < last), acc_in=int(i > 0), acc_out=int(i < last))
                for i, tokens in enumerate(tiles)
            ]
        slices = rng.randint(1, 2)
        return [self.values_of(sum(tiles), dims, b, chain=int(i < slices - 1)) for i in range(slices)]

    def values_of(self, tokens: int, dims: int, b: int, **fields: int) -> Request:
        """A request over new values, in a tile with room for more tokens."""
        config, dtype = self.session.driver.config, self.value_dtype
        stride = pack_geometry_transposed(config, dims, tokens, dtype).group_stripes + self.rng.randint(0, 3)
        if expansion_log2(dtype):
            data = pack_transposed_integers(integers(self.rng, tokens, dims, dtype), config, dtype, stride)
        else:
            data = pack_transposed(values(self.rng, tokens, dims), config, stride)
        region = self.session.allocator.allocate(len(data), "values")
        self.session.driver.load(region.address, data)
        d = descriptors.weigh(region.address, len(data), tokens, dims, b, dtype=dtype, **fields)
        return Request(self.spoil(d) if self.rng.random() < self.fault_rate else d)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("manners", [CALM, ROUGH], ids=["calm", "rough"])
def test_random_legal_streams(seed: int, manners: dict[str, Any]) -> None:
    tickets = both(lambda session: AttentionStream(session, seed, 0.0).run(60), 20 + seed, **manners)
    assert {ticket.status for ticket in tickets} == {Status.OK}
    assert sum(ticket.anchors is not None for ticket in tickets) > 8
    assert any(ticket.request.descriptor.transpose and ticket.request.descriptor.acc_in for ticket in tickets)
    assert any(ticket.request.descriptor.source == Source.PREVIOUS for ticket in tickets)
    kinds = {(bool(expansion_log2(d.dtype)), d.transpose) for d in (ticket.request.descriptor for ticket in tickets)}
    assert kinds == {(False, 0), (False, 1), (True, 0), (True, 1)}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("manners", [CALM, ROUGH], ids=["calm", "rough"])
def test_random_streams_with_faults(seed: int, manners: dict[str, Any]) -> None:
    tickets = both(lambda session: AttentionStream(session, 200 + seed, 0.15).run(100), 30 + seed, **manners)
    statuses = {Status(ticket.status or 0) for ticket in tickets}
    assert {Status.OK, Status.CHAIN_ABORTED} < statuses
    assert len(statuses) >= 7, f"too few kinds of refusal to show anything: {statuses}"


@pytest.mark.parametrize("manners", [CALM, ROUGH], ids=["calm", "rough"])
def test_a_cache_that_grows_while_it_is_attended_to(manners: dict[str, Any]) -> None:
    """Prefill, then a token a step; heads over one tile and over several, more rows than two, and rings that wrap."""
    outputs = []

    def scenario(session: Session) -> list[Ticket]:
        rng = random.Random(6)
        for head_dim, kv_heads, group, tile_tokens, prefill, dtype in [
            (64, 2, 3, 32, 70, DType.FP16),
            (40, 1, 5, 128, 30, DType.FP16),
            (16, 2, 1, 64, 1, DType.FP16),
            (40, 1, 3, 128, 126, DType.INT8),
            (64, 1, 1, 256, 127, DType.INT4),
        ]:
            store = KvStore([session], head_dim=head_dim, kv_heads=kv_heads, tile_tokens=tile_tokens, dtype=dtype)
            for step in range(4):
                count = prefill if step == 0 else 1
                keys, weights = (values(rng, count * kv_heads, head_dim) for _ in range(2))
                shape = (count, kv_heads, head_dim)
                store.append(keys.reshape(shape), weights.reshape(shape))
                attended = store.attend(values(rng, kv_heads * group, head_dim), ordinary_softmax_scale(head_dim))
                outputs.append(attended.output)
            store.free()
        return []

    both(scenario, 8, slots=SlotSizes(12, 12), **manners)
    half = len(outputs) // 2
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(outputs[:half], outputs[half:], strict=True))


@pytest.mark.parametrize("where", ["keys", "values", "beyond the tokens"])
def test_bad_memory_behind_a_head(where: str) -> None:
    """A word of a tile that is read fails its descriptor and the rest of its chain; one that is not read does not."""

    def scenario(session: Session) -> list[Ticket]:
        rng, config = random.Random(9), session.driver.config
        k, v = pack_operand(values(rng, 40, 64), config), pack_transposed(values(rng, 40, 16), config, 5)
        region = session.allocator.allocate(len(k) + len(v), "tile")
        session.driver.load(region.address, k + v)
        g = pack_geometry_transposed(config, 16, 40)
        scores = descriptors.scores(region.address, len(k), 40, 64, 2)
        weigh = descriptors.weigh(region.address + len(k), len(v), 40, 16, 2)
        session.driver.port.hdm_fence()
        at = {
            "keys": region.address + 3 * config.stripe_bytes,
            "values": weigh.device_address + (2 * 5 + g.beats - 1) * config.stripe_bytes,
            "beyond the tokens": weigh.device_address + g.beats * config.stripe_bytes,
        }
        inject(session, at[where])
        q = values(rng, 2, 64)
        tickets = session.queue.submit([Request(scores, q, ordinary_softmax_scale(64)), Request(weigh)])
        session.queue.drain()
        return tickets

    tickets = both(scenario, 3)
    expected = {
        "keys": [Status.MEMORY_ERROR, Status.CHAIN_ABORTED],
        "values": [Status.OK, Status.MEMORY_ERROR],
        "beyond the tokens": [Status.OK, Status.OK],
    }
    assert [ticket.status for ticket in tickets] == expected[where]


@pytest.mark.parametrize("kv_dtype", ["fp16", "int8", "int4"])
def test_the_command_finds_the_golden_bits_on_several_rtl_devices(
    capsys: pytest.CaptureFixture[str], kv_dtype: str
) -> None:
    shape = [
        "--heads",
        "6",
        "--kv-heads",
        "2",
        "--head-dim",
        "64",
        "--tokens",
        "90",
        "--steps",
        "2",
        "--gpu-tokens",
        "9",
    ]
    arguments = [
        "attention",
        *shape,
        "--device",
        "rtl",
        "--preset",
        "tiny",
        "--devices",
        "2",
        "--kv-dtype",
        kv_dtype,
        "--json",
    ]
    assert main(arguments) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["match"] is True and data["within_bound"] is True
    for step in data["steps"]:
        # Beats at the least: keys and values of some 41 tokens and two heads, twice for three rows.
        assert all(cycles > 2 * 2 * 2 * 41 * 64 // 64 for cycles in step["core_cycles"])
